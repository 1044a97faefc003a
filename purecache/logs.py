"""Structured logs: one line of JSON per event of interest, through the standard module, with the id of the request.

    logging.getLogger("purecache.log").setLevel(logging.INFO)

Nothing is made of an event unless that logger takes INFO. What may stand in a line is numbers and words of this
package: no tokens, no namespaces, no texts of others but the id of a request (docs/security.md).
"""

import json
import logging
import re

NAME = "purecache.log"
"""Of the logger."""
_LOG = logging.getLogger(NAME)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,40}")
_LONGEST = 128
"""Characters of the id of a request that are kept."""


def log(event: str, request: str | None = None, **fields: int | float | bool | str) -> None:
    """Write a line `{"event": ..., "request": ..., ...}`, if anybody listens. Raises nothing.

    A text that is not one short word of lower case letters, digits and underscores is left out: it may be a secret.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    line: dict[str, int | float | bool | str] = {"event": event}
    if request is not None:
        line["request"] = request[:_LONGEST]
    for name, value in fields.items():
        if not isinstance(value, str) or _WORD.fullmatch(value):
            line[name] = value
    try:
        _LOG.info("%s", json.dumps(line))
    except (TypeError, ValueError):
        _LOG.info('{"event": "not_json"}')

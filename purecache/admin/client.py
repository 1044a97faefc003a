"""Asking an admin server, with the standard library alone."""

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

_OPENER = build_opener(ProxyHandler({}))
"""No proxy: the token is for this machine."""


class AdminError(RuntimeError):
    """The server refused, or can't be reached; the message says why."""


class AdminClient:
    """Calls the admin server at `url` with a token. Raises AdminError for whatever goes wrong."""

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise AdminError(f"{url}: the address of an admin server begins with http:// or https://")
        self._url, self._token, self._timeout = url.rstrip("/"), token, timeout

    def get(self, path: str) -> Any:
        """The result of a GET."""
        return self._ask(Request(self._url + path))

    def post(self, path: str, **fields: Any) -> Any:
        """The result of a POST."""
        body = json.dumps(fields).encode()
        return self._ask(Request(self._url + path, body, {"Content-Type": "application/json"}))

    def _ask(self, request: Request) -> Any:
        request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with _OPENER.open(request, timeout=self._timeout) as answer:
                return json.loads(answer.read())["result"]
        except HTTPError as error:
            raise AdminError(f"{error.code}: {_reason(error)}") from None
        except (URLError, OSError) as error:
            raise AdminError(f"{self._url} can't be reached: {getattr(error, 'reason', error)}") from None
        except (ValueError, KeyError, TypeError):
            raise AdminError(f"{self._url} is no admin server") from None


def _reason(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)

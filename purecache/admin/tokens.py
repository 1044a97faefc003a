"""The token that an operator shows: from the environment, or made and left in a file that only its owner may read."""

import hmac
import os
import secrets
from pathlib import Path

VARIABLE = "PURECACHE_ADMIN_TOKEN"
"""Environment variable with the token."""
LEAST = 16
"""Characters that a token must have."""


class TokenError(ValueError):
    """A token that is too weak, or a file that can't hold it safely. The message never tells the token."""


def default_path() -> Path:
    """The file of a token that was made: in the runtime directory of the user, else in the cache directory."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "purecache" / "admin-token"


def token_of(path: Path | None = None) -> str:
    """The token of the environment variable; without it, a new one, which is written to `path` with mode 0600.

    Raises TokenError for a weak token, or where the file can't be written.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        if len(given) < LEAST or not given.isascii() or not given.isprintable() or " " in given:
            raise TokenError(f"{VARIABLE} must have {LEAST} or more printable ASCII characters, and no blanks")
        return given
    token, target = secrets.token_urlsafe(32), path or default_path()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        # O_EXCL: what someone else put there, a link for instance, is not written to.
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
        beside.replace(target)
    except OSError as error:
        raise TokenError(f"the token can't be written to {target}: {error.strerror}; set {VARIABLE}") from error
    return token


def read_token(path: Path | None = None) -> str:
    """The token that a server on this machine uses: of the environment, or of its file. Raises TokenError."""
    if given := os.environ.get(VARIABLE):
        return given
    target = path or default_path()
    try:
        return target.read_text().strip()
    except OSError as error:
        raise TokenError(
            f"no token: set {VARIABLE}, or name the file of the server ({target}: {error.strerror})"
        ) from error


def is_right(shown: str | None, token: str) -> bool:
    """Whether an Authorization header shows the token; takes the same time whatever is wrong."""
    scheme, _, value = (shown or "").partition(" ")
    same = hmac.compare_digest(value.strip().encode("utf-8", "replace"), token.encode())
    return same and scheme.lower() == "bearer"

"""The server: one thread beside the scheduler, on the loopback interface."""

import ipaddress
import logging
import threading
import time
from pathlib import Path

try:
    import uvicorn
except ImportError as missing:
    raise ImportError("the admin server needs more packages: pip install purecache[admin]") from missing

from purecache.admin.app import make_app
from purecache.admin.tokens import token_of
from purecache.control import Operator

_LOG = logging.getLogger(__name__)
START_SECONDS = 10.0
"""How long `AdminServer` waits until it listens."""


class AdminServer:
    """Serves `make_app` from a thread of its own. Close it before the cache's operator.

    `url` says where. The token is that of the environment variable PURECACHE_ADMIN_TOKEN; without it, a new one is
    written to `token_file` (see `purecache.admin.tokens.default_path`). It is not logged.
    """

    def __init__(
        self,
        operator: Operator,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token_file: Path | None = None,
        beyond_this_machine: bool = False,
    ) -> None:
        """Listen; port 0 takes a free one.

        Raises ValueError for an address that others can reach, unless `beyond_this_machine` says that this is wanted:
        there is no encryption here. TokenError without a safe token, OSError where nothing can listen.
        """
        if not (beyond_this_machine or _is_loopback(host)):
            raise ValueError(
                f"{host} can be reached from other machines, and the token and all prompts would go there in the clear:"
                " listen on 127.0.0.1, or say beyond_this_machine=True and put TLS in front"
            )
        self.token = token_of(token_file)
        config = uvicorn.Config(make_app(operator, self.token), host, port, log_level="warning", access_log=False)
        config.load()
        self._server = uvicorn.Server(config)
        try:
            self._socket = config.bind_socket()
        except SystemExit:  # what uvicorn does where it can't listen
            raise OSError(f"nothing can listen on {host}:{port}: is it in use?") from None
        place = self._socket.getsockname()
        self.url = f"http://{f'[{place[0]}]' if ':' in place[0] else place[0]}:{place[1]}"
        self._thread = threading.Thread(target=self._serve, name="purecache admin server", daemon=True)
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.005)
        if not self._server.started:
            raise OSError(f"the admin server did not start on {host}:{port}")
        _LOG.info("admin server on %s", self.url)

    def close(self, seconds: float = 5.0) -> None:
        """Stop listening; waits at most `seconds` for requests under way. A second call does nothing."""
        self._server.should_exit = True
        self._thread.join(seconds)
        self._socket.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            _LOG.exception("the admin server has ended")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Setting up a client of Mooncake: what it is told of its master, of the network and of the memory that it lends."""

import fcntl
import os
import socket
from collections.abc import Callable
from typing import Any

from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports]

from purecache.stores.options import parse_size

_CONNECT_SECONDS = 2.0
_LEAST_SEGMENT = 16 << 20


def connect(
    master: tuple[str, int],
    *,
    protocol: str = "tcp",
    device: str = "",
    metadata: str = "P2PHANDSHAKE",
    segment: int = 0,
    local_buffer: int = 16 << 20,
    local_host: str = "",
    tenant: str = "default",
    ssd: str = "",
    engine: Any = None,
) -> tuple[Any, Callable[[], None]]:
    """A client of a master that has been set up, and what to call once it is closed.

    Raises ValueError for wrong numbers and for a directory of another store, ConnectionError where no master answers or
    it refuses, and OSError for a directory that can't be used.

    The client's own `setup` tries for 90 seconds where no master answers, and holds up all threads of Python while it
    does: so the master's port is tried first.
    """
    host, port = master
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if 0 < segment < _LEAST_SEGMENT:
        raise ValueError(f"mooncake://{where}: a segment has at least {_LEAST_SEGMENT} bytes, or none, not {segment}")
    if ssd and not segment:
        raise ValueError(f"mooncake://{where}: ssd needs a segment: only what this process lends goes to its disk")
    try:
        with socket.create_connection(master, timeout=_CONNECT_SECONDS) as probe:
            local_host = local_host or probe.getsockname()[0]
    except OSError as error:
        raise ConnectionError(f"mooncake://{where}: no master answers: {error}") from None
    let_go = _own(ssd) if ssd else lambda: None
    if hasattr(engine, "get_engine"):
        engine = engine.get_engine()
    client = MooncakeDistributedStore()
    code = client.setup(
        local_host, metadata, segment, local_buffer, protocol, device, where, engine, bool(ssd), ssd, tenant
    )
    if code != 0:
        let_go()
        raise ConnectionError(f"mooncake://{where}: the client could not be set up (code {code})")
    return client, let_go


def _own(directory: str) -> Callable[[], None]:
    """Hold a directory for this client alone; the function gives it back. Two clients that write into one damage each
    other's files."""
    os.makedirs(directory, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ValueError(f"{directory}: another store has its ssd there: give each its own directory") from None
    return lambda: os.close(descriptor)


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError(f"there is no protocol {text!r}; there are tcp, rdma")
    return text


SETUP: dict[str, Callable[[Any], Any]] = {
    "protocol": _protocol,
    "device": str,
    "metadata": str,
    "segment": parse_size,
    "local_buffer": parse_size,
    "local_host": str,
    "tenant": str,
    "ssd": str,
    "engine": lambda engine: engine,
}
"""What `connect` takes besides a master, and how it is read from a URL."""

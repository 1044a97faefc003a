"""An agent of NIXL with one plug-in: registering memory, and transfers one by one.

What was found of NIXL 1.5.1, and is behind the rules here:

- A transfer has one status for all its parts. Therefore a transfer here has one part only, which costs no throughput.
- Letting go of a transfer that runs raises nothing, against what is documented, and does not end it: the next one of
  the engine aio never finishes. Therefore a transfer is let go only when it has ended.
- It isn't made for calls from several threads: a lock is around each.
"""

import contextlib
import importlib
import itertools
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np


def _import() -> Any:
    try:
        return importlib.import_module("nixl_cu12._api")
    except ImportError:
        with contextlib.suppress(ImportError):
            return importlib.import_module("nixl._api")
        raise


_API = _import()
_NUMBERS = itertools.count()
_NAP, _LONGEST_NAP = 2e-5, 1e-3


class Agent:
    """One NIXL agent. Every method raises OSError for what NIXL refuses; no text of NIXL is in it."""

    def __init__(self, plugin: str, parameters: Mapping[str, str]) -> None:
        """Load a plug-in (`POSIX`, `OBJ`) with parameters, which may hold secrets."""
        self._plugin = plugin
        self._lock = threading.Lock()
        name = f"purecache-{os.getpid()}-{next(_NUMBERS)}"
        with self._errors(f"load the plug-in {plugin}"):
            self._agent: Any = _API.nixl_agent(name, _API.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(plugin, dict(parameters))

    def register(self, memory: str, address: int, nbytes: int, device: int = 0, name: str = "") -> Any:
        """Make known memory (`DRAM`), a file (`FILE`: `device` is its descriptor) or an object (`OBJ`: any number)."""
        with self._errors("register memory"):
            return self._agent.register_memory([(address, nbytes, device, name)], memory, [self._plugin])

    def deregister(self, registered: Any) -> None:
        """Undo `register`. Not while a transfer uses it."""
        with self._errors("deregister memory"):
            self._agent.deregister_memory(registered, [self._plugin])

    def start(self, operation: str, address: int, nbytes: int, memory: str, offset: int, device: int) -> Any:
        """Begin to `READ` into, or `WRITE` from, bytes at an address, and a place in a registered file or object.

        Returns what `has_ended` wants to know, which must be asked until it says so: both memories are in use.
        """
        with self._errors("start a transfer"):
            agent = self._agent
            local = agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            remote = agent.get_xfer_descs([(offset, nbytes, device)], memory)
            handle = agent.initialize_xfer(operation, local, remote, agent.name, b"", [self._plugin])
            try:
                agent.transfer(handle)
            except Exception:
                agent.release_xfer_handle(handle)
                raise
            return handle

    def has_ended(self, handle: Any) -> bool:
        """Whether a transfer is whole; raises OSError if it has ended otherwise. In both cases it is let go."""
        with self._lock:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                state = type(error).__name__
            if state == "PROC":
                return False
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"a transfer of NIXL failed ({state})")
        return True

    def wait(self, handle: Any) -> bool:
        """Wait, however long, until a transfer has ended; whether it is whole."""
        nap = _NAP
        while True:
            try:
                if self.has_ended(handle):
                    return True
            except OSError:
                return False
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_NAP)

    def close(self) -> None:
        """Let go of the agent. Not while a transfer runs."""
        with self._lock:
            self._agent = None

    @contextlib.contextmanager
    def _errors(self, what: str) -> Any:
        with self._lock:
            if what[:4] != "load" and self._agent is None:
                raise OSError("the agent is closed")
            try:
                yield
            except Exception as error:  # its own classes have no common base
                raise OSError(f"NIXL can't {what} ({type(error).__name__})") from None


def address_of(buffer: memoryview) -> int:
    """Where the bytes of a buffer lie, also of one that can't be written to."""
    return np.frombuffer(buffer, np.uint8).ctypes.data

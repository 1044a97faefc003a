"""A real Mooncake master and client processes, in a network of their own that has nothing but a loopback.

Mooncake's data ports are open on all interfaces, so nothing of it runs in the network of the machine. A test file names
its scenarios, functions that take a `Cluster`; each runs as a process of its own: `run_scenario` starts the file as a
script, `main` enters a new network, starts a master and calls the scenario. Clients are processes too: `Client`.
"""

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SIZE = 4096
"""Bytes of a page, trailer included, where a test doesn't say otherwise."""
SKIPPED = 77
"""Exit status of a scenario that can't run here."""

_ROOT = Path(__file__).parents[3]
_LAUNCH = f"""
import runpy, sys, types
sys.path[:0] = [{str(_ROOT)!r}, {str(_ROOT / "tests")!r}]
for name in ("purecache", "purecache.testing"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(_ROOT)!r} + "/" + name.replace(".", "/")]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script without what the packages import by themselves: JAX takes more time than most scenarios."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK, _NEW_USER, _DIE_WITH_PARENT = 0x40000000, 0x10000000, 1


def content(key: str, size: int = SIZE) -> bytes:
    """The bytes that every process expects under a key."""
    return random.Random(key).randbytes(size)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def poll_until(happens: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """What `happens` returns, once that is true."""
    end = soon(seconds)
    while not (found := happens()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return found


class Cluster:
    """A master on fixed ports, which can be killed and started again, and the processes that use it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self.metrics_port = free_port(), free_port()
        self.master: subprocess.Popen[bytes] | None = None

    def start_master(self, lease_ms: int = 2000, *flags: str) -> None:
        import mooncake

        binary = Path(mooncake.__file__).parent / "mooncake_master"
        arguments = [f"--rpc_address=127.0.0.1 --rpc_port={self.port} --metrics_host=127.0.0.1"]
        arguments += [f"--metrics_port={self.metrics_port} --rpc_thread_num=2 --default_kv_lease_ttl={lease_ms}"]
        with (self.directory / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [str(binary), *" ".join(arguments).split(), *flags], stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        poll_until(lambda: self._listens(self.port) and self._listens(self.metrics_port), "the master listens")

    def kill_master(self) -> None:
        assert self.master is not None
        self.master.kill()
        self.master.wait()

    def url(self, prefix: str = "") -> str:
        return f"mooncake://127.0.0.1:{self.port}/{prefix}"

    def open(self, size: int = SIZE, prefix: str = "", **options: Any) -> Any:
        """A store of this process."""
        from purecache.stores.registry import open_store

        return open_store(self.url(prefix), size, metrics=f"127.0.0.1:{self.metrics_port}", **options)

    @contextlib.contextmanager
    def client(self, environment: dict[str, str] | None = None, **options: Any) -> Iterator["Client"]:
        """A store in a process of its own. It is killed in the end, if it wasn't before."""
        client = Client(self, options, environment or {})
        try:
            yield client
        finally:
            client.kill()

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0


class Client:
    """A process with a store, which does what it is told. Answers are the names of what the store answered."""

    def __init__(self, cluster: Cluster, options: dict[str, Any], environment: dict[str, str]) -> None:
        options = {"size": SIZE, **options}
        with (cluster.directory / "client.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _LAUNCH,
                    __file__,
                    str(cluster.port),
                    str(cluster.metrics_port),
                    json.dumps(options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
                preexec_fn=die_with_parent,
            )
        self._result()

    def put(self, *keys: str) -> list[bool]:
        return self._call("put", keys)

    def get(self, *keys: str) -> list[str]:
        """HIT only with the right bytes; WRONG otherwise."""
        return self._call("get", keys)

    def exists(self, *keys: str) -> list[str]:
        return self._call("exists", keys)

    def delete(self, *keys: str) -> list[bool]:
        return self._call("delete", keys)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _call(self, method: str, keys: Sequence[str]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, keys]).encode() + b"\n")
        self.process.stdin.flush()
        return self._result()

    def _result(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait()}"
        return json.loads(line)


def serve(port: str, metrics_port: str, text: str) -> None:
    """The life of a client process: a line of JSON in, one out. What the engine prints goes to the standard error."""
    from purecache.stores.registry import open_store

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(text)
    size, prefix = options.pop("size"), options.pop("prefix", "")
    store = open_store(f"mooncake://127.0.0.1:{port}/{prefix}", size, metrics=f"127.0.0.1:{metrics_port}", **options)
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        method, keys = json.loads(line)
        if method in ("exists", "delete"):
            found = [getattr(each, "name", each) for each in getattr(store, method)(keys, soon())]
        elif method == "put":
            found = store.put(keys, [memoryview(bytearray(content(key, size))) for key in keys], soon())
        else:
            buffers = [memoryview(bytearray(size)) for _ in keys]
            found = [each.name for each in store.get(keys, buffers, soon())]
            right = [buffer == content(key, size) for key, buffer in zip(keys, buffers, strict=True)]
            found = ["WRONG" if each == "HIT" and not fine else each for each, fine in zip(found, right, strict=True)]
        print(json.dumps(found), file=answers, flush=True)


def run_scenario(file: str, name: str, directory: Path, seconds: float = 60.0) -> None:
    """Run a scenario of a test file in a process of its own; skips the test where that can't be done here."""
    import pytest

    if sys.platform != "linux":
        pytest.skip("Mooncake runs on Linux only")
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, file, name, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"GLOG_minloglevel": "3"},
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        pytest.fail(f"{name} took more than {seconds} s:\n{output}")
    if process.returncode == SKIPPED:
        pytest.skip(output.strip().splitlines()[-1])
    assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{output}"
    assert output.rstrip().endswith(f"{name}: done"), f"{name} did not come to its end:\n{output}"


def main(scenarios: dict[str, Callable[[Cluster], None]]) -> None:
    """Run the scenario that the arguments name, in a network of its own. Ends the process."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    try:
        enter_loopback_network()
        try:
            import mooncake.store  # noqa: F401 - whether it can be loaded
        except ImportError as error:
            print(f"Mooncake can't be loaded: {error} (apt-get install libibverbs1)")
            status = SKIPPED
            return
        cluster = Cluster(directory)
        scenarios[name](cluster)
        print(f"{name}: done")
        status = 0
    except PermissionError as error:
        print(f"no network of its own can be made here: {error}")
        status = SKIPPED
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the destructors of the engine, which wait for a master that a scenario has killed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def enter_loopback_network() -> None:
    """Take this process into a new network with a loopback. Raises PermissionError where it may not do that."""
    if _LIBC.unshare(_NEW_NETWORK) != 0 and _LIBC.unshare(_NEW_USER | _NEW_NETWORK) != 0:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        get_flags, set_flags, up = 0x8913, 0x8914, 1
        request = fcntl.ioctl(control, get_flags, struct.pack("16sH22x", b"lo", 0))
        flags = struct.unpack("16sH22x", request)[1]
        fcntl.ioctl(control, set_flags, struct.pack("16sH22x", b"lo", flags | up))
    assert len(Path("/proc/self/net/route").read_text().splitlines()) <= 1, "the new network leads somewhere"


def die_with_parent() -> None:
    _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    serve(*sys.argv[1:])

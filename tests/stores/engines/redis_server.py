"""A Redis server of our own on loopback, for tests."""

import shutil
import signal
import socket
import subprocess
import time

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """It keeps nothing on disk: after a restart, on the same port, it is empty."""

    def __init__(self, *options: str, password: str | None = None) -> None:
        if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
            pytest.skip("needs the programs redis-server and redis-cli: apt-get install redis-server")
        self.port = free_port()
        self.password = password
        self._command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        self._command += ["--appendonly", "no", *(["--requirepass", password] if password else []), *options]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while self.cli("PING", check=False) != "PONG":
            if time.monotonic() > until or self.process.poll() is not None:
                self.kill()
                pytest.fail("the Redis server doesn't start")
            time.sleep(0.02)

    def cli(self, *words: str, data: bytes = b"", check: bool = True) -> str:
        """A command by Redis' own client; with `data`, that is its last argument."""
        login = ["-a", self.password, "--no-auth-warning"] if self.password else []
        command = ["redis-cli", "-h", "127.0.0.1", "-p", str(self.port), *login, *(["-x"] if data else []), *words]
        done = subprocess.run(command, input=data, capture_output=True, timeout=20, check=False)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout.decode(errors="replace").strip()

    def stop(self) -> None:
        """Make it hang until `go_on`: it takes connections and bytes, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

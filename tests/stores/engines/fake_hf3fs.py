"""A fake of `hf3fs_fuse.io` (3FS) over a plain directory, and of the metadata server that sglang has for it.

Strict: it refuses what the real ones refuse (of 3FS: hf3fs_fuse/io.py, src/lib/py/usrbio_binding.cc and
src/lib/api/UsrbIo.cc), and notes in `violations` what those would let pass or crash on, so that no adapter can hide it.
"""

import errno
import http.server
import json
import os
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType


class FakeMount:
    """A mounted 3FS at `root`, and the module `hf3fs_fuse` that reaches it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.violations: list[str] = []
        self.files: dict[int, tuple[int, int]] = {}
        self.vectors = 0
        self.rings: list[FakeRing] = []
        self.held = False
        """Nothing is carried out until `release`."""
        self.results: dict[int, int] = {}
        """Byte offset in the file: the result that a request there gets, without being carried out."""
        self.short: dict[int, int] = {}
        """Byte offset in the file: a request there is carried out only so far."""
        self.raising: dict[str, list[BaseException]] = {"prepare": [], "submit": [], "wait": []}
        self.requests: list[tuple[str, int, int]] = []
        self.lock = threading.Condition()

    def modules(self) -> dict[str, ModuleType]:
        package, io = ModuleType("hf3fs_fuse"), ModuleType("hf3fs_fuse.io")
        for name in ("register_fd", "deregister_fd", "extract_mount_point", "make_iovec", "make_ioring"):
            setattr(io, name, getattr(self, name))
        package.io = io
        return {"hf3fs_fuse": package, "hf3fs_fuse.io": io}

    def blame(self, what: str) -> None:
        with self.lock:
            self.violations.append(what)

    def release(self) -> None:
        with self.lock:
            self.held = False
            self.lock.notify_all()

    def check_let_go(self) -> None:
        """Everything that was made has been let go of, in the right order, and nothing was done that must not be."""
        assert not self.violations, self.violations
        assert not self.files, f"still registered: {self.files}"
        assert self.vectors == 0, f"{self.vectors} iovecs are left, with their links in 3fs-virt"

    # What the module has.

    def extract_mount_point(self, path):
        if not os.path.exists(path):
            raise RuntimeError(f"canonical: No such file or directory: {path}")
        inside = os.path.commonpath([os.path.realpath(path), os.path.realpath(self.root)]) == os.path.realpath(
            self.root
        )
        return str(self.root) if inside else None

    def register_fd(self, fd, flags=0):
        status = os.fstat(fd)
        if self.extract_mount_point(os.readlink(f"/proc/self/fd/{fd}")) is None:
            raise OSError(errno.EBADF, "not on 3FS")
        if fd in self.files:
            raise OSError(errno.EINVAL, "registered already")
        self.files[fd] = (status.st_dev, status.st_ino)

    def deregister_fd(self, fd):
        found = self.files.pop(fd, None)
        try:
            status = os.fstat(fd)
        except OSError:
            return self.blame(f"descriptor {fd} was closed before it was deregistered")
        if found != (status.st_dev, status.st_ino):
            self.blame(f"descriptor {fd} is another file by now")

    def make_iovec(self, shm, hf3fs_mount_point, block_size=0, numa=-1):
        assert isinstance(shm, SharedMemory), "an iovec is made of SharedMemory"
        assert Path(hf3fs_mount_point) == self.root, "an iovec belongs to a mount"
        if not os.path.exists(f"/dev/shm/{shm.name.lstrip('/')}"):
            self.blame("the shared memory was unlinked before the iovec was made of it")
        return FakeVector(self, shm, block_size)

    def make_ioring(
        self, hf3fs_mount_point, entries, for_read=True, io_depth=0, priority=None, timeout=None, numa=-1, flags=0
    ):
        assert Path(hf3fs_mount_point) == self.root, "a ring belongs to a mount"
        assert type(entries) is int
        assert entries > 0
        assert type(for_read) is bool
        assert io_depth == 0
        assert timeout is None or (type(timeout) is int and timeout >= 0), "the timeout of a ring is whole milliseconds"
        ring = FakeRing(self, entries, for_read)
        self.rings.append(ring)
        return ring


class FakeVector:
    def __init__(self, mount, shm, block_size):
        self.mount, self.size, self.block = mount, shm.size, block_size
        # A mapping of its own, as the other side has it: what is late is written even if ours is closed.
        self.other = SharedMemory(name=shm.name, track=False) if _HAS_TRACK else _attached(shm.name)
        self.bytes = self.other.buf
        mount.vectors += 1

    def __del__(self):
        self.mount.vectors -= 1

    def __getitem__(self, part):
        assert isinstance(part, slice), "an iovec is only sliced"
        assert part.step in (None, 1)
        start, stop, _ = part.indices(self.size)
        return FakePart(self, start, stop)


class FakePart:
    def __init__(self, vector, start, stop):
        self.vector, self.start, self.stop = vector, start, stop
        self.result, self.userdata = 0, None


class FakeRing:
    """Results come in the reverse order of requests, at most `entries` are under way."""

    def __init__(self, mount, entries, for_read):
        self.mount, self.entries, self.for_read = mount, entries, for_read
        self.queue: deque = deque()
        self.done: list[FakePart] = []
        self.asking, self.waiting = threading.Lock(), threading.Lock()
        self.most = 0

    def prepare(self, iov, read, fd, off, userdata=None):
        self._alone(self.asking, "prepare")
        try:
            return self._prepare(iov, read, fd, off, userdata)
        finally:
            self.asking.release()

    def _prepare(self, part, read, fd, off, userdata):
        if self.mount.raising["prepare"]:
            raise self.mount.raising["prepare"].pop(0)
        assert type(part) is FakePart, "prepare takes a slice of an iovec"
        assert (type(read), type(fd), type(off)) == (bool, int, int)
        length, block = part.stop - part.start, part.vector.block
        if read is not self.for_read or length <= 0 or off < 0:
            raise OSError(errno.EINVAL, "direction, length or offset")
        if fd not in self.mount.files:
            raise OSError(errno.EBADF, "not registered")
        if len(self.queue) + len(self.done) >= self.entries:
            raise OSError(errno.EAGAIN, "the ring is full")
        if block and part.start // block != (part.stop - 1) // block:
            self.mount.blame(f"a request reaches across the end of a block of {block} bytes")
        for other, *_ in [*self.queue, *((each,) for each in self.done)]:
            if other.vector is part.vector and other.start < part.stop and part.start < other.stop:
                self.mount.blame("memory is used again while a request is under way in it")
            if other.userdata == userdata:
                self.mount.blame("two requests under way have the same userdata")
        part.userdata = userdata
        self.queue.append((part, fd, off))
        self.most = max(self.most, len(self.queue))
        self.mount.requests.append(("read" if read else "write", off, length))
        return self

    def submit(self):
        if self.mount.raising["submit"]:
            raise self.mount.raising["submit"].pop(0)
        return self

    def wait(self, *, max_results=0, min_results=0, timeout=None):
        self._alone(self.waiting, "wait")
        try:
            return self._wait(max(max_results, min_results, 1), min_results, timeout)
        finally:
            self.waiting.release()

    def _wait(self, most, least, timeout):
        assert timeout is None or isinstance(timeout, timedelta), "wait takes a timedelta"
        if self.mount.raising["wait"]:
            raise self.mount.raising["wait"].pop(0)
        if timeout is None and self.mount.held:
            raise AssertionError("waiting without an end")
        end = time.monotonic() + (timeout.total_seconds() if timeout is not None else 60)
        with self.mount.lock:
            while self.mount.held and least > len(self.done) and time.monotonic() < end:
                self.mount.lock.wait(end - time.monotonic())
            if not self.mount.held:
                self._carry_out()
        out, self.done = self.done[:most], self.done[most:]
        return out

    def _carry_out(self):
        while self.queue:
            part, fd, off = self.queue.pop()
            part.result = self._carry_out_one(part, fd, off)
            self.done.append(part)

    def _carry_out_one(self, part, fd, off):
        if fd not in self.mount.files:  # closed meanwhile: the other side has the file, but this test double doesn't
            return -errno.EBADF
        if off in self.mount.results:
            return self.mount.results[off]
        memory = part.vector.bytes[part.start : part.stop]
        try:
            memory = memory[: self.mount.short.get(off, len(memory))]
            if self.for_read:
                return os.preadv(fd, [memory], off)
            return os.pwritev(fd, [memory], off)
        except OSError as error:
            return -(error.errno or errno.EIO)
        finally:
            memory.release()

    def _alone(self, lock, what):
        if not lock.acquire(blocking=False):
            self.mount.blame(f"two threads are in {what} of one ring")
            lock.acquire()


_HAS_TRACK = "track" in SharedMemory.__init__.__code__.co_varnames


def _attached(name):
    """Attach without the resource tracker, which would believe that the memory is ours to unlink."""
    from multiprocessing import resource_tracker

    original, resource_tracker.register = resource_tracker.register, lambda *_: None
    try:
        return SharedMemory(name=name)
    finally:
        resource_tracker.register = original


class FakeMetadataServer:
    """The metadata server of sglang (mini_3fs_metadata_server.py), with its weaknesses, on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        self.ranks: dict[str, dict] = {}
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """Call: the status that it answers with, without doing anything."""
        self.answers: dict[str, object] = {}
        """Call: the JSON that it answers with, without doing anything."""
        self.hanging = threading.Event()
        self.hanging.set()
        self.dropping = 0
        """Idle connections to break off."""
        self.lock = threading.Lock()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.hanging.wait(20)
                if fake.dropping and self.server.seen.get(self.client_address):
                    fake.dropping -= 1
                    self.close_connection = True
                    return
                self.server.seen[self.client_address] = True
                assert self.headers["Content-Type"] == "application/json"
                status, answer = fake.answer(self.path, body)
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.seen = {}
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.hanging.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def save(self) -> str:
        """What the server writes to its file now and then."""
        with self.lock:
            kept = {name: {**rank, "keys": list(rank["keys"].items())} for name, rank in self.ranks.items()}
            return json.dumps(kept)

    def restart(self, saved: str = "{}") -> None:
        with self.lock:
            self.ranks = {name: {**rank, "keys": OrderedDict(rank["keys"])} for name, rank in json.loads(saved).items()}

    def answer(self, path: str, body: dict) -> tuple[int, object]:
        _, rank, call = path.split("/")
        assert rank.isdigit(), "the rank is a number"
        with self.lock:
            self.calls.append(call)
            if call in self.failing:
                return self.failing[call], None
            if call in self.answers:
                return 200, self.answers[call]
            name = f"{rank}:{body.get('namespace', 'kv')}"
            if call == "initialize":
                pages = body["num_pages"]
                self.ranks.setdefault(name, {"pages": pages, "free": list(range(pages)), "keys": OrderedDict()})
                return 204, None
            if name not in self.ranks:
                return 404, {"detail": "not initialized"}
            try:
                answer = getattr(self, f"_{call}")(self.ranks[name], body)
            except KeyError:  # such as an empty dict to evict from
                return 500, {"detail": "Internal Server Error"}
            return (204, None) if answer is None else (200, answer)

    def _exists(self, rank, body):
        return {"exists": [key in rank["keys"] for key in body["keys"]]}

    def _get_page_indices(self, rank, body):
        for key in body["keys"]:
            if key in rank["keys"]:
                rank["keys"].move_to_end(key)
        return {"indices": [rank["keys"].get(key) for key in body["keys"]]}

    def _reserve_and_allocate_page_indices(self, rank, body):
        for each in body["keys"]:
            assert len(each) == 2, "a key, and the key of its prefix"
        found = {key: rank["keys"][key] for key, _ in body["keys"] if key in rank["keys"]}
        for key in found:
            rank["keys"].move_to_end(key)
        answers = []
        for key, _ in body["keys"]:
            if key in found:
                answers.append([True, found[key]])
            else:
                answers.append([False, rank["free"].pop() if rank["free"] else rank["keys"].popitem(last=False)[1]])
        return {"indices": answers}

    def _confirm_write(self, rank, body):
        for key, page in body["written_keys_to_confirm"]:
            rank["keys"][key] = page
            rank["keys"].move_to_end(key)
        rank["free"] += [page for page in body["pages_to_release"] if page not in rank["free"]]

    def _delete_keys(self, rank, body):
        for key in body["keys"]:
            page = rank["keys"].pop(key, None)
            if page is not None and page not in rank["free"]:
                rank["free"].append(page)

    def _clear(self, rank, body):
        rank["free"], rank["keys"] = list(range(rank["pages"])), OrderedDict()

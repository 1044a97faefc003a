"""Other people's readers of KV events, where they are installed.

- PURECACHE_DYNAMO_PYTHON: a Python with `ai-dynamo-runtime` (tried with 1.6.1), whose standalone indexer is run.
- PURECACHE_SGLANG: a folder with the package `sglang` (tried with 0.5.23), of which only `kv_events.py` is loaded.
"""

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
from resident import MEDIA, resident
from test_publisher import Server

from purecache.events import AllBlocksCleared, BlockRemoved, BlockStored, Fold, decode
from purecache.events.wire import Batch, encode

TIERS = {"device": "GPU", "host_pinned": "CPU_PINNED"}
SPACES = (None, (("salt", "s"),), (("adapter", "a"),), (("adapter", "a"), ("salt", "s")))


class Indexer:
    """Dynamo's indexer in a process of its own, asked over HTTP."""

    def __init__(self, python, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [python, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(300):
            try:
                self.ask("/dump")
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("dynamo's indexer did not come up")

    def ask(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def blocks(self):
        """{(rank, medium): set of block hashes}, as unsigned numbers."""
        found = {}
        for each in self.ask("/dump").get("m:default", {"events": []})["events"]:
            for block in each["event"]["data"]["stored"]["blocks"]:
                where = each["event"]["dp_rank"], TIERS[each["storage_tier"]]
                found.setdefault(where, set()).add(block["block_hash"])
        return found


@pytest.fixture
def indexer(tmp_path):
    if not (python := os.environ.get("PURECACHE_DYNAMO_PYTHON")):
        pytest.skip("needs PURECACHE_DYNAMO_PYTHON, a Python with ai-dynamo-runtime")
    with open(tmp_path / "log", "w") as log:
        made = Indexer(python, log)
        yield made
        made.process.terminate()
        made.process.wait(10)


@pytest.fixture
def server():
    made = Server()
    yield made
    made.events.close()


def unsigned(blocks):
    return {where: {name % 2**64 for name in names} for where, names in blocks.items()}


def test_dynamo_knows_exactly_what_is_there(indexer, server):
    """A random life that began before dynamo came (so that it asks for a replay), with resets and all three labels."""
    chance = random.Random(5)

    def step():
        pages = [chance.randint(1, 3) for _ in range(chance.randint(1, 5))]
        tokens = [page for page in pages for _ in range(2)]
        space = {"namespace": chance.choice(SPACES), "rank": chance.randint(0, 1)}
        match, receipt = server.cache.admit(tokens, **space)
        new = server.cache.allocate(len(pages) - len(match.device_pages), rank=space["rank"])
        if new is None:
            server.cache.unlock(receipt)
        else:
            server.cache.finish(tokens, np.concatenate([match.device_pages, new]), receipt, **space)
        if chance.random() < 0.3:
            server.cache.evict(3)
        if chance.random() < 0.2:
            server.cache.load_back(server.cache.match(tokens, **space))
        if chance.random() < 0.03:
            server.cache.reset()
        server.cache.tick()
        assert server.events.flush(server.cache)

    def is_known():
        """Whether dynamo has come to know what is there, within some seconds."""
        wanted = unsigned(resident(server.cache, SPACES))
        for _ in range(100):
            if indexer.blocks() == wanted:
                return True
            time.sleep(0.05)
        return False

    for _ in range(20):
        step()
    indexer.ask(
        "/register",
        {
            "instance_id": 1,
            "endpoint": server.events.address,
            "replay_endpoint": server.events.replay_address,
            "model_name": "m",
            "block_size": 2,
        },
    )
    time.sleep(1)
    for _ in range(8):
        for _ in range(10):
            step()
        assert is_known()
    server.cache.reset()
    server.serve(7, 7, 7, rank=1)
    server.cache.insert([5, 5, 6, 6], server.cache.allocate(2), namespace=SPACES[3])
    server.events.flush(server.cache)
    assert is_known()
    ask = {"model_name": "m", "token_ids": [5, 5, 6, 6, 7, 7]}
    assert indexer.ask("/query", ask)["scores"] == {}
    assert indexer.ask("/query", ask | {"lora_name": "a"})["scores"] == {}
    assert indexer.ask("/query", ask | {"lora_name": "a", "cache_salt": "s"})["scores"] == {"1": {"0": 4}}
    assert indexer.ask("/query", ask | {"token_ids": [7] * 8})["scores"] == {"1": {"1": 6}}


@pytest.fixture
def sglang():
    """The module of sglang that defines its events, without what it needs to run."""
    if not (folder := os.environ.get("PURECACHE_SGLANG")):
        pytest.skip("needs PURECACHE_SGLANG, a folder with the package sglang")
    absent = {"pydantic": ["BaseModel"], "sglang": [], "sglang.srt": [], "sglang.srt.utils": []}
    absent |= {"sglang.srt.runtime_context": ["get_parallel"], "sglang.srt.utils.network": ["NetworkAddress"]}
    before = {name: sys.modules.get(name) for name in absent}
    for name, members in absent.items():
        sys.modules[name] = types.ModuleType(name)
        for member in members:
            setattr(sys.modules[name], member, object)
    path = Path(folder) / "sglang/srt/disaggregation/kv_events.py"
    spec = importlib.util.spec_from_file_location("sglang_kv_events", path)
    module = sys.modules["sglang_kv_events"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name, old in before.items():
        del sys.modules[name]
        if old is not None:
            sys.modules[name] = old


def test_sglang_reads_what_is_written_and_writes_what_is_read(sglang):
    stored = BlockStored([1, -5], None, [1, 2, 3, 4], 2, None, "GPU", "x", "y")
    batch = Batch(1.5, [stored, BlockRemoved([7], MEDIA[1]), AllBlocksCleared()], 3)
    theirs = msgspec.msgpack.Decoder(sglang.KVEventBatch).decode(encode(batch))
    assert theirs.attn_dp_rank == 3
    assert theirs.events == [
        sglang.BlockStored([1, -5], None, [1, 2, 3, 4], 2, None, "GPU", "y", None, "x"),
        sglang.BlockRemoved([7], sglang.StorageMedium.CPU.value),
        sglang.AllBlocksCleared(),
    ]
    assert decode(msgspec.msgpack.encode(theirs)) == batch
    fold = Fold()
    fold.apply(decode(msgspec.msgpack.encode(sglang.KVEventBatch(0.0, theirs.events[:1], 0))))
    assert list(fold.blocks("GPU")) == [1, -5]

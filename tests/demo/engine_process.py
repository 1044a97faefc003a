"""One engine in a process of its own, for test_two_engines: `engine_process.py ROLE STORE TRANSFER`.

Roles: `plain` answers without a cache; `prefill` computes a prompt, stores it, and writes its KV to the file TRANSFER,
which stands for what goes from a prefill engine to a decode engine; `decode` takes that, decodes with offload, and
stops without ending its request; `next` answers prompt and beginning of the answer, with what storage has of it.
"""

import json
import os
import sys
import time

import numpy as np
from engines import ANSWER, KNOWN, PROMPT
from small_model import GEOMETRY, small_model

from purecache.demo.cached import CachedMemory
from purecache.demo.engine import Programs
from purecache.demo.memory import Lease, PlainMemory, pages_for
from purecache.demo.model import Pool
from purecache.demo.scheduler import Engine, Request
from purecache.state import CacheConfig
from purecache.stores.envelope import TRAILER
from purecache.stores.names import ObjectRecord
from purecache.stores.registry import open_store

PAGES, EVERY = 40, 2
NAMING = ObjectRecord("tiny", "1", "float32", "keys,values;layer,token,head,dim", GEOMETRY.page_size, (0, 2), (0, 2))


class DecodeMemory(CachedMemory):
    """Of a decode engine: prompts come with their KV, and answers are offloaded while they grow."""

    transfer: dict[str, np.ndarray]

    def open(self, tokens: np.ndarray, spare: int) -> Lease:
        """Lend pages, and fill them with what the prefill engine has sent."""
        pages = self.cache.allocate(pages_for(len(tokens), self.page_size))
        _, receipt = self.cache.admit(tokens[:0])
        pool, came = self.pool, pages[: PROMPT // self.page_size]
        self.pool = Pool(
            pool.keys.at[:, came].set(self.transfer["keys"]), pool.values.at[:, came].set(self.transfer["values"])
        )
        return Lease(pages, hit=PROMPT, receipt=receipt)

    def advance(self, lease: Lease, tokens: np.ndarray) -> None:
        """Offload whole pages, some at a time."""
        whole = len(tokens) // self.page_size
        if whole - lease.shared < EVERY:
            return
        self.share(lease, tokens)
        node = self.cache.peek(tokens[: whole * self.page_size]).node
        self.cache.backup(node)


def memory(programs: Programs, store: str, kind: type[CachedMemory] = CachedMemory) -> CachedMemory:
    config = CacheConfig(GEOMETRY.page_size, PAGES, host_pages=64, load_back_threshold=1)
    return kind.build(
        config,
        programs.pool(PAGES),
        longest=96,
        shelf=lambda page_bytes: open_store(store, page_bytes + TRAILER),
        naming=NAMING,
    )


def serve(engine: Engine, request: Request) -> Request:
    engine.submit(request)
    if isinstance(engine.memory, CachedMemory) and engine.memory.storage is not None:
        assert engine.memory.storage.flush(60)  # a request that is not alone waits in a queue meanwhile
    while not engine.idle:
        engine.step()
    return request


def main(role: str, store: str, transfer: str) -> dict:
    model = small_model()
    programs, prompt = Programs(model.weights, model.config, GEOMETRY), model.prompt(PROMPT)
    if role == "plain":
        return {
            "answer": serve(
                Engine(programs, PlainMemory(programs.pool(PAGES)), -1), Request("p", prompt, ANSWER)
            ).answer
        }
    with open(transfer + ".json") as file:
        answer = json.load(file)
    if role == "prefill":
        owner = memory(programs, store)
        request = serve(Engine(programs, owner, -1), Request("p", prompt, 1))
        pages = owner.cache.peek(prompt).device_pages
        np.savez(transfer, keys=np.asarray(owner.pool.keys[:, pages]), values=np.asarray(owner.pool.values[:, pages]))
        return {"answer": request.answer, **owner.settle()}
    if role == "decode":
        owner = memory(programs, store, DecodeMemory)
        assert isinstance(owner, DecodeMemory)
        owner.transfer = dict(np.load(transfer))
        engine = Engine(programs, owner, -1)
        request = Request("d", np.append(prompt, np.int32(answer[0])), ANSWER)
        engine.submit(request)
        while len(request.answer) < ANSWER - 2:
            engine.step()
        owner.cache.drain()
        assert owner.storage is not None
        assert owner.storage.flush(60)
        return {"answer": [answer[0], *request.answer], "computed": request.computed}
    owner = memory(programs, store)
    tokens = np.concatenate([prompt, np.asarray(answer[:KNOWN], np.int32)])
    request = serve(Engine(programs, owner, -1), Request("n", tokens, ANSWER - KNOWN))
    found = {"answer": request.answer, "stored": request.stored, "computed": request.computed}
    return found | owner.settle()


if __name__ == "__main__":
    begun = time.monotonic()
    print(json.dumps(main(*sys.argv[1:]) | {"seconds": time.monotonic() - begun}), flush=True)
    os._exit(0)  # as if it were killed: nothing is closed

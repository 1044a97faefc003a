"""The toy engine of the tutorial: what the server of a model does with a prefix cache. Its first page explains it."""

import jax.numpy as jnp
import numpy as np

from purecache import CacheConfig, Interpreter, Load, PrefixCache

SMALL_TABLES = {"ranks": 2, "levels": 4, "max_operations": 4, "max_receipts": 6}
"""Far below the defaults, which are good for a server: these are the sizes that purecache's own tests compile."""
CONFIG = CacheConfig(page_size=2, device_pages=8, host_pages=6, load_back_threshold=2, **SMALL_TABLES)
"""16 tokens on device and 12 on host."""


def model(before, tokens):
    """The KV of `tokens`, given the KV of the token before them: like real KV, it depends on the whole prefix."""
    kv = []
    for token in tokens:
        before = (31 * before + int(token)) % 1_000_003
        kv.append(before)
    return kv


class Engine:
    """Serves one request after the other. `gate` goes to the interpreter, `options` to the cache."""

    def __init__(self, config=CONFIG, gate=None, **options):
        pool = jnp.zeros((config.ranks * config.device_pages, config.page_size), jnp.int32)
        sizes = {"device_pages": config.device_pages, "host_pages": config.host_pages, "ranks": config.ranks}
        self.plane = Interpreter(pool, gate=gate, **sizes)
        self.cache = PrefixCache(config, self.plane, **options)
        self.computed = 0
        """Tokens of the last prompt that had to be computed."""

    def serve(self, prompt):
        """Answer a prompt with its next token."""
        cache, size = self.cache, self.cache.config.page_size
        tokens = np.asarray(prompt, np.int32)
        match, receipt = cache.admit(tokens[:-1])  # one token is always left to compute
        pages = match.device_pages
        if match.host_length and isinstance(load := cache.load_back(match), Load):
            receipt, old = cache.lock(match.node), receipt
            cache.unlock(old)
            pages = np.concatenate([pages, load.pages])
        known = len(pages) * size
        new = cache.allocate(-(-len(tokens) // size) - len(pages))
        if new is None:
            raise RuntimeError("all pages are locked or lent: a scheduler would queue this request")
        pages = np.concatenate([pages, new])
        answer = self._compute(tokens, known, pages)
        cache.finish(tokens, pages, receipt)
        cache.tick()
        return answer

    def _compute(self, tokens, known, pages):
        """Compute the tokens from `known` on into their pages, and the next token from all of them."""
        size = self.cache.config.page_size
        before = int(self.cache.pool[pages[(known - 1) // size], (known - 1) % size]) if known else 0
        kv = model(before, tokens[known:])
        where = np.arange(known, len(tokens))
        self.cache.pool = self.cache.pool.at[pages[where // size], where % size].set(jnp.array(kv, jnp.int32))
        self.computed = len(kv)
        return kv[-1] % 1000

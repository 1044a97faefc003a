"""Finding a prompt in the tree.

Nodes inserted together have consecutive ids, so a walk compares a block of tokens with the nodes that follow the
current one, and asks the hash table only where a path leaves such a run. A hit is always confirmed by comparing the
tokens (and, below a root, the namespace): a collision can cost time, never correctness.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Column
from purecache.transitions.columns import set_entry
from purecache.transitions.scans import first_of, repeat, some, total_of


class Prompt(NamedTuple):
    """A prompt as transitions take it. The number of tokens is padded; `pages` says how much of it counts."""

    tokens: jax.Array
    """[size * page_size] int32."""
    pages: jax.Array
    """[] whole pages to look at, at most size."""
    namespace: jax.Array
    """[4] int32, 128-bit digest of adapter, salt, tenant and so on."""
    rank: jax.Array
    """[] data-parallel rank."""


class Space(NamedTuple):
    """A namespace as transitions take it outside of a prompt."""

    digest: jax.Array
    """[4] int32, see `Prompt.namespace`."""


class Path(NamedTuple):
    """Nodes of a prompt that are in the tree, whether or not their pages are usable."""

    nodes: jax.Array
    """[size + block] node ids, shallowest first; only the first `length` count."""
    length: jax.Array
    """[]."""
    columns: tuple[jax.Array, ...]
    """Each [size + block]: the asked-for columns of the nodes."""


def size_of(state: CacheState, prompt: Prompt) -> int:
    """Padded length of a prompt in pages (static)."""
    return prompt.tokens.shape[0] // state.layout.page_size


def root_of(state: CacheState, rank: jax.Array) -> jax.Array:
    """[] node id of the root of a rank."""
    return (state.layout.nodes + rank).astype(jnp.int32)


def bucket_of(state: CacheState, parent: jax.Array, tokens: jax.Array, namespace: jax.Array) -> jax.Array:
    """[] hash bucket of a page [page_size] below `parent`: multilinear hashing with secret keys, high bits used.

    Each word counts as two halves with a key each: modulo 2**32, the high bits of a product depend on all bits of a
    factor of 16 bits, whereas the highest bits of a whole word would reach the highest bits of the sum only. (Lemire
    and Kaser, "Strongly universal string hashing is fast", 2014: the highest 17 bits are strongly universal.)
    """
    layout = state.layout
    below_root = parent >= layout.nodes
    words = jnp.where(below_root, namespace, 0).view(jnp.uint32)
    total = total_of(state.token, _weighed(state, tokens.view(jnp.uint32), 0))
    total += _weighed(state, parent.astype(jnp.uint32)[None], layout.page_size)[0]
    total += total_of(state.token, _weighed(state, words, layout.page_size + 1))
    mixed = (total ^ (total >> 16)) * jnp.uint32(0x9E3779B1)
    return (mixed >> (33 - layout.buckets.bit_length())).astype(jnp.int32)


def _weighed(state: CacheState, words: jax.Array, first: int) -> jax.Array:
    """[n] what words [n], the first of which has key `first`, add to a hash."""
    lower = state.books[state.layout.hash_keys :].view(jnp.uint32)[first:][: words.shape[0]]
    upper = state.books[state.layout.hash_keys + state.layout.hashed_words :].view(jnp.uint32)[first:][: words.shape[0]]
    return (words & 0xFFFF) * lower + (words >> 16) * upper


def namespace_of(state: CacheState, node: jax.Array) -> jax.Array:
    """[4] the namespace of a node directly below a root."""
    return lax.dynamic_slice(state.nodes, (Column.NAMESPACE, node), (4, 1))[:, 0]


def page_at(state: CacheState, tokens: jax.Array, index: jax.Array) -> jax.Array:
    """[page_size] the tokens of page `index` of a flat array."""
    size = state.layout.page_size
    return lax.dynamic_slice(tokens, (index * size,), (size,))


def find_child(state: CacheState, parent: jax.Array, tokens: jax.Array, namespace: jax.Array) -> jax.Array:
    """[] the child of `parent` with these tokens, as the hash table knows it, or NONE."""

    def differs(node: jax.Array) -> jax.Array:
        same_page = (state.nodes[Column.PARENT, node] == parent) & ~some(
            state.token, page_at(state, state.tokens, node) != tokens
        )
        below_root = parent >= state.layout.nodes
        return ~(same_page & (~below_root | ~some(state.token, namespace_of(state, node) != namespace)))

    first = state.links[bucket_of(state, parent, tokens, namespace)]
    return lax.while_loop(
        lambda node: (node != NONE) & differs(node),
        lambda node: state.links[state.layout.buckets + node],
        first,
    )


def walk(state: CacheState, prompt: Prompt, *columns: int) -> Path:
    """The longest prefix of `prompt` that is in the tree, with some columns of its nodes.

    These are read along the runs, where they lie side by side: several times faster than looking up node by node.
    """
    layout = state.layout
    block, width = layout.block, layout.block * layout.page_size
    tokens = jnp.pad(prompt.tokens, (0, width))
    page_index = jnp.arange(block, dtype=jnp.int32)

    def follow_run(node: jax.Array, depth: jax.Array) -> jax.Array:
        """[] how many pages go on from `node` in the nodes right behind it."""
        there = lax.dynamic_slice(state.tokens, ((node + 1) * layout.page_size,), (width,))
        here = lax.dynamic_slice(tokens, (depth * layout.page_size,), (width,))
        parents = lax.dynamic_slice(state.nodes, (Column.PARENT, node + 1), (1, block))[0]
        unchained = jnp.repeat(parents != node + page_index, layout.page_size)
        run = first_of(state.token, (there != here) | unchained) // layout.page_size
        return jnp.minimum(run, prompt.pages - depth)

    def write(values: tuple[jax.Array, ...], depth: jax.Array, node: jax.Array) -> tuple[jax.Array, ...]:
        """Write the ids and columns of the block of nodes from `node` on."""
        blocks = [node + page_index]
        blocks += [lax.dynamic_slice(state.nodes, (row, node), (1, block))[0] for row in columns]
        return tuple(lax.dynamic_update_slice(old, new, (depth,)) for old, new in zip(values, blocks, strict=True))

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        depth, node, values, _ = carry
        run = follow_run(node, depth)
        values = write(values, depth, node + 1)
        depth, node = depth + run, node + run
        at_branch = (run < block) & (depth < prompt.pages)

        def branch(_: None) -> jax.Array:
            return find_child(state, node, page_at(state, tokens, depth), prompt.namespace)

        child = lax.cond(at_branch, branch, lambda _: jnp.int32(NONE), None)
        found = child != NONE
        # What this writes behind the child is written again by the next step.
        values = lax.cond(found, lambda values: write(values, depth, child), lambda values: values, values)
        return depth + found, jnp.where(found, child, node), values, at_branch & ~found

    start = tuple(jnp.full(size_of(state, prompt) + block, NONE, jnp.int32) for _ in (NONE, *columns))
    depth, _, (nodes, *values), _ = lax.while_loop(
        lambda carry: (carry[0] < prompt.pages) & ~carry[3],
        advance,
        (state.token, root_of(state, prompt.rank), start, jnp.bool_(False)),
    )
    return Path(nodes, depth, tuple(values))


def ancestor(state: CacheState, node: jax.Array, steps: jax.Array) -> jax.Array:
    """[] the node `steps` above `node`."""
    return repeat(state.token, steps, lambda _, node: state.nodes[Column.PARENT, node], node)


def climb(state: CacheState, node: jax.Array, count: jax.Array, size: int) -> jax.Array:
    """[size] `node` and its ancestors, deepest first: `count` of them, NONE beyond."""

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        node, nodes = carry
        return state.nodes[Column.PARENT, node], set_entry(nodes, index, node)

    start = (node, jnp.full(size, NONE, jnp.int32))
    return repeat(state.token, jnp.minimum(count, size), step, start)[1]

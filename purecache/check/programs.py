"""The compiled programs of an exploration: many states, or many events of one kind, per call."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from purecache.check.contracts import Deed, Traits, bit_of, traits_of, verdict_of
from purecache.check.control_events import control_kinds
from purecache.check.drain import drained, is_empty
from purecache.check.events import Kind
from purecache.check.fingerprints import fingerprints
from purecache.check.packing import Packing
from purecache.check.request_events import request_kinds
from purecache.check.transfer_events import transfer_kinds
from purecache.check.views import View, known_view, nodes_of_prompts, view_of
from purecache.check.worlds import World
from purecache.state import CacheState
from purecache.state.laws import broken_laws
from purecache.state.layout import NONE, Column
from purecache.transitions import Transfers

LANES = 2048
"""Events that one call of a program carries out."""


class Survey(NamedTuple):
    """What is known of LANES states before their events."""

    packed: jax.Array
    """int8[lanes, width]."""
    paths: jax.Array
    """uint32[lanes, rows, WORDS]: see `View.paths`."""
    nodes: jax.Array
    """int32[lanes, prompts, size]: see `View.nodes`."""
    marks: tuple[jax.Array, jax.Array]
    """Each uint32[lanes, WORDS]: fingerprints with the eviction orders, and without."""


class Stepped(NamedTuple):
    """What a program of one kind of events answers."""

    packed: jax.Array
    """int8[lanes, width]: the states after the events."""
    fingerprints: jax.Array
    """uint32[lanes, WORDS]."""
    verdicts: jax.Array
    """int32[lanes]: bits of the contracts that are broken."""


class Programs:
    """Compiles and runs the transitions of one world, LANES events at a time."""

    def __init__(self, world: World) -> None:
        self.world, self.packing = world, Packing(world)
        kinds = [*request_kinds(world), *transfer_kinds(world), *control_kinds(world)]
        if unknown := set(world.events) - {kind.name for kind in kinds}:
            raise ValueError(f"world {world.name} has no events named {sorted(unknown)}")
        self.kinds = [kind for kind in kinds if not world.events or kind.name in world.events]
        self.settings = jnp.asarray(self.packing.settings)
        # A step of one pool names at most all pages of a prompt; an eviction for room, those of the device.
        self._entries = world.config.layout.pools * 2 * (world.size + 1)
        self._survey, self._judge = jax.jit(self._surveyed), jax.jit(self._judged)
        self._give_back = jax.jit(self._given_back)
        self._step = [jax.jit(functools.partial(self._stepped, kind)) for kind in self.kinds]

    def survey(self, packed: np.ndarray) -> tuple[Survey, list[jax.Array]]:
        """What the events of LANES packed states need; and per kind bool[lanes, events]: what can happen in them."""
        return self._survey(packed, self.settings)

    def step(self, kind: int, survey: Survey, lanes: np.ndarray, parameters: np.ndarray) -> Stepped:
        """Carry out LANES events of one kind, in the states of a survey named by int32[LANES] `lanes`. Returns at once;
        read the arrays to wait."""
        after, deeds = self._step[kind](survey, lanes, parameters, self.settings)
        return self._judge(survey, lanes, traits_of(self.kinds[kind].name), after, deeds, self.settings)

    def give_back(self, packed: np.ndarray) -> jax.Array:
        """int32[LANES]: the bit of states from which not everything can be given back."""
        return self._give_back(packed, self.settings)

    def compile_all(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every program by running it on the empty cache, two at a time."""
        packed = np.repeat(self.packing.start[None], LANES, axis=0)
        survey, _ = self.survey(packed)

        def compile_one(number: int) -> str:
            if number == len(self.kinds):
                jax.block_until_ready(self.give_back(packed))
                return "give_back"
            parameters = np.repeat(self.kinds[number].parameters[:1], LANES, axis=0)
            jax.block_until_ready(self.step(number, survey, np.zeros(LANES, np.int32), parameters))
            return self.kinds[number].name

        with ThreadPoolExecutor(2) as pool:
            for done, name in enumerate(pool.map(compile_one, range(len(self.kinds), -1, -1)), 1):
                if progress is not None:
                    progress(done, len(self.kinds) + 1, name)

    def _surveyed(self, packed: jax.Array, settings: jax.Array) -> tuple[Survey, list[jax.Array]]:
        def one(packed: jax.Array) -> Any:
            view = view_of(self.packing.unpack(packed, settings), self.world.depth)
            view = view._replace(nodes=nodes_of_prompts(self.world, view))
            enabled = [
                jnp.broadcast_to(kind.enabled(view, kind.named(kind.parameters.T)), len(kind.parameters))
                for kind in self.kinds
            ]
            return view.paths, view.nodes, fingerprints(view, self.world.depth, self.world.exact), enabled

        paths, nodes, marks, enabled = jax.vmap(one)(packed)
        return Survey(packed, paths, nodes, marks), enabled

    def _stepped(
        self, kind: Kind, survey: Survey, lanes: jax.Array, parameters: jax.Array, settings: jax.Array
    ) -> tuple[CacheState, Deed]:
        def prepare(lane: jax.Array, parameters: jax.Array) -> tuple[View, Any]:
            state = self.packing.unpack(survey.packed[lane], settings)
            view = known_view(state, survey.paths[lane], survey.nodes[lane])
            return view, kind.arguments(view, kind.named(parameters))

        views, arguments = jax.vmap(prepare)(lanes, parameters)
        step = _in_one_function(kind.function, small=kind.name != "reset")
        after, effects, reply = step(views.state, arguments)
        return after, jax.vmap(self._deed_of(kind))(views, parameters, arguments, effects, reply)

    def _deed_of(self, kind: Kind) -> Callable[..., Deed]:
        entries, size, pools = self._entries, self.world.size + 1, self.world.config.layout.pools

        def deed(view: View, parameters: jax.Array, arguments: Any, effects: Any, reply: Any) -> Deed:
            p = kind.named(parameters)
            rank, given = (jnp.int32(0), ()) if kind.given is None else kind.given(arguments)
            rows = [_padded(given[pool] if pool < len(given) else None, size) for pool in range(pools)]
            ends = jnp.where(p.flaw == 0, p.operation, NONE) if hasattr(p, "operation") else jnp.int32(NONE)
            return Deed(
                flawed=p.flaw != 0,
                wanted=kind.refused_as(p.flaw),
                status=kind.status(reply),
                number=getattr(reply, "number", jnp.int32(0)),
                most=jnp.int32(size if kind.publishable is None else kind.publishable(view, p)),
                right=jnp.bool_(True) if kind.expected is None else kind.expected(view, p, reply),
                ends=ends,
                rank=jnp.asarray(rank, jnp.int32),
                given=jnp.stack(rows),
                left=jnp.int32(0 if kind.left is None else kind.left(reply)),
                effects=_joined(effects, entries),
            )

        return deed

    def _judged(
        self, survey: Survey, lanes: jax.Array, traits: Traits, after: CacheState, deeds: Deed, settings: jax.Array
    ) -> Stepped:
        depth = self.world.depth

        def judge(lane: jax.Array, after: CacheState, deed: Deed) -> tuple[jax.Array, ...]:
            before = self.packing.unpack(survey.packed[lane], settings)
            was, now = known_view(before, survey.paths[lane], survey.nodes[lane]), view_of(after, depth)
            normal = self.packing.normal(after)
            # The verdict sees the clock and generations of the step; the fingerprint, what is the same in both.
            marks = fingerprints(now._replace(state=normal), depth, self.world.exact)
            same = [jnp.all(mark == old[lane]) for mark, old in zip(marks, survey.marks, strict=True)]
            verdict = verdict_of(traits, deed, was, now, same, depth)
            # Not only of states that are new: what breaks a law may be what a fingerprint leaves out.
            lawful = jnp.stack([times == 0 for times in broken_laws(normal, jnp).values()]).all()
            verdict |= jnp.where(lawful, 0, bit_of("the laws hold"))
            verdict |= jnp.where(self.packing.fits(normal), 0, bit_of("every number fits into a byte"))
            deepest = jnp.max(jnp.where(now.live, after.nodes[Column.DEPTH], 0))
            verdict |= jnp.where(deepest <= depth, 0, bit_of("no prefix is deeper than the prompts"))
            return self.packing.pack(normal), marks[0], verdict

        return Stepped(*jax.vmap(judge)(lanes, after, deeds))

    def _given_back(self, packed: jax.Array, settings: jax.Array) -> jax.Array:
        def give_back(state: CacheState) -> tuple[CacheState, tuple[()], jax.Array]:
            return drained(self.world, state), (), jnp.int32(NONE)

        states = jax.vmap(lambda each: self.packing.unpack(each, settings))(packed)
        after, _, _ = _in_one_function(give_back, small=True)(states, ())
        return jnp.where(jax.vmap(is_empty)(after), 0, bit_of("everything can be given back"))


@functools.lru_cache(maxsize=4)
def programs_of(world: World) -> Programs:
    """The programs of a world, made once: tracing them takes as long as exploring a small world."""
    return Programs(world)


def _padded(pages: jax.Array | None, size: int) -> jax.Array:
    """int32[size] pages, NONE beyond."""
    if pages is None:
        return jnp.full(size, NONE, jnp.int32)
    return jnp.pad(pages.astype(jnp.int32), (0, size - pages.shape[0]), constant_values=NONE)


def _joined(effects: tuple[Transfers, ...], entries: int) -> Transfers:
    """All transfers of one event as one, every field [entries]."""
    none = jnp.full(entries - sum(each.source.shape[0] for each in effects), NONE, jnp.int32)

    def joined(name: str) -> jax.Array:
        parts = [jnp.broadcast_to(getattr(each, name), each.source.shape) for each in effects]
        return jnp.concatenate([*parts, none]).astype(jnp.int32)

    return Transfers(*(joined(name) for name in Transfers._fields))


def _in_one_function(function: Any, small: bool) -> Any:
    """`function` over lanes one after the other, as one native loop: see "One native function per transition" in
    docs/architecture.md. Measured beside `jax.vmap`, which runs each lane to the longest loop of all lanes: 0.8 to
    2 us per event instead of 1.3 to 5.5, and it compiles in half of the time."""

    @jax.jit
    def lanes(states: CacheState, arguments: Any) -> tuple[Any, ...]:
        return lax.map(lambda lane: tuple(function(lane[0], *lane[1])), (states, arguments))

    def run(states: CacheState, arguments: Any) -> tuple[Any, ...]:
        after, effects, reply = lanes(states, arguments)
        if small:
            flat, structure = jax.tree.flatten((effects, reply))
            first = set_xla_metadata(flat[0], inlineable="false", xla_cpu_small_call="true")
            effects, reply = jax.tree.unflatten(structure, [first, *flat[1:]])
        return after, effects, reply

    return run

"""Compiling the copies ahead of time, and reporting what was compiled.

Ahead of time: a program can then neither be recompiled by a call with a slightly different array, nor fail while
tracing when it already owns a donated pool, and the number of programs is the number of entries of the table.
"""

import math
import re
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from purecache.effects.pools import Leaf, PoolLayout
from purecache.meshes import automatic, no_mesh

# What may yield a pool-sized result without touching more than a page: passing it on, or updating a slice in place.
_IN_PLACE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "while",
    "bitcast",
    "fusion",
    "call",
    "conditional",
    "async-done",
    "scatter",
}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(")


@dataclass(frozen=True)
class Program:
    """One compiled copy program."""

    name: str
    """What it does."""
    variant: int
    """Pages it copies at most in one call."""
    compiled: Any
    """The executable; call it with the arrays it was compiled for."""
    pool_sized: tuple[str, ...]
    """Instructions of the optimised program that compute an array as large as a pool leaf: none, if it is in place."""

    def report(self) -> dict[str, Any]:
        """name, variant, temp_bytes, aliased_bytes (device and host memory together), flops, pool_sized."""
        memory = self.compiled.memory_analysis()
        return {
            "name": self.name,
            "variant": self.variant,
            "temp_bytes": memory.temp_size_in_bytes + memory.host_temp_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes + memory.host_alias_size_in_bytes,
            "flops": float((self.compiled.cost_analysis() or {}).get("flops", 0.0)),
            "pool_sized": list(self.pool_sized),
        }


_compiled: dict[tuple[Hashable, ...], Program] = {}
"""Every program of this process: tiers of one shape share them."""


class ProgramTable:
    """The programs of one tier, compiled when first asked for."""

    def __init__(self, layout: PoolLayout, pool_sizes: set[int], *shape: Hashable) -> None:
        """Programs for pools of one layout; an array with one of `pool_sizes` elements is taken for a whole pool.

        shape: whatever else makes the tier's programs what they are.
        """
        self._programs: dict[tuple[str, int], Program] = {}
        self._shape = (layout.leaves, layout.shards, *shape)
        self._options = _compiler_options(layout.leaves) if layout.on_cpu else None
        self._layout = layout
        self._pool_sizes = pool_sizes

    def get(self, name: str, variant: int, lower: Callable[[], Any]) -> Program:
        """The program of that name and variant; `lower()` gives its lowered form if it is not compiled yet."""
        program = self._programs.get((name, variant)) or _compiled.get((*self._shape, name, variant))
        if program is None:
            with no_mesh():
                compiled = lower().compile(compiler_options=self._options)
            found = pool_sized_instructions(_text(compiled), self._pool_sizes)
            program = _compiled[*self._shape, name, variant] = Program(name, variant, compiled, found)
            if found:
                warnings.warn(
                    f"the compiled {name} works on the whole pool in every call ({', '.join(sorted(set(found)))}):"
                    f" {self._advice()}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._programs[name, variant] = program
        return program

    def _advice(self) -> str:
        if self._layout.on_cpu:
            return "keep the pool in an unsigned integer dtype of the same width, or use another jaxlib"
        return "choose other programs for it (the parameter `copies`)"

    def report(self) -> list[dict[str, Any]]:
        """One entry per compiled program (see `Program.report`)."""
        return [program.report() for program in self._programs.values()]


def _text(compiled: Any) -> str:
    """The optimised program; "" where the compiler can't print it, as happens with libtpu 0.0.52 for tpu7x."""
    try:
        return compiled.as_text()
    except Exception:
        return ""


def pool_sized_instructions(text: str, sizes: set[int]) -> tuple[str, ...]:
    """Opcodes in the optimised HLO `text` whose result has one of `sizes` elements and is not an update in place."""
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if not match or match[2] in _IN_PLACE or match[2].startswith("dynamic-update-slice"):
            continue
        if math.prod(int(size) for size in match[1].split(",") if size) in sizes:
            found.append(match[2])
    return tuple(found)


def shape_of(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """An argument to lower with."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=automatic(sharding))


def _compiler_options(leaves: Sequence[Leaf]) -> dict[str, str] | None:
    # These passes turn a bf16 or fp8 pool into f32 and back around every write. A copy computes nothing in the dtype,
    # so it is compiled without them: the pool then stays in place and every bit survives. Unknown names are ignored.
    names = {leaf.dtype.name for leaf in leaves if leaf.carrier != leaf.dtype}
    short = sorted(name.replace("bfloat", "bf").replace("float", "f").replace("_", "") for name in names)
    return {"xla_disable_hlo_passes": ",".join(f"float-normalization-{name}" for name in short)} if short else None

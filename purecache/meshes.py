"""Compiling apart from the mesh that a process has set, whatever the types of its axes."""

from contextlib import AbstractContextManager

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding


def no_mesh() -> AbstractContextManager[object]:
    """Inside, nothing is traced or compiled for the mesh that is set (`jax.set_mesh`).

    Explicit axes would give types to all arrays, and programs for one device would not fit a mesh of more.
    """
    return jax.set_mesh(None)


def automatic(sharding: Sharding | None) -> Sharding | None:
    """The same placement, on a mesh that leaves the axes to the compiler: arrays placed so have no types of axes."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        types = sharding.mesh.axis_types
        if any(kind is not AxisType.Auto for kind in types):
            mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
            return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding

"""How events name prompts, nodes and receipts of a state."""

from typing import Any

import jax
import jax.numpy as jnp

import purecache.transitions as t
from purecache.check.events import STALE
from purecache.check.packing import CLOCK
from purecache.check.views import View
from purecache.check.worlds import World
from purecache.state.layout import NONE, Ledger

GENERATION = 0
"""Every handle of a packed state has this generation."""


def prompt_of(world: World, number: jax.Array) -> t.Prompt:
    """A prompt of the world, as transitions take it."""
    prompts = world.prompts
    columns = (prompts.tokens, prompts.pages, prompts.spaces, prompts.ranks)
    return t.Prompt(*(jnp.asarray(column)[number] for column in columns))


def node_handle(node: jax.Array, flaw: jax.Array) -> t.NodeHandle:
    """A node as it is now, or as it was before it was born."""
    return t.NodeHandle(node, jnp.where(flaw == STALE, CLOCK - 1, CLOCK))


def handle_generation(flaw: jax.Array) -> jax.Array:
    """The generation of what is open now, or of what has ended."""
    return jnp.where(flaw == STALE, GENERATION - 1, GENERATION)


def live_node(view: View, p: Any) -> jax.Array:
    """Whether a parameter `node` names one: roots are never stale."""
    return jnp.where(p.flaw == STALE, view.live[p.node], view.listed[p.node])


def node_numbers(world: World) -> range:
    """Every id that a node or a root can have."""
    return range(world.config.layout.nodes + world.config.ranks)


def is_held(view: View, receipt: jax.Array) -> jax.Array:
    """Whether a receipt is out."""
    return view.state.ledger[Ledger.RECEIPT_NODE, receipt] != NONE


def receipt_of(p: Any) -> t.ReceiptHandle:
    """The receipt that a parameter `receipt` names."""
    return t.ReceiptHandle(p.receipt, handle_generation(p.flaw))

"""Compositions: what a scheduler does with one request, each as one transition."""

import jax
import jax.numpy as jnp
from jax import lax

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Ledger, Scalar, Tier
from purecache.transitions.columns import count, look, masked, put
from purecache.transitions.insert import Offer, insert
from purecache.transitions.lend import all_lent_once, give_back
from purecache.transitions.locks import ReceiptHandle, is_good, issue, lock_path, redeem, unlock_path
from purecache.transitions.match import match
from purecache.transitions.vocabulary import Admitted, Inserted, Locked, Released, Status, Step
from purecache.transitions.walk import Prompt


def admit(state: CacheState, prompt: Prompt) -> Step[Admitted]:
    """Match `prompt` and lock the device part of what it found, so that it stays until `finish` or `abort`."""
    state, _, matched = match(state, prompt)
    vacant = state.books[Scalar.VACANT_RECEIPTS] > 0
    target = masked(vacant, matched.device_node)
    state, handle = issue(lock_path(state, Tier.DEVICE, target), target)
    status = jnp.where(vacant, Status.OK, Status.TABLE_FULL)
    return Step(state, (), Admitted(matched, Locked(status, handle.receipt, handle.generation)))


def finish(state: CacheState, prompt: Prompt, offer: Offer, tail: jax.Array, receipt: ReceiptHandle) -> Step[Inserted]:
    """End a request: insert its whole pages, free its duplicates and `tail` pages [any size], give its receipt back.

    If a page is not lent to the request, or the receipt is not good, nothing is changed.
    """
    state, known = look(state, is_good, receipt)
    state, tail_lent = all_lent_once(state, jnp.clip(prompt.rank, 0, state.layout.ranks - 1), tail)
    twice = jnp.any((tail[:, None] == offer.pages[None, :]) & (tail[:, None] >= 0)) if tail.shape[0] else False
    checked = known & tail_lent & ~twice
    blocked = prompt._replace(pages=jnp.where(checked, prompt.pages, NONE))
    state, _, reply = insert(state, blocked, offer)
    ok = checked & (reply.status == Status.OK)
    state, node = redeem(state, receipt, ok)
    index = jnp.arange(offer.pages.shape[0], dtype=jnp.int32)
    left = masked((index >= reply.length) & (index < prompt.pages), offer.pages)
    leftover = jnp.where(reply.duplicates >= 0, reply.duplicates, left)

    def free(state: CacheState) -> CacheState:
        state = give_back(state, prompt.rank, leftover)
        return give_back(state, prompt.rank, tail)

    state = lax.cond(ok, free, lambda state: state, state)
    state = unlock_path(state, Tier.DEVICE, node)
    status = jnp.where(tail_lent & ~twice, reply.status, Status.BAD_PAGE)
    return Step(state, (), reply._replace(status=jnp.where(known, status, Status.BAD_RECEIPT)))


def abort(state: CacheState, rank: jax.Array, pages: jax.Array, receipt: ReceiptHandle) -> Step[Released]:
    """End a request without inserting anything: free its lent `pages` [size] and give its receipt back.

    If a page is not lent, or the receipt is not good, nothing is changed.
    """
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    state, known = look(state, is_good, receipt)
    state, lent = all_lent_once(state, rank, pages)
    ok = good_rank & known & lent
    state, node = redeem(count(state, CLOCK=ok), receipt, ok)
    state = lax.cond(ok, lambda state: give_back(state, rank, pages), lambda state: state, state)
    state = unlock_path(state, Tier.DEVICE, node)
    status = jnp.where(good_rank, jnp.where(lent, Status.OK, Status.BAD_PAGE), Status.BAD_RANK)
    return Step(state, (), Released(jnp.where(known, status, Status.BAD_RECEIPT)))


def checkpoint(state: CacheState, prompt: Prompt, offer: Offer, receipt: ReceiptHandle) -> Step[Inserted]:
    """Insert what a running request has computed, free its duplicates, and let its receipt lock all of that.

    The receipt stays good. Pages beyond `length` of the reply stay lent. If a page is not lent to the request, or the
    receipt is not good, nothing is changed.
    """
    state, known = look(state, is_good, receipt)
    blocked = prompt._replace(pages=jnp.where(known, prompt.pages, NONE))
    state, _, reply = insert(state, blocked, offer)
    ok = known & (reply.status == Status.OK)
    state = lax.cond(ok, lambda state: give_back(state, prompt.rank, reply.duplicates), lambda state: state, state)
    state, old = look(state, lambda state: state.ledger[Ledger.RECEIPT_NODE, jnp.where(ok, receipt.receipt, 0)])
    state = lock_path(state, Tier.DEVICE, masked(ok, reply.node))
    state = unlock_path(state, Tier.DEVICE, masked(ok, old))
    state = put(state, "ledger", (Ledger.RECEIPT_NODE, masked(ok, receipt.receipt)), reply.node)
    return Step(state, (), reply._replace(status=jnp.where(known, reply.status, Status.BAD_RECEIPT)))

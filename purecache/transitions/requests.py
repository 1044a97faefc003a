"""Compositions: what a scheduler does with one request, each as one transition."""

import jax
import jax.numpy as jnp

from purecache.state.cache_state import CacheState
from purecache.state.layout import NONE, Ledger, Scalar, Tier
from purecache.transitions.columns import count, look, masked, put
from purecache.transitions.insert import Offer, insert_if
from purecache.transitions.lend import all_lent_once, hand_back
from purecache.transitions.locks import ReceiptHandle, is_good, issue, lock_path, redeem, unlock_path
from purecache.transitions.match import match_if, valid_prompt
from purecache.transitions.values import touch_values
from purecache.transitions.vocabulary import Admitted, Inserted, Locked, Released, Status, Step
from purecache.transitions.walk import Prompt


def admit(state: CacheState, prompt: Prompt) -> Step[Admitted]:
    """Match `prompt` and lock the device part of what it found, so that it stays until `finish` or `abort`.

    Without a vacant receipt nothing is changed.
    """
    vacant = state.books[Scalar.VACANT_RECEIPTS] > 0
    state, matched = match_if(state, prompt, vacant)
    target = masked(vacant, matched.device_node)
    state, handle = issue(lock_path(state, Tier.DEVICE, target), target)
    state = touch_values(
        state, Tier.DEVICE, masked(matched.device_length > 0, target), valid_prompt(state, prompt).rank
    )
    status = jnp.where(vacant, Status.OK, Status.TABLE_FULL)
    return Step(state, (), Admitted(matched, Locked(status, handle.receipt, handle.generation)))


def finish(state: CacheState, prompt: Prompt, offer: Offer, receipt: ReceiptHandle) -> Step[Inserted]:
    """End a request: insert its whole pages, free its duplicates, and give its receipt back.

    What is offered behind the whole pages of the prompt [size + any] is freed too. If a page is not lent to the
    request, or the receipt is not good, nothing is changed.
    """
    state, known = look(state, is_good, receipt)
    state, reply = insert_if(state, prompt, offer, known, ends=True)
    ok = reply.status == Status.OK
    state, node = redeem(state, receipt, ok)
    index = jnp.arange(offer.pages.shape[0], dtype=jnp.int32)
    taken = jnp.pad(reply.duplicates, (0, len(index) - len(reply.duplicates)), constant_values=NONE)
    leftover = jnp.where(index < reply.length, taken, offer.pages)
    state = hand_back(state, prompt.rank, masked(ok, leftover))
    state = _hand_back_values(state, prompt.rank, reply)
    return Step(unlock_path(state, Tier.DEVICE, node), (), reply)


def _hand_back_values(state: CacheState, rank: jax.Array, reply: Inserted) -> CacheState:
    for pool, spare in enumerate(reply.spare, 1):
        state = hand_back(state, rank, spare, pool)
    return state


def abort(
    state: CacheState, rank: jax.Array, pages: jax.Array, receipt: ReceiptHandle, values: tuple[jax.Array, ...] = ()
) -> Step[Released]:
    """End a request without inserting anything: free its lent `pages` [size] and give its receipt back.

    values: its lent pages of each tail pool [size].

    If a page is not lent, or the receipt is not good, nothing is changed.
    """
    good_rank = (rank >= 0) & (rank < state.layout.ranks)
    rank = jnp.where(good_rank, rank, 0)
    state, known = look(state, is_good, receipt)
    lent = jnp.bool_(True)
    for pool, given in enumerate((pages, *values)):
        state, good = all_lent_once(state, rank, given, pool)
        lent &= good
    ok = good_rank & known & lent
    state, node = redeem(count(state, CLOCK=ok), receipt, ok)
    for pool, given in enumerate((pages, *values)):
        state = hand_back(state, rank, masked(ok, given), pool)
    state = unlock_path(state, Tier.DEVICE, node)
    status = jnp.where(good_rank, jnp.where(lent, Status.OK, Status.BAD_PAGE), Status.BAD_RANK)
    return Step(state, (), Released(jnp.where(known, status, Status.BAD_RECEIPT)))


def checkpoint(state: CacheState, prompt: Prompt, offer: Offer, receipt: ReceiptHandle) -> Step[Inserted]:
    """Insert what a running request has computed, free its duplicates, and let its receipt lock all of that.

    The receipt stays good. Pages beyond `length` of the reply stay lent. If a page is not lent to the request, or the
    receipt is not good, nothing is changed.
    """
    state, known = look(state, is_good, receipt)
    state, reply = insert_if(state, prompt, offer, known)
    ok = reply.status == Status.OK
    state = hand_back(state, prompt.rank, reply.duplicates)
    state = _hand_back_values(state, prompt.rank, reply)
    state, old = look(state, lambda state: state.ledger[Ledger.RECEIPT_NODE, jnp.where(ok, receipt.receipt, 0)])
    state = lock_path(state, Tier.DEVICE, masked(ok, reply.node))
    state = unlock_path(state, Tier.DEVICE, masked(ok, old))
    state = put(state, "ledger", (Ledger.RECEIPT_NODE, masked(ok, receipt.receipt)), reply.node)
    return Step(state, (), reply)

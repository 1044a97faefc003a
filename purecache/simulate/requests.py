"""The lives of requests: admitted, loaded, computed in chunks, offered to others, finished or taken off again."""

from __future__ import annotations

from typing import Any

import numpy as np

from purecache.answers import Inserted, Load, Loading, Match, Node, Refusal
from purecache.simulate.content import PARTIAL
from purecache.simulate.fate import Finding
from purecache.simulate.process import Process
from purecache.simulate.request import Request
from purecache.state import NONE
from purecache.state.pools import ANCHOR

_EMPTY = np.zeros(0, np.int32)


def admit(process: Process, tokens: list[int], space: dict[str, Any]) -> None:
    """Match a prompt, check the bytes, load back what host has (or begin to), and compute a first chunk."""
    fate = process.fate
    asked = tokens if fate.coin(0.2) else tokens[:-1]
    match, receipt = process.call("admit", asked, **space)
    request = Request(tokens, space, process.prints(space["namespace"]), receipt)
    process.check_match("admit", request.rank, match, request.prints.of(asked))
    fate.seen["pages_hit"] += len(match.device_pages)
    way = fate.below(5) if match.host_length else 0
    if way == 0:
        begin(process, request, match, None)
    elif way < 4:
        answer = process.call("load_back", match)
        loaded(process, request, match, answer)
    else:
        begun = process.call("begin_load_back", match)
        if isinstance(begun, Loading):
            process.books.loadings.append((request, match, begun))
        else:
            begin(process, request, match, None)


def loaded(process: Process, request: Request, match: Match, answer: Load | Refusal) -> None:
    """Go on after a load back: with what it brought, or without."""
    if isinstance(answer, Refusal):
        process.fate.seen["loads_refused"] += 1
        begin(process, request, match, None)
        return
    receipt, old = process.call("lock", match.node), request.receipt
    request.receipt = receipt
    process.call("unlock", old)
    process.check_match("load back", request.rank, match, request.prints.of(request.tokens), answer)
    process.fate.seen["pages_loaded"] += len(answer.pages)
    begin(process, request, match, answer)


def begin(process: Process, request: Request, match: Match, load: Load | None) -> None:
    """Take over what was matched, and lend what computing starts with."""
    pages, values, node = match.device_pages, match.values, match.device_node
    if load is not None:
        pages, values, node = np.concatenate([pages, load.pages]), load.values, match.node
    request.pages, request.shared = pages.tolist(), len(pages)
    request.filled = len(pages) * process.page_size + (process.extra if len(pages) else 0)
    for pool, law in process.laws.items():
        if law.in_place:
            request.rows[pool], request.own[pool] = values[pool].tolist(), set()
    process.requests.append(request)
    if not _own_states(process, request, node):
        take_off(process, request, again=False)
        return
    read(process, request)
    extend(process, request, 1 + process.fate.below(2 * process.page_size + 2))


def _own_states(process: Process, request: Request, node: Node) -> bool:
    for pool, law in process.laws.items():
        if law.in_place:
            continue
        if request.pages:
            slot = process.call("fork", node, pool)
            if isinstance(slot, Refusal):
                return False
        else:
            lent = process.call("allocate", 1, rank=request.rank, pool=pool)
            if lent is None:
                return False
            slot = int(lent[0])
        request.slots[pool] = slot
        _write_state(process, request, pool, fresh=not request.pages)
    return True


def _write_state(process: Process, request: Request, pool: str, fresh: bool) -> None:
    if fresh:
        word = request.prints.state(request.tokens[: request.filled])
        process.write(pool, request.rank, [request.slots[pool]], np.array([word], np.uint64))


def read(process: Process, request: Request) -> None:
    """What a step of the model does: read every page of the request. Raises Finding for wrong bytes."""
    tokens = request.tokens[: request.filled]
    words = request.prints.of(request.tokens)[: process.pages_of(request.filled)]
    whole = len(words)
    process.check("a running request", ANCHOR, request.rank, request.pages[:whole], words)
    for pool, row in request.rows.items():
        first = int(process.laws[pool].first_needed(whole, process.page_size))
        process.check("a running request", pool, request.rank, row[first:whole], words[first:])
    for pool, slot in request.slots.items():
        if request.filled:
            word = process.prints(request.space["namespace"]).state(tokens)
            process.check("a running request", pool, request.rank, [slot], np.array([word], np.uint64))


def extend(process: Process, request: Request, number: int) -> bool:
    """Compute up to so many tokens more; where there is no room, a request is taken off. Whether they were computed."""
    target = min(request.filled + number, len(request.tokens))
    if target == request.filled:
        return True
    if not reserve(process, request, target):
        others = [each for each in process.requests if each.rank == request.rank and each is not request]
        if others and process.fate.coin():
            take_off(process, others[-1], again=True)
        if not (others and reserve(process, request, target)):
            process.fate.seen["preempted"] += 1
            take_off(process, request, again=True)
            return False
    _compute(process, request, target)
    return True


def reserve(process: Process, request: Request, target: int) -> bool:
    """Lend what computing up to token `target` needs, in every pool; False where there is not so much."""
    needed = -(-max(0, target - process.extra) // process.page_size)
    missing = needed - len(request.pages)
    if missing > 0:
        lent = process.call("allocate", missing, rank=request.rank)
        if lent is None:
            return False
        request.pages += lent.tolist()
    for pool, row in request.rows.items():
        row += [NONE] * (len(request.pages) - len(row))
        places = [place for place in range(process.pages_of(request.filled), needed) if row[place] == NONE]
        lent = process.call("allocate", len(places), rank=request.rank, pool=pool) if places else _EMPTY
        if lent is None:
            return False
        for place, page in zip(places, lent.tolist(), strict=True):
            row[place] = page
            request.own[pool].add(page)
    return True


def _compute(process: Process, request: Request, target: int) -> None:
    """Write the words of the pages that become whole; a page in part is undefined. Reads all that is there before."""
    read(process, request)
    first, last = process.pages_of(request.filled), -(-max(0, target - process.extra) // process.page_size)
    words = request.prints.of(request.tokens)[first : process.pages_of(target)]
    words = np.concatenate([words, np.full(last - first - len(words), PARTIAL)])
    process.write(ANCHOR, request.rank, request.pages[first:last], words)
    request.filled = target
    for pool, row in request.rows.items():
        process.write(pool, request.rank, row[first:last], words)
    for pool, slot in request.slots.items():
        word = process.prints(request.space["namespace"]).state(request.tokens[:target])
        process.write(pool, request.rank, [slot], np.array([word], np.uint64))
    if process.fate.coin(0.8):
        _slide(process, request)


def _slide(process: Process, request: Request) -> None:
    """Give up values that are too far back by now."""
    whole = process.pages_of(request.filled)
    for pool, row in request.rows.items():
        first = int(process.laws[pool].first_needed(whole, process.page_size))
        past = [page for page in row[:first] if page in request.own[pool]]
        if past:
            process.call("release", np.array(past, np.int32), rank=request.rank, pool=pool)
            request.own[pool].difference_update(past)
        row[:first] = [NONE] * first


def checkpoint(process: Process, request: Request) -> None:
    """Offer what is computed to others and go on with the tree's pages."""
    whole = process.pages_of(request.filled)
    count = whole if process.fate.coin(0.8) else request.shared + process.fate.below(whole - request.shared + 1)
    rows: dict[str, np.ndarray] = {pool: np.array(row[:count], np.int32) for pool, row in request.rows.items()}
    snapshots = _snapshots(process, request, count)
    for pool, page in snapshots.items():
        rows[pool] = np.full(count, NONE, np.int32)
        rows[pool][-1] = page
    length = count * process.page_size + process.extra
    inserted = process.call(
        "checkpoint",
        request.tokens[:length],
        np.array(request.pages[:count], np.int32),
        request.receipt,
        counted=request.counted,
        priority=process.fate.below(4),
        values=rows,
        **request.space,
    )
    kept = _check_inserted(process, request, inserted, count)
    if kept < request.shared:
        raise Finding("lock", f"a checkpoint kept {kept} pages of {request.shared} that were locked")
    _adopt(process, request, inserted, whole)
    for pool, page in snapshots.items():
        if kept < count:
            process.call("release", np.array([page], np.int32), rank=request.rank, pool=pool)


def _snapshots(process: Process, request: Request, count: int) -> dict[str, int]:
    """Copies of the states of a request, if they belong to the end of the `count` pages that it offers."""
    found: dict[str, int] = {}
    for pool, slot in request.slots.items():
        if not count or request.filled != count * process.page_size:
            continue
        lent = process.call("allocate", 1, rank=request.rank, pool=pool)
        if lent is None:
            continue
        page = int(lent[0])
        if process.call("copy_page", slot, page, pool=pool, rank=request.rank):
            found[pool] = page
        else:
            process.call("release", lent, rank=request.rank, pool=pool)
    return found


def _check_inserted(process: Process, request: Request, inserted: Inserted, count: int) -> int:
    """Check every page that the tree has now; returns how many."""
    kept = len(inserted.pages)
    if kept > count or inserted.length != kept * process.page_size:
        raise Finding("pages", f"{count} pages were offered, the tree has {kept}, {inserted.length} tokens")
    words = request.prints.of(request.tokens)[:kept]
    process.check("insert", ANCHOR, request.rank, inserted.pages, words)
    for pool, row in inserted.values.items():
        places = np.flatnonzero(row[:kept] != NONE)
        process.check("insert", pool, request.rank, row[places], words[places])
    return kept


def _adopt(process: Process, request: Request, inserted: Inserted, whole: int) -> None:
    kept = len(inserted.pages)
    request.pages[:kept] = inserted.pages.tolist()
    request.shared, request.counted = kept, max(request.counted, kept)
    for pool, row in request.rows.items():
        first = min(kept, int(process.laws[pool].first_needed(whole, process.page_size)))
        request.own[pool].difference_update(row[:kept])
        row[:kept] = [NONE] * first + inserted.values[pool][first:kept].tolist()


def finish(process: Process, request: Request) -> None:
    """End a request: its whole pages go to the tree."""
    whole = process.pages_of(request.filled)
    rows: dict[str, np.ndarray] = {pool: np.array(row, np.int32) for pool, row in request.rows.items()}
    for pool, slot in request.slots.items():
        aligned = whole * process.page_size == request.filled and whole
        rows[pool] = np.full(whole if aligned else whole + 1, NONE, np.int32)
        rows[pool][-1] = slot
    inserted = process.call(
        "finish",
        request.tokens[: request.filled],
        np.array(request.pages, np.int32),
        request.receipt,
        counted=request.counted,
        priority=process.fate.below(4),
        values=rows,
        **request.space,
    )
    _check_inserted(process, request, inserted, whole)
    process.requests.remove(request)
    process.books.void.append(request.receipt)
    process.history.append(request.tokens[: request.filled])
    del process.history[:-12], process.books.void[:-6]


def take_off(process: Process, request: Request, again: bool) -> None:
    """Take a request off the device; `again`: it waits to be admitted again."""
    values = {pool: np.array(sorted(pages), np.int32) for pool, pages in request.own.items()}
    values |= {pool: np.array([slot], np.int32) for pool, slot in request.slots.items()}
    lent = np.array(request.pages[request.shared :], np.int32)
    process.call("retract" if again else "abort", lent, request.receipt, rank=request.space["rank"], values=values)
    process.requests.remove(request)
    process.books.void.append(request.receipt)
    if again:
        process.queue.append((request.tokens, request.space))
        del process.queue[:-8]

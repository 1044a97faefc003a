"""Streaming sessions around any prefix cache of sglang's shape: the KV of a conversation waits for its next turn."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from purecache.adapters.build_choice import UnsupportedError


def streaming_session(req: Any) -> str | None:
    """The id of the streaming session that `req` belongs to, as sglang's requests say it; None if it has none."""
    session = getattr(req, "session", None)
    return session.session_id if session is not None and getattr(session, "streaming", False) else None


@dataclass
class UnlockParams:
    """What `dec_lock_ref` is given, in the shape of the servers' `DecLockRefParams`."""

    swa_uuid_for_lock: Any
    """The receipt of the lock, in the field in which schedulers keep it with a request."""
    skip_lock_node_ids: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Session:
    """What a session holds between its turns; empty until its first turn ends."""

    user: Callable[[], Any]
    """Weak reference to the request whose turn it is; gives None when there is none, or it is gone."""
    extra_key: Any
    rank: int
    slots: Any = None
    """Device slots [length] of the tokens whose KV it holds, in the scheduler's own kind of array; None when empty."""
    tokens: list[int] | None = None
    protected: int = 0
    """Tokens at the front that the wrapped cache owns, locked by `node`. The session owns the others."""
    node: Any = None
    receipt: Any = None
    """Of the session's lock of `node`, if the wrapped cache gives any."""
    closing: bool = False
    """Release it when the turn ends."""

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.slots is None else len(self.slots)


class SessionCache:
    """Wraps a prefix cache, so that the next turn of a streaming session continues where the last one ended.

    A session's first turn runs as any request. When it ends well, nothing of it is inserted or freed: the session
    takes over the request's lock and its slots, with those of the last, partly filled page. The next turn of the same
    session gets all of it as its prefix without a search, if its prompt goes on from the same tokens. One request of a
    session has its turn at a time; others are served as if they had no session. A turn that is retracted or aborted
    leaves the session as it was before. A session whose prompt changes within what it holds starts anew.

    Between turns a session keeps no row of the request pool. Everything else, attributes that are set included, goes
    to the wrapped cache. Call it from the scheduler's thread.
    """

    _OWN = frozenset({"_inner", "_sessions", "_session_of", "_held_as_protected", "_template"})

    def __init__(
        self,
        inner: Any,
        *,
        session_of: Callable[[Any], str | None] = streaming_session,
        held_as_protected: bool = True,
    ) -> None:
        """Wrap `inner`.

        session_of: gives the id of a request's streaming session, or None.
        held_as_protected: `protected_size` counts what sessions hold, for schedulers that compare free, evictable and
            protected tokens with the size of the pool. False for those that ask for `session_held_tokens` besides.
        Raises UnsupportedError for a cache of window or recurrent layers.
        """
        for part in ("supports_swa", "supports_mamba", "supports_recurrent"):
            if getattr(inner, part, bool)():
                raise UnsupportedError(
                    f"streaming sessions keep full attention only, and this cache {part.replace('_', ' ')} layers:"
                    " switch streaming sessions off for this model"
                )
        self._inner = inner
        self._session_of = session_of
        self._held_as_protected = held_as_protected
        self._sessions: dict[str, _Session] = {}
        self._template: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in SessionCache._OWN:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SessionCache._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    # ---- requests ------------------------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> Any:
        """The prefix of a request: what its session holds, or what the wrapped cache finds."""
        req = getattr(params, "req", None)
        name = None if req is None else self._session_of(req)
        if name is None:
            return self._inner.match_prefix(params)
        session = self._sessions.get(name)
        if getattr(req, "to_finish", None) is not None:
            # Aborted before it began: its prompt may have been replaced, so it says nothing about the session.
            if session is not None and session.user() is req:
                session.user = _nobody
            _tell(req, "abort_req")
            return self._inner.match_prefix(params)
        if session is not None and session.user() is not req and _has_turn(session.user()):
            return self._inner.match_prefix(params)
        key = params.key
        if session is None or not self._continues(session, req, key):
            if session is not None:
                self._free(session)
            self._sessions[name] = _Session(weakref.ref(req), getattr(key, "extra_key", None), _rank(req))
            return self._inner.match_prefix(params)
        session.user = weakref.ref(req)
        return self._answer(session, params)

    def cache_unfinished_req(self, req: Any, **kwargs: Any) -> None:
        """Keep the KV that `req` has so far: with its session from the second turn on, else in the wrapped cache."""
        session = self._turn_of(req)
        if session is None or session.slots is None:
            self._inner.cache_unfinished_req(req, **kwargs)
            return
        filled = getattr(req, "fill_len", None)
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        req.prefix_indices = _copy(row[: len(req.fill_ids) if filled is None else filled], self._template)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """End the turn of a session, or any other request. The caller frees the row and what was not committed."""
        session = self._turn_of(req)
        reason = getattr(req, "finished_reason", None)
        good = reason is not None and not getattr(reason, "is_error", False)
        if session is None or (session.slots is None and (session.closing or not good)):
            self._inner.cache_finished_req(req, is_insert=is_insert, **kwargs)
        elif good:
            self._take(session, req)
        else:
            self._roll_back(session, req)
        if session is None:
            return
        session.user = _nobody
        if reason is not None:
            _tell(req, *(("finish_req", req) if good else ("abort_req",)))
        if session.closing:
            self._drop(session)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def release_session(self, session_id: str) -> None:
        """Close a session and free what it holds; when its turn is running, once that ends. Unknown ids are ignored."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if _runs(session.user()) or (session.slots is None and _has_turn(session.user())):
            session.closing = True
        else:
            self._drop(session)

    def session_rank(self, session_id: str) -> int | None:
        """The data-parallel rank that has a session's KV, where its next turn belongs; None if it holds nothing."""
        session = self._sessions.get(session_id)
        return None if session is None or session.slots is None else session.rank

    def supports_streaming_session(self) -> bool:
        """Always: that is what the wrapper is for."""
        return True

    def reset(self) -> None:
        """Forget everything. As for any prefix cache, the caller clears the pools: no slot is freed here."""
        self._sessions.clear()
        self._inner.reset()

    # ---- accounting ----------------------------------------------------------------------------------------------

    def session_held_tokens(self, active_pool_idxs: set[int] | None = None, *, dp_rank: int | None = None) -> int:
        """Tokens in pages that sessions own (whole pages), neither free nor in the wrapped cache.

        active_pool_idxs: leave out the sessions whose turn runs in one of these rows of the request pool; a scheduler
            counts those slots with the request. dp_rank: of this rank only.
        """
        total = 0
        for session in self._sessions.values():
            row = getattr(session.user(), "req_pool_idx", None)
            if session.slots is None or (dp_rank is not None and session.rank != dp_rank):
                continue
            if active_pool_idxs is None or row is None or row not in active_pool_idxs:
                total += self._ceil(session.length) - session.protected
        return total

    session_held_full_tokens = session_held_tokens

    def session_held_req_count(self, active_pool_idxs: set[int] | None = None) -> int:
        """Rows of the request pool that sessions hold: none."""
        return 0

    session_held_swa_tokens = session_held_mamba_slots = session_held_req_count

    def protected_size(self, *args: Any, **kwargs: Any) -> int:
        """Tokens of the wrapped cache that are locked, and, unless counted apart, those that sessions hold."""
        return self._inner.protected_size(*args, **kwargs) + self._held(*args, **kwargs)

    def full_protected_size(self, *args: Any, **kwargs: Any) -> int:
        """As `protected_size`."""
        return self._inner.full_protected_size(*args, **kwargs) + self._held(*args, **kwargs)

    def sanity_check(self) -> None:
        """The wrapped cache's own check, which expects no locks: left out while sessions hold some."""
        if all(session.slots is None for session in self._sessions.values()):
            self._inner.sanity_check()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _turn_of(self, req: Any) -> _Session | None:
        name = self._session_of(req)
        session = None if name is None else self._sessions.get(name)
        return session if session is not None and session.user() is req else None

    def _continues(self, session: _Session, req: Any, key: Any) -> bool:
        """Whether the session's KV is a prefix of `key`, if need be after giving up a part that the session owns."""
        if session.slots is None or session.rank != _rank(req) or session.extra_key != getattr(key, "extra_key", None):
            return False
        common = _common(session.tokens or [], list(key.token_ids[: min(len(key), session.length)]))
        if common < max(session.protected, 1):
            return False
        if common < session.length:
            self._free_slots(session.slots[self._ceil(common) :], session.rank)
            session.slots, session.tokens = session.slots[:common], (session.tokens or [])[:common]
        return True

    def _answer(self, session: _Session, params: Any) -> Any:
        """The match result of a turn. Its lock is a lock of the session's node, besides the session's own."""
        if self._template is None:
            self._template = self._inner.match_prefix(replace(params, key=params.key[:0], req=None))
        nodes = dict.fromkeys(("last_device_node", "last_host_node", "best_match_node"), session.node)
        owned = {"cache_protected_len": session.protected} if "cache_protected_len" in self._template._fields else {}
        return self._template._replace(device_indices=_copy(session.slots, self._template), **nodes, **owned)

    def _take(self, session: _Session, req: Any) -> None:
        """Make what `req` committed the session's."""
        committed = req.pop_committed_kv_cache()
        tokens = [*req.origin_input_ids, *req.output_ids][:committed]
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        # Speculation may have committed more than the answer has.
        self._free_slots(row[self._ceil(len(tokens)) : committed], session.rank)
        if session.slots is None:
            matched = getattr(req, "last_matched_prefix_len", req.cache_protected_len)
            session.protected = min(req.cache_protected_len, matched)
            session.node, session.receipt = req.last_node, getattr(req, "swa_uuid_for_lock", None)
        else:
            self._unlock(req.last_node, getattr(req, "swa_uuid_for_lock", None))
        session.slots, session.tokens = _copy(row[: len(tokens)]), tokens

    def _roll_back(self, session: _Session, req: Any) -> None:
        """Free what `req` added to the session, whose own slots it has not written."""
        committed = req.pop_committed_kv_cache()
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        self._free_slots(row[self._ceil(session.length) : committed], session.rank)
        self._unlock(req.last_node, getattr(req, "swa_uuid_for_lock", None))

    def _drop(self, session: _Session) -> None:
        forgotten = {
            name
            for name, other in self._sessions.items()
            if other is session or (other.closing and other.slots is None and not _has_turn(other.user()))
        }
        self._free(session)
        for name in forgotten:
            del self._sessions[name]

    def _free(self, session: _Session) -> None:
        if session.slots is None:
            return
        self._free_slots(session.slots[session.protected :], session.rank)
        self._unlock(session.node, session.receipt)
        session.slots = None

    def _unlock(self, node: Any, receipt: Any) -> None:
        if receipt is None:
            self._inner.dec_lock_ref(node)
        else:
            self._inner.dec_lock_ref(node, UnlockParams(receipt))

    def _free_slots(self, slots: Any, rank: int) -> None:
        if not len(slots):
            return
        allocator = self.token_to_kv_pool_allocator
        # Allocators of one rank per process know no ranks.
        # An own copy: allocators may keep it, and rows are written again.
        allocator.free(_copy(slots), **({"dp_rank": rank} if hasattr(allocator, "dp_size") else {}))

    def _held(self, dp_rank: int = 0) -> int:
        return self.session_held_tokens(dp_rank=dp_rank) if self._held_as_protected else 0

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size


def _nobody() -> None:
    """The user of a session between turns."""


def _rank(req: Any) -> int:
    return getattr(req, "dp_rank", None) or 0


def _runs(req: Any) -> bool:
    """Whether it has a row of the request pool, and so perhaps KV."""
    return getattr(req, "req_pool_idx", None) is not None


def _has_turn(req: Any) -> bool:
    """Whether it runs or waits to. Two requests must never write behind the same prefix, so a doubt means yes."""
    ended = getattr(req, "finished_reason", None) is not None or getattr(req, "to_finish", None) is not None
    return req is not None and (_runs(req) or not ended)


def _tell(req: Any, call: str, *arguments: Any) -> None:
    """Tell the scheduler's session object, if it wants to know."""
    if notify := getattr(getattr(req, "session", None), call, None):
        notify(*arguments)


def _common(held: list[int], asked: list[int]) -> int:
    """Length of the common prefix."""
    if held[: len(asked)] == asked:
        return len(asked)
    return next(place for place, (one, other) in enumerate(zip(held, asked, strict=False)) if one != other)


def _copy(slots: Any, template: Any = None) -> Any:
    """An own copy of a row of slots (NumPy array or torch tensor), in the dtype of the template's."""
    dtype = slots.dtype if template is None else template.device_indices.dtype
    return slots.to(dtype=dtype, copy=True) if hasattr(slots, "clone") else slots.astype(dtype)

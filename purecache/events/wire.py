"""KV events as bytes: msgpack in the shapes that vLLM and sglang publish.

A batch is the array `[ts, events, data_parallel_rank]`. An event is a map with its kind under "type" (sglang since
0.5.20 or so, and vLLM now), or an array that begins with its kind (vLLM and sglang before that). Written are both,
read is either. Sources: `vllm/distributed/kv_events.py`, `sglang/srt/disaggregation/kv_events.py` of sglang 0.5.23.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

try:
    import msgspec
except ImportError as error:
    raise ImportError("KV events need msgspec and pyzmq: pip install purecache[events]") from error

BlockHash = int | bytes
"""Names a block with all that stands before it. purecache publishes `purecache.stores.keys.event_id`: an int64."""
Form = Literal["maps", "arrays"]
"""How events are written."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that follow each other in one prefix have come into a medium.

    Fields without a default are always written: readers that name them require them.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """The block before the first one; None where a prefix begins."""
    token_ids: list[int | tuple[int, int]]
    """block_size per block: tokens, or pairs of neighbours for a tree of bigrams."""
    block_size: int
    lora_id: int | None
    """Always None; readers of older versions want it."""
    medium: str | None
    lora_name: str | None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that have left a medium."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing is left, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in get_args(Event)}
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""What the places of an event that is an array mean."""
_OPTIONAL = {"BlockStored": ("parent_block_hash", "lora_id", "medium", "lora_name"), "BlockRemoved": ("medium",)}
"""Fields that older versions did not have."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """Events of one rank that belong together. All three places are written, None or not."""

    ts: float
    """Unix time of its making, in seconds."""
    events: list[Event]
    data_parallel_rank: int | None
    """None: blocks that were inserted with rank None."""


_encoder = msgspec.msgpack.Encoder()


def encode(batch: Batch, form: Form = "maps") -> bytes:
    """The payload of a batch."""
    if form == "maps":
        return _encoder.encode(batch)
    return _encoder.encode([batch.ts, [_row(event) for event in batch.events], batch.data_parallel_rank])


def _row(event: Event) -> list[Any]:
    kind = type(event).__name__
    if not isinstance(event, BlockStored):
        return [kind, *(getattr(event, name) for name in _FIELDS[kind])]
    return [kind, *(getattr(event, name) for name in _FIELDS[kind][:-1]), _extra_keys(event)]


def _extra_keys(event: BlockStored) -> list[tuple[str, ...] | None] | None:
    """What vLLM hashes beside the tokens, per block: the adapter of each, and the salt of one that begins a prefix."""
    always = (event.lora_name,) if event.lora_name is not None else ()
    first = (event.cache_salt,) if event.cache_salt is not None and event.parent_block_hash is None else ()
    if not (always or first):
        return None
    each: list[tuple[str, ...] | None] = [always or None] * len(event.block_hashes)
    each[0] = (*always, *first)
    return each


def decode(payload: bytes) -> Batch:
    """The batch in a payload. Unknown fields are passed over; raises ValueError for what is no batch."""
    try:
        raw = msgspec.msgpack.decode(payload)
        if isinstance(raw, dict):
            ranks = (raw.get(name) for name in ("data_parallel_rank", "attn_dp_rank"))
            raw = [raw["ts"], raw["events"], next((rank for rank in ranks if rank is not None), None)]
        ts, events, *rest = raw
        rank = msgspec.convert(rest[0] if rest else None, int | None)
        return Batch(msgspec.convert(ts, float), [_event(each) for each in events], rank)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no batch of KV events: {type(error).__name__}") from None


def _event(raw: Any) -> Event:
    if isinstance(raw, dict):
        kind, fields = raw["type"], dict(raw)
    else:
        kind, *values = raw
        fields = dict(zip(_FIELDS[kind], values, strict=False))
        if extra := fields.pop("extra_keys", None):
            fields["cache_salt"] = _salt_in(extra, fields)
    for name in _OPTIONAL.get(kind, ()):
        fields.setdefault(name, None)
    fields["type"] = kind
    return msgspec.convert(fields, _KINDS[kind])  # type: ignore[return-value]


def _salt_in(extra: Sequence[Sequence[Any] | None], fields: dict[str, Any]) -> str | None:
    """The salt among the extra keys of a block that begins a prefix, as `_extra_keys` puts it there."""
    if fields.get("parent_block_hash") is not None or not extra[0]:
        return None
    keys = list(extra[0])
    if fields.get("lora_name") in keys:
        keys.remove(fields["lora_name"])
    return next((key for key in keys if isinstance(key, str)), None)

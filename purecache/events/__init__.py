"""KV events: which blocks of a cache are where, for routers, as vLLM and sglang publish it (docs/events.md).

Needs the extra `events`.
"""

from purecache.events.fold import Block, Fold, block_hashes
from purecache.events.labels import Label, label_of
from purecache.events.publisher import KvEvents
from purecache.events.subscriber import Subscriber
from purecache.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, decode, encode

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "Block",
    "BlockRemoved",
    "BlockStored",
    "Fold",
    "KvEvents",
    "Label",
    "Subscriber",
    "block_hashes",
    "decode",
    "encode",
    "label_of",
]

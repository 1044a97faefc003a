"""What a router makes of KV events: which blocks are where."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from purecache.events.wire import AllBlocksCleared, Batch, BlockHash, BlockRemoved, BlockStored
from purecache.namespaces import Namespace
from purecache.stores.keys import Tokens, event_id, page_keys, seed_of


@dataclass(frozen=True, slots=True)
class Block:
    """What was told of one block."""

    parent: BlockHash | None
    """The block above it; None where a prefix begins."""
    tokens: tuple[int, ...] | tuple[tuple[int, int], ...]
    lora_name: str | None = None
    cache_salt: str | None = None


class Fold:
    """The blocks of one publisher, by rank and medium. Batches must come in order and without gaps (`Subscriber`)."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int | None, str | None], dict[BlockHash, Block]] = {}
        self.orphans = 0
        """Blocks so far that came below a block that was in no medium: a sign of lost events."""

    def apply(self, batch: Batch) -> None:
        """Take in a batch."""
        rank = batch.data_parallel_rank
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._blocks = {where: blocks for where, blocks in self._blocks.items() if where[0] != rank}
            elif isinstance(event, BlockRemoved):
                blocks = self._blocks.get((rank, event.medium), {})
                for name in event.block_hashes:
                    blocks.pop(name, None)
            else:
                self._store(rank, event)

    def _store(self, rank: int | None, event: BlockStored) -> None:
        parent, width = event.parent_block_hash, event.block_size
        above = [blocks for where, blocks in self._blocks.items() if where[0] == rank]
        if parent is not None and not any(parent in blocks for blocks in above):
            self.orphans += len(event.block_hashes)
        blocks = self._blocks.setdefault((rank, event.medium), {})
        for place, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[place * width : (place + 1) * width])
            blocks[name] = Block(parent, tokens, event.lora_name, event.cache_salt)  # type: ignore[arg-type]
            parent = name

    def clear(self) -> None:
        """Forget everything: the publisher began anew."""
        self._blocks.clear()

    @property
    def places(self) -> list[tuple[int | None, str | None]]:
        """Ranks and media that have blocks."""
        return [where for where, blocks in self._blocks.items() if blocks]

    def blocks(self, medium: str | None, rank: int | None = 0) -> dict[BlockHash, Block]:
        """A copy of the blocks of a rank in one medium."""
        return dict(self._blocks.get((rank, medium), {}))

    def longest(
        self, hashes: Sequence[BlockHash], rank: int | None = 0, media: Iterable[str | None] = ("GPU", "CPU_PINNED")
    ) -> int:
        """How many blocks of a prompt, from its first on, are in any of the media."""
        there = [self._blocks.get((rank, medium), {}) for medium in media]
        for number, name in enumerate(hashes):
            if not any(name in blocks for blocks in there):
                return number
        return len(hashes)


def block_hashes(tokens: Tokens, page_size: int, namespace: Namespace = None, *, bigrams: bool = False) -> list[int]:
    """What purecache calls the whole pages of a prompt, in any process. Arguments as those of `PrefixCache.match`."""
    return [event_id(key) for key in page_keys(tokens, page_size, seed_of(namespace), bigrams)]

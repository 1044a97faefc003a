"""What is where in a cache, worked out from its state alone, to compare with what its events say."""

import numpy as np
from support import digest_of, tree_of

from purecache.state.layout import Column, Stored
from purecache.stores.keys import event_id, page_keys, seed_of

MEDIA = ("GPU", "CPU_PINNED", "EXTERNAL")


def resident(cache, spaces, storage=False):
    """{(rank, medium): {block hash: hash of the block above}}; a namespace without a rank has the rank None.

    spaces: all namespaces that were used.
    """
    names = {digest_of(space, no_rank): (space, no_rank) for space in spaces for no_rank in (False, True)}
    state = cache.state
    nodes, found = np.array(state.nodes), {}
    for path, node in tree_of(state, names).items():
        (space, no_rank), first = path[1]
        tokens = [token for page in (first, *path[2:]) for token in page]
        keys = page_keys(tokens, cache.config.page_size, seed_of(space))
        here = [nodes[row, node] >= 0 for row in (Column.DEVICE_PAGE, Column.HOST_PAGE)]
        here.append(storage and any(here) and nodes[Column.STORED, node] == Stored.YES)
        for medium, there in zip(MEDIA, here, strict=True):
            if there:
                blocks = found.setdefault((None if no_rank else path[0], medium), {})
                blocks[event_id(keys[-1])] = event_id(keys[-2]) if len(keys) > 1 else None
    return found


def folded(fold):
    """The same of a `Fold`."""
    return {
        (rank, medium): {name: block.parent for name, block in fold.blocks(medium, rank).items()}
        for rank, medium in fold.places
    }

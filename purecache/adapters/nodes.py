"""What a scheduler holds of the tree: nodes as opaque handles, and a view for policies that walk it."""

import numpy as np

from purecache.answers import Node
from purecache.cache import PrefixCache
from purecache.state.layout import Column

MARKED = 1 << 16
"""Nodes that schedulers were told of lately, which the view of the tree does not skip."""


class TreeNode:
    """A prefix in the tree. Equal to every other handle of the same node; do not keep it beyond its eviction."""

    __slots__ = ("_view", "length", "node", "prompt", "rank")

    def __init__(
        self,
        view: "TreeView",
        node: Node,
        rank: int | None = 0,
        length: int = 0,
        prompt: tuple[np.ndarray, str | None] | None = None,
    ) -> None:
        self._view = view
        self.node = node
        """The node of the cache."""
        self.rank = rank
        """Data-parallel rank; None is accounted to rank 0."""
        self.length = length
        """Tokens from the root to here."""
        self.prompt = prompt
        """(tokens, namespace) whose first `length` tokens it stands for, if that was asked for."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeNode) and other.node.number == self.node.number

    def __hash__(self) -> int:
        return hash(self.node.number)

    def __repr__(self) -> str:
        return f"TreeNode({self.node.number}, {self.length} tokens)"

    @property
    def children(self) -> dict[int, "TreeNode"]:
        """The nodes below it on device, without those that only lead on to one other (see `TreeView`)."""
        return self._view.children(self)


class TreeView:
    """The tree on device as a compressed one: pages in a row count as one node, unless a scheduler holds one of them.

    Depth is then that of the branches, so that recursive walks are safe. It is made when it is asked for, from a copy.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.root = TreeNode(self, Node(cache.config.layout.nodes, 0))
        """Stands for the roots of all ranks."""
        self._marked: dict[int, None] = {}
        self._children: dict[int, list[int]] | None = None
        self._ranks, self._clock = np.zeros(0, np.int32), 0

    def handle(
        self, node: Node, length: int, rank: int | None, prompt: tuple[np.ndarray, str | None] | None = None
    ) -> TreeNode:
        """A handle of the node that a match found at `length` tokens; the root for 0."""
        if length == 0:
            return self.root
        self._marked.pop(node.number, None)
        self._marked[node.number] = None
        if len(self._marked) > MARKED:
            del self._marked[next(iter(self._marked))]
        self._children = None
        return TreeNode(self, node, rank, length, prompt)

    def changed(self) -> None:
        """The tree is another one now."""
        self._children = None

    def children(self, node: TreeNode) -> dict[int, TreeNode]:
        """Handles of the children by node id."""
        if self._children is None:
            self._children = self._branches()
        clock = self._clock
        return {
            number: TreeNode(self, Node(number, clock), int(self._ranks[number]))
            for number in self._children.get(node.node.number, ())
        }

    def _branches(self) -> dict[int, list[int]]:
        columns = self._cache.columns(Column.PARENT, Column.DEVICE_PAGE, Column.DEVICE_CHILDREN, Column.RANK)
        parents, pages, children, self._ranks = columns
        self._clock = self._cache.clock
        nodes, root = self._cache.config.layout.nodes, self.root.node.number
        live = np.flatnonzero(pages[:nodes] >= 0)
        kept = np.ones(len(parents), bool)
        kept[live] = children[live] != 1
        kept[[number for number in self._marked if pages[number] >= 0]] = True
        above = parents.copy()
        while len(skipping := live[~kept[above[live]]]):
            above[skipping] = above[above[skipping]]
        found: dict[int, list[int]] = {}
        for number in live[kept[live]].tolist():
            parent = int(above[number])
            found.setdefault(root if parent >= nodes else parent, []).append(number)
        return found

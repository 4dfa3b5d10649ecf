"""The prefix cache's index: a tree of full blocks whose keys are their content, so that no hash is ever trusted."""
from __future__ import annotations

from collections.abc import Hashable, Iterator

from nanovllm.engine.block_pool import Block, BlockPool

BlockKey = tuple[Hashable, ...]     # content of one block: ids, images and offsets, namespace, salt


class PrefixNode:
    """One block's content behind that of its parents.

    Two prompts meet in a node only if all their keys from the root on compare equal; Python's dict compares the keys
    themselves and uses their hash for speed alone.
    """

    __slots__ = ("parent", "key", "block", "children")

    def __init__(self, parent: PrefixNode | None, key: BlockKey, block: Block | None) -> None:
        self.parent = parent
        self.key = key
        self.block = block          # None: the root, or a node that was removed
        self.children: dict[BlockKey, PrefixNode] = {}


class PrefixTree:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.root = PrefixNode(None, (), None)
        self.num_nodes = 0

    def is_alive(self, node: PrefixNode) -> bool:
        return node is self.root or node.block is not None

    def insert(self, parent: PrefixNode, key: BlockKey, block_id: int) -> PrefixNode:
        """The node of `key` below `parent`; a block that already has the key keeps it."""
        node = parent.children.get(key)
        if node is None:
            block = self.pool.blocks[block_id]
            node = parent.children[key] = PrefixNode(parent, key, block)
            block.nodes.append(node)
            self.num_nodes += 1
        return node

    def forget_block(self, block: Block) -> None:
        """Removes a block's keys, and those of all blocks behind it: they could no longer be found."""
        for node in list(block.nodes):
            if node.block is not None:
                assert node.parent is not None
                del node.parent.children[node.key]
                for gone in self._subtree(node):
                    self._remove(gone)

    def _remove(self, node: PrefixNode) -> None:
        block, node.block = node.block, None
        assert block is not None
        block.nodes.remove(node)
        self.num_nodes -= 1
        self.pool.settle(block)

    def _subtree(self, top: PrefixNode) -> list[PrefixNode]:
        nodes = [top]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._subtree(self.root)[1:])

    def check_integrity(self) -> None:
        """Raises AssertionError unless nodes and blocks name each other."""
        nodes = list(self)
        assert len(nodes) == self.num_nodes == sum(len(block.nodes) for block in self.pool.blocks)
        for node in nodes:
            assert node.block is not None and node in node.block.nodes
            assert node.parent is not None and node.parent.children[node.key] is node

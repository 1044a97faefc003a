"""Every law is seen to be broken when it is: each test damages one entry of a sound state."""

import jax
import numpy as np
import pytest
from support import digest_of as digest
from support import new_cache, serve, tiny, tree_of

from purecache.state import NONE, CacheConfig, ConfigError, Policy, as_jax, empty_state
from purecache.state.laws import assert_shapes, broken_laws, law_checker, violations
from purecache.state.layout import LENT, RESERVED, Account, Column, Ledger, Scalar, Shelf, Stored, Tier
from purecache.transitions import TransferKind

A, ABC, D, X = [1, 1], [1, 1, 2, 2, 3, 3], [4, 4], [7, 7]


@pytest.fixture(scope="module")
def sound():
    """A state with everything in it, and its nodes by last token.

    Node 1 is on device and host and locked, 9 below it too; 2 and 3 are being loaded below it; 4 is on host alone;
    7 is being backed up; a page is lent. All of rank 0.
    """
    cache, gate = new_cache(tiny())
    for prompt in (D, ABC):
        serve(cache, prompt)
    cache.drain()
    cache.evict(3)
    serve(cache, [*A, 9, 9])
    cache.drain()
    gate.holding = set(TransferKind)
    serve(cache, X)
    cache.lock(cache.match(A).node)
    cache.load_back(cache.match(ABC))
    cache.allocate(1)
    state = cache.state
    names = {digest(None, False): None}
    nodes = {path[-1][-1] if len(path) > 2 else path[-1][1][-1]: node for path, node in tree_of(state, names).items()}
    assert sorted(nodes) == [1, 2, 3, 4, 7, 9]
    return jax.tree.map(np.array, state), nodes


def copy_of(state):
    return jax.tree.map(np.array, state)


def column(row, node, value):
    """Damage: write `value` for the node whose last token is `node`."""

    def damage(state, nodes):
        state.nodes[row, nodes[node]] = nodes.get(value, value) if isinstance(value, int) else value(state, nodes)

    return damage


def free_id(state):
    return int(state.nodes[Column.FREE_NODES, 0])


def dead(row, value):
    def damage(state, nodes):
        state.nodes[row, free_id(state)] = value

    return damage


def books(index, change):
    def damage(state, nodes):
        state.books[index if isinstance(index, int) else state.layout.account(*index)] += change

    return damage


def owner(node, value):
    def damage(state, nodes):
        state.shelves[Shelf.OWNERS, state.nodes[Column.DEVICE_PAGE, nodes[node]]] = value

    return damage


def host_page_reserved(state, nodes):
    page = state.layout.shelf(Tier.HOST) + state.nodes[Column.HOST_PAGE, nodes[4]]
    state.shelves[Shelf.OWNERS, page] = RESERVED


def stack_twice(state, nodes):
    state.shelves[Shelf.FREE_PAGES, 0] = state.shelves[Shelf.FREE_PAGES, 1]


def ledger(row, find, value):
    def damage(state, nodes):
        state.ledger[row, np.flatnonzero(state.ledger[find] != NONE)[0]] = value

    return damage


def host_parent_lost(state, nodes):
    state.nodes[Column.HOST_PAGE, nodes[2]] = state.nodes[Column.INCOMING_PAGE, nodes[2]] = NONE


def unlink_order(state, nodes):
    """Node 4 out of the host order, as an entry that was dropped and not listed again."""
    order, node = state.orders[Tier.HOST], nodes[4]
    older, newer, _ = order[:, node]
    order[1, older], order[0, newer] = newer, older
    order[:, node] = NONE


def free_node_live(state, nodes):
    state.nodes[Column.FREE_NODES, 0] = nodes[1]


def tokens_of(node, like):
    def damage(state, nodes):
        size = state.layout.page_size
        table = state.tokens.reshape(-1, size)
        table[nodes[node]] = table[nodes[like]]

    return damage


def chain_lost(state, nodes):
    state.links[: state.layout.buckets] = NONE


def chain_to_itself(state, nodes):
    node = state.links[: state.layout.buckets].max()
    state.links[state.layout.buckets + node] = node


def sibling_of_itself(state, nodes):
    state.nodes[[Column.NEXT_SIBLING, Column.PREVIOUS_SIBLING], nodes[4]] = nodes[4]


def dead_in_order(state, nodes):
    """A dead node in the place of node 4."""
    order, gone = state.orders[Tier.HOST], free_id(state)
    order[:, gone] = order[:, nodes[4]]
    order[1, order[0, gone]], order[0, order[1, gone]] = gone, gone
    order[:, nodes[4]] = NONE


def order_in_a_loop(state, nodes):
    state.orders[Tier.HOST][:, nodes[4]] = nodes[4]


def no_deadlines(state, nodes):
    state.books[Scalar.POLICY] = Policy.RETENTION
    state.orders[:, 2] = NONE


def deadlines_fall(state, nodes):
    """The oldest entry of the device has the latest deadline."""
    state.books[Scalar.POLICY] = Policy.RETENTION
    state.orders[:, 2] = 0
    order = state.orders[Tier.DEVICE]
    order[2, order[1, state.layout.head(0, 0)]] = 1


EVICTABLE = (Account.EVICTABLE, Tier.DEVICE, 0)
DAMAGE = {
    "the parent of a node is live": column(Column.PARENT, 4, lambda state, nodes: free_id(state)),
    "a node is of its parent's rank": column(Column.RANK, 4, 1),
    "device children are counted": column(Column.DEVICE_CHILDREN, 7, 9),
    "a node has a first child iff it has children": column(Column.FIRST_CHILD, 2, NONE),
    "free nodes and live nodes are all nodes": books(int(Scalar.FREE_NODES), -1),
    "the parent of a page on device is on device": column(Column.DEVICE_PAGE, 1, NONE),
    "the parent of a page on host has a page or waits for one": host_parent_lost,
    "the depth of a node is that of its parent plus one": column(Column.DEPTH, 4, 7),
    "no node is born after the clock, or before its parent": column(Column.BORN, 4, 1_000_000),
    "a node has a page, a child or a lock": column(Column.HOST_PAGE, 4, NONE),
    "no dead node has a page": dead(Column.HOST_PAGE, 5),
    "an operation brings a page to one tier only": column(Column.INCOMING_PAGE, 1, 5),
    "accounts are true (device, rank 0)": books(EVICTABLE, 1),
    "pages add up to the capacity (device, rank 0)": books(EVICTABLE, 1),
    "the owner of a page holds it (device, rank 0)": owner(7, lambda *_: 0),
    "a page on the free-list is free, once (device, rank 0)": stack_twice,
    "every page of a node is owned by it (device, rank 0)": owner(7, LENT),
    "accounts are true (host, rank 1)": books((Account.LENT, Tier.HOST, 1), 1),
    "accounts are true (device, rank 1)": books((Account.WITHHELD, Tier.DEVICE, 1), 1),
    "pages add up to the capacity (host, rank 1)": books((Account.FREE, Tier.HOST, 1), -1),
    "device locks are receipts, operations and locked children": column(Column.DEVICE_LOCKS, 1, 0),
    "host locks are receipts, operations and locked children": column(Column.HOST_LOCKS, 3, 0),
    "no dead node is locked (device)": dead(Column.DEVICE_LOCKS, 1),
    "no dead node is locked (host)": dead(Column.HOST_LOCKS, 1),
    "vacant and open operations are all": books(int(Scalar.VACANT_OPERATIONS), 1),
    "vacant and held receipts are all": ledger(Ledger.RECEIPT_NODE, Ledger.RECEIPT_NODE, NONE),
    "every page being stored belongs to an operation": column(Column.STORED, 4, lambda *_: Stored.WRITING),
    "every reserved page belongs to a prefetch": host_page_reserved,
    "every page on its way belongs to an operation": ledger(Ledger.OPERATION_COUNT, Ledger.OPERATION_KIND, 7),
    "siblings are linked both ways, from their parent": column(Column.PREVIOUS_SIBLING, 4, 2),
    "sibling lists end": sibling_of_itself,
    "hash chains hold exactly the nodes that don't follow their parent": chain_lost,
    "hash chains end": chain_to_itself,
    "a node is in the chain of its hash": column(Column.NAMESPACE, 4, 1),
    "no two nodes are the same page of the same parent": tokens_of(4, 7),
    "the stack of free nodes holds each of them, once": free_node_live,
    "what can be evicted is in the order of its rank (host)": unlink_order,
    "only live nodes are in the eviction order (host)": dead_in_order,
    "the eviction order is linked both ways (host)": order_in_a_loop,
    "deadlines rise along the lists of an eviction order (device)": deadlines_fall,
    "deadlines are neither unset nor later than any page is kept (host)": no_deadlines,
}
ARRAY_LAWS = set(broken_laws(empty_state(tiny())))


def damaged(sound, law):
    state = copy_of(sound[0])
    damage = DAMAGE[law]
    if law == "the owner of a page holds it (device, rank 0)":
        damage = owner(7, sound[1][1])
    damage(state, sound[1])
    return state


def test_a_sound_state_has_no_violations(sound):
    assert violations(sound[0]) == []
    assert violations(empty_state(tiny())) == []


@pytest.mark.parametrize("law", DAMAGE)
def test_damage_is_named(sound, law):
    found = violations(damaged(sound, law))
    assert any(law in line for line in found), found


def test_every_law_of_arrays_has_its_damage():
    """Laws of a tier and rank are written once and share their damage."""
    assert {law.split(" (")[0] for law in ARRAY_LAWS} == {law.split(" (")[0] for law in DAMAGE if law in ARRAY_LAWS}


def test_assertions_inside_a_compiled_program(sound):
    law_checker()(as_jax(sound[0]))
    laws = (
        "device children are counted",
        "vacant and open operations are all",
        "siblings are linked both ways, from their parent",
    )
    for law in laws:
        with pytest.raises(AssertionError, match=law):
            law_checker()(as_jax(damaged(sound, law)))


def test_shapes_and_types_are_asserted(sound):
    assert_shapes(as_jax(sound[0]))
    with pytest.raises(AssertionError):
        assert_shapes(sound[0].replace(tokens=sound[0].tokens[1:]))
    with pytest.raises(AssertionError):
        assert_shapes(sound[0].replace(books=sound[0].books.astype(np.float32)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("page_size", 2.0),
        ("device_pages", 0),
        ("device_pages", True),
        ("device_pages", 2**30),
        ("host_pages", -1),
        ("ranks", 0),
        ("policy", "oldest"),
        ("policy", 99),
        ("write", "never"),
        ("load_back_threshold", -1),
        ("levels", 1),
        ("max_operations", 0),
        ("max_receipts", 0),
        ("seed", -1),
    ],
)
def test_a_configuration_that_cannot_work_names_the_field(name, value):
    values = {"page_size": 2, "device_pages": 8} | {name: value}
    with pytest.raises(ConfigError, match=name):
        CacheConfig(**values)

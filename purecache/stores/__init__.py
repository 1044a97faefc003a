"""L3: stores of pages by key. They see keys and byte buffers only: no nodes, no JAX."""

from purecache.stores.interface import Fetch, Presence, Store

__all__ = ["Fetch", "Presence", "Store"]

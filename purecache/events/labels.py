"""What routers are told of a namespace: the name of a LoRA adapter, and a salt."""

from purecache.namespaces import Namespace
from purecache.stores.keys import seed_of

Label = tuple[str | None, str | None]
"""lora_name and cache_salt of an event."""

_ADAPTERS = ("adapter", "lora", "lora_name")
_SALTS = ("salt", "cache_salt")


def label_of(namespace: Namespace) -> Label:
    """None: neither. A text: that is the salt. Pairs: the one named adapter, lora or lora_name is the adapter, and
    the one named salt or cache_salt the salt. Whatever else a namespace has makes the salt 64 hex characters of its
    digest: blocks of different namespaces never look alike.
    """
    if namespace is None:
        return None, None
    if isinstance(namespace, str):
        return None, namespace
    parts = namespace if isinstance(namespace, tuple) else (namespace,)
    found: dict[bool, str] = {}
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], str)):
            return None, seed_of(namespace)
        name, value = str(part[0]), str(part[1])
        if name not in _ADAPTERS + _SALTS or (name in _SALTS) in found:
            return None, seed_of(namespace)
        found[name in _SALTS] = value
    return found.get(False), found.get(True)

"""How host pages are kept and copied, as it is passed through from a server's options to `Interpreter`."""

from dataclasses import dataclass
from typing import Literal

from purecache.effects.pools import HostMemory


@dataclass(frozen=True)
class HostOptions:
    """See `Interpreter`; the defaults are what `table.ROUTES` says for the platform."""

    host_form: Literal["slots", "arrays"] | None = None
    copies: str | None = None
    host_memory: HostMemory = "pinned_host"
    force_unpinned: bool = False

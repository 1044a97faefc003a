"""Stand-ins for the modules that peers import for GPUs and servers, and never use for what is measured here.

Nothing of a peer is edited: a finder answers for modules that are not installed, and for the parts of a peer that hold
layers and kernels of models.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class _Kind(type):
    """A class whose attributes are the class itself, so that any name can be imported, called or inherited from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Stub(metaclass=_Kind):
    """What every name of a missing module is. A decorator made of it returns what it decorates."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *arguments: Any, **__: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Stub()


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules up: `parts` and what is below them, and whatever one of `askers` imports and nobody has.

    Packages beside the askers do without what is not there, as ever.
    """

    def __init__(self, askers: Sequence[str], parts: Sequence[str] = ()) -> None:
        self._askers, self._parts = frozenset(askers), tuple(parts)
        self.made: list[str] = []
        """Names of the modules that were made up."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A module of stubs."""
        top = name.partition(".")[0]
        if not any(name == part or name.startswith(f"{part}.") for part in self._parts):
            there = top in self._askers or top in sys.stdlib_module_names or _asker() not in self._askers
            if there or self._others(name, path) is not None:
                return None
        self.made.append(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _others(self, name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
        """What the finders behind this one find."""
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path)) is not None:
                return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Empty, with any attribute."""
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _asker() -> str:
    """The package whose import statement is being carried out."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_globals.get("__name__", "importlib"):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals["__name__"].partition(".")[0]


def install(askers: Sequence[str], parts: Sequence[str] = ()) -> StubFinder:
    """Put the finder before all others, for imports of the packages `askers` and for `parts` of them."""
    finder = StubFinder(askers, parts)
    sys.meta_path.insert(0, finder)
    return finder


def bare_package(name: str, folder: Path) -> None:
    """Make `import name.part` read `folder` without running the package's own `__init__`, which starts its server."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[name] = importlib.util.module_from_spec(spec)

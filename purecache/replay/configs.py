"""Configurations as JSON, without the secret of the hash table where a recording must not have it."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from purecache.state import CacheConfig, Checkpoint, Chunk, ConfigError, Law, PoolSpec, WholePrefix, Window

LAWS: dict[str, type] = {law.__name__: law for law in (WholePrefix, Window, Chunk, Checkpoint)}
"""The laws of pools that purecache has, by name."""


def config_as_json(config: CacheConfig, *, secret: bool) -> dict[str, Any]:
    """All settings; `secret`: with the seed of the hash table. Raises ValueError for a law that is not plain data."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings |= {"policy": config.policy.name.lower(), "write": str(config.write)}  # type: ignore[union-attr]
    settings["pools"] = [_pool_as_json(spec) for spec in config.pools]
    if not secret:
        del settings["seed"]
    return settings


def config_from_json(settings: Any, laws: Mapping[str, type] | None = None) -> CacheConfig:
    """The configuration again. `laws`: those of pools that are not purecache's own, by name of their class.

    Raises ConfigError for what is no configuration, or names a law that nobody knows.
    """
    try:
        pools = tuple(_pool_from_json(each, LAWS | dict(laws or {})) for each in settings["pools"])
        return CacheConfig(**(settings | {"pools": pools}))
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"not a configuration: {error!r}") from error


def _pool_as_json(spec: PoolSpec) -> dict[str, Any]:
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return settings | {"tiers": list(spec.tiers), "law": None if spec.law is None else _law_as_json(spec.law)}


def _law_as_json(law: Law) -> dict[str, Any]:
    if not is_dataclass(law) or isinstance(law, type):
        raise ValueError(f"the law {type(law).__name__} is not a dataclass: it can't be written down")
    values = asdict(law)
    if wrong := [name for name, value in values.items() if not isinstance(value, bool | int | str | None)]:
        raise ValueError(f"the law {type(law).__name__} has fields that are not plain data: {wrong}")
    return {"law": type(law).__name__, "fields": values}


def _pool_from_json(settings: dict[str, Any], laws: Mapping[str, type]) -> PoolSpec:
    law = settings["law"]
    if law is not None:
        if law["law"] not in laws:
            raise ConfigError(f"pool {settings['name']}: nobody knows the law {law['law']!r}, give it as laws=")
        law = laws[law["law"]](**law["fields"])
    return PoolSpec(**(settings | {"law": law, "tiers": tuple(settings["tiers"])}))

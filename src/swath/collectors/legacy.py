"""Names that collectors had earlier. Each is the new class, with a warning that says its name.

(Those of the collectors on nodes are in ``swath.collectors.distributed``.)
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from swath.collectors.base import BaseCollector
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.single import Collector
from swath.warn import warn_user


class Renamed(ABCMeta):
    """The kind of a class under its old name, whose attribute ``new`` is the class under its new one.

    To call the old name is to call the new. A subclass of the old name is one of the new, and whatever is a ``new`` is
    one under the old name. Each call warns once, at the caller's line; of a loop, Python shows the first.
    """

    new: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        old = next(base for base in cls.__mro__ if "new" in base.__dict__)
        new: type = old.__dict__["new"]
        warn_user(
            f"{old.__name__} is now called {new.__name__}: from {_home(new)} import {new.__name__}", DeprecationWarning
        )
        return new(*args, **kwargs) if cls is old else super().__call__(*args, **kwargs)

    # By the list of bases: an abstract class's own check asks its subclasses, which would ask it again.
    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if not isinstance(subclass, type):
            raise TypeError("issubclass() arg 1 must be a class")
        return cls.__dict__.get("new", cls) in subclass.__mro__


def _home(new: type) -> str:
    """Where users import a class from."""
    distributed = "swath.collectors.distributed"
    return distributed if new.__module__.startswith(distributed) else "swath.collectors"


class DataCollectorBase(BaseCollector, metaclass=Renamed):
    """The old name of ``BaseCollector``."""

    new = BaseCollector


class SyncDataCollector(Collector, metaclass=Renamed):
    """The old name of ``Collector``."""

    new = Collector


class aSyncDataCollector(AsyncCollector, metaclass=Renamed):
    """The old name of ``AsyncCollector``."""

    new = AsyncCollector


class _MultiDataCollector(MultiCollector, metaclass=Renamed):
    """The old name of ``MultiCollector``."""

    new = MultiCollector


class MultiSyncDataCollector(MultiSyncCollector, metaclass=Renamed):
    """The old name of ``MultiSyncCollector``."""

    new = MultiSyncCollector


class MultiaSyncDataCollector(MultiAsyncCollector, metaclass=Renamed):
    """The old name of ``MultiAsyncCollector``."""

    new = MultiAsyncCollector

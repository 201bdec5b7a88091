"""Names that collectors had earlier. Each is the new class, with a warning that says its name."""

from __future__ import annotations

import warnings
from abc import ABCMeta
from typing import Any

from swath.collectors.base import BaseCollector
from swath.collectors.multi import MultiCollector
from swath.collectors.multi_async import AsyncCollector, MultiAsyncCollector
from swath.collectors.multi_sync import MultiSyncCollector
from swath.collectors.single import Collector

#: The base class of all collectors had another name, too; nobody makes one, so nobody is warned.
DataCollectorBase = BaseCollector


class _Renamed(ABCMeta):
    """A class under its old name: whatever is one under its new name is one under the old."""

    new: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        old = next(base for base in cls.__mro__ if "new" in base.__dict__)
        warnings.warn(
            f"{old.__name__} is now called {old.new.__name__}: from swath.collectors import {old.new.__name__}",  # type: ignore[attr-defined]
            DeprecationWarning,
            stacklevel=2,
        )
        return super().__call__(*args, **kwargs)

    # By the list of bases: an abstract class's own check asks its subclasses, which would ask it again.
    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls.__dict__.get("new", cls) in subclass.__mro__


class SyncDataCollector(Collector, metaclass=_Renamed):
    """The old name of ``Collector``."""

    new = Collector


class aSyncDataCollector(AsyncCollector, metaclass=_Renamed):
    """The old name of ``AsyncCollector``."""

    new = AsyncCollector


class MultiSyncDataCollector(MultiSyncCollector, metaclass=_Renamed):
    """The old name of ``MultiSyncCollector``."""

    new = MultiSyncCollector


class MultiaSyncDataCollector(MultiAsyncCollector, metaclass=_Renamed):
    """The old name of ``MultiAsyncCollector``."""

    new = MultiAsyncCollector


#: Made by nobody either: users ask ``isinstance`` of it.
_MultiDataCollector = MultiCollector

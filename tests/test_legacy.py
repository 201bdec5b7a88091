"""Collectors under the names that they had."""

from __future__ import annotations

import pytest

from counting import make_counting
from leaks import no_leaks  # noqa: F401
from swath import collectors
from swath.collectors import BaseCollector, Collector, MultiCollector, RandomPolicy

pytestmark = pytest.mark.usefixtures("no_leaks")

NAMES = {
    "SyncDataCollector": "Collector",
    "aSyncDataCollector": "AsyncCollector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
}


@pytest.mark.parametrize("old", NAMES)
def test_the_old_name_is_the_new_class_with_a_warning(old: str) -> None:
    kind, new = getattr(collectors, old), getattr(collectors, NAMES[old])
    envs = [make_counting] if "Multi" in old else make_counting
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new.__name__}") as told:
        collector = kind(envs, RandomPolicy(), frames_per_batch=10, total_frames=20)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert sum(batch.numel() for batch in collector) == 20
    assert isinstance(collector, new)
    assert isinstance(collector, kind)
    assert issubclass(kind, new)
    assert issubclass(new, kind)

    class Mine(kind):
        """As users have it."""

    with pytest.warns(DeprecationWarning, match=old):
        mine = Mine(envs, RandomPolicy(), frames_per_batch=10)
    assert isinstance(mine, Mine)
    assert not isinstance(collector, Mine)
    mine.shutdown()


def test_an_instance_under_the_new_name_is_one_under_the_old() -> None:
    collector = Collector(make_counting(), RandomPolicy(), frames_per_batch=10)
    assert isinstance(collector, collectors.SyncDataCollector)
    assert not isinstance(collector, collectors.MultiSyncDataCollector)
    assert not isinstance(3, collectors.SyncDataCollector)
    assert collectors.DataCollectorBase is BaseCollector
    assert collectors._MultiDataCollector is MultiCollector
    collector.shutdown()

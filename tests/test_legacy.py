"""Collectors under the names that they had."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest

from counting import make_counting
from policies_for_tests import deterministic
from swath import collectors
from swath.collectors import (
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    RandomPolicy,
    distributed,
)

NEW_NAMES = {
    "DataCollectorBase": "BaseCollector",
    "SyncDataCollector": "Collector",
    "aSyncDataCollector": "AsyncCollector",
    "_MultiDataCollector": "MultiCollector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
    "DistributedDataCollector": "DistributedCollector",
    "DistributedSyncDataCollector": "DistributedSyncCollector",
    "RPCDataCollector": "RPCCollector",
}
ON_NODES = [name for name in NEW_NAMES if name.startswith(("Distributed", "RPC"))]
#: There are no objects that are a BaseCollector and nothing else.
MADE = [name for name in NEW_NAMES if name != "DataCollectorBase"]


def classes(old: str) -> tuple[Any, type]:
    home = distributed if old in ON_NODES else collectors
    return getattr(collectors, old), getattr(home, NEW_NAMES[old])


def arguments(old: str) -> dict[str, Any]:
    several = "Multi" in old or old in ON_NODES
    sync = {"sync": True} if old == "_MultiDataCollector" else {}
    return {
        "create_env_fn": [make_counting] if several else make_counting,
        "policy": deterministic() if old in ON_NODES else RandomPolicy(),
        "frames_per_batch": 10,
        "total_frames": 20,
        **sync,
    }


@pytest.mark.processes
@pytest.mark.parametrize("old", [name for name in MADE if name != "RPCDataCollector"])
def test_the_old_name_makes_the_new_class_with_one_warning(old: str) -> None:
    check_old_name(old)


@pytest.mark.processes
@pytest.mark.xdist_group("rpc")
@pytest.mark.usefixtures("rpc_agent")
def test_the_old_name_of_rpc_makes_the_new_class_with_one_warning() -> None:
    check_old_name("RPCDataCollector")


def check_old_name(old: str) -> None:
    kind, new = classes(old)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        collector = kind(**arguments(old))
        line = sys._getframe().f_lineno - 1
    assert [warning.category for warning in told] == [DeprecationWarning]
    assert str(told[0].message).startswith(f"{old} is now called {new.__name__}: from swath.collectors")
    assert (told[0].filename, told[0].lineno) == (__file__, line)
    assert sum(batch.numel() for batch in collector) == 20
    assert isinstance(collector, new)
    assert isinstance(collector, kind)
    assert isinstance(collector, collectors.DataCollectorBase)


@pytest.mark.parametrize("old", MADE)
def test_the_advice_of_the_warning_works(old: str) -> None:
    kind, new = classes(old)
    with pytest.warns(DeprecationWarning, match=old) as told, pytest.raises(TypeError):
        kind()
    names: dict[str, Any] = {}
    exec(str(told[0].message).partition(": ")[2], names)
    assert names[new.__name__] is new


@pytest.mark.parametrize("old", MADE)
def test_a_loop_shows_one_line(old: str) -> None:
    kind, _ = classes(old)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            with pytest.raises(TypeError):
                kind()
    assert len(told) == 1


@pytest.mark.parametrize("old", NEW_NAMES)
def test_classes_are_related_both_ways(old: str) -> None:
    kind, new = classes(old)
    assert issubclass(kind, new)
    assert issubclass(new, kind)
    assert issubclass(kind, BaseCollector)
    assert issubclass(kind, collectors.DataCollectorBase)
    assert not issubclass(int, kind)
    assert not isinstance(3, kind)
    with pytest.raises(TypeError, match="must be a class"):
        issubclass(3, kind)  # type: ignore[arg-type]

    class Mine(kind):
        """As users have it."""

    assert issubclass(Mine, kind)
    assert issubclass(Mine, new)
    assert not issubclass(new, Mine)
    assert not issubclass(kind, Mine)
    assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.processes
@pytest.mark.parametrize("old", [name for name in MADE if name not in ("_MultiDataCollector", "RPCDataCollector")])
def test_a_subclass_of_an_old_name_is_used_as_any(old: str) -> None:
    kind, new = classes(old)

    class Mine(kind):
        """As users have it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mark = "mine"

    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new.__name__}") as told:
        mine = Mine(**arguments(old))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert type(mine) is Mine
    assert mine.mark == "mine"
    for other in (Mine, kind, new, BaseCollector, collectors.DataCollectorBase):
        assert isinstance(mine, other)
    assert not isinstance(Collector.__new__(Collector), Mine)
    assert sum(batch.numel() for batch in mine) == 20


@pytest.mark.processes
def test_a_collector_of_ones_own_on_the_old_base() -> None:
    class Ten(collectors.DataCollectorBase):
        def __init__(self) -> None:
            self.inner = Collector(make_counting, frames_per_batch=10, total_frames=10)

        def __iter__(self) -> Any:
            return iter(self.inner)

    with pytest.warns(DeprecationWarning, match="DataCollectorBase is now called BaseCollector") as told:
        ten = Ten()
    assert len(told) == 1
    assert [batch.numel() for batch in ten] == [10]
    assert isinstance(ten, BaseCollector)


@pytest.mark.processes
def test_an_instance_under_the_new_name_is_one_under_the_old() -> None:
    with Collector(make_counting(), RandomPolicy(), frames_per_batch=10) as collector:
        assert isinstance(collector, collectors.SyncDataCollector)
        assert isinstance(collector, collectors.DataCollectorBase)
        assert not isinstance(collector, collectors.MultiSyncDataCollector)
        assert not isinstance(collector, collectors._MultiDataCollector)


@pytest.mark.processes
@pytest.mark.parametrize(("sync", "kind"), [(True, MultiSyncCollector), (False, MultiAsyncCollector)])
def test_the_old_multi_collector_dispatches(sync: bool, kind: type) -> None:
    with pytest.warns(DeprecationWarning, match="_MultiDataCollector is now called MultiCollector"):
        collector = collectors._MultiDataCollector([make_counting], frames_per_batch=10, sync=sync)
    with collector:
        assert type(collector) is kind
        assert isinstance(collector, MultiCollector)
        assert isinstance(collector, collectors._MultiDataCollector)
        old_kinds = collectors.MultiSyncDataCollector, collectors.MultiaSyncDataCollector
        assert [isinstance(collector, old) for old in old_kinds] == [sync, not sync]


@pytest.mark.processes
def test_an_old_name_says_what_runs_in_workers() -> None:
    kind = collectors.SyncDataCollector
    with MultiSyncCollector([make_counting], frames_per_batch=10, total_frames=20, collector_class=kind) as collector:
        assert sum(batch.numel() for batch in collector) == 20


@pytest.mark.processes
def test_names_of_collectors_on_nodes_are_imported_late() -> None:
    code = """if True:
        import sys
        import swath.collectors
        assert not any(name.startswith("swath.collectors.distributed") for name in sys.modules)
        from swath.collectors import DistributedDataCollector, DistributedSyncDataCollector
        from swath.collectors.distributed import DistributedDataCollector as same
        assert DistributedDataCollector is same
        assert "swath.collectors.distributed.rpc" not in sys.modules
        from swath.collectors import RPCDataCollector
        from swath.collectors.distributed import RPCDataCollector as same
        assert RPCDataCollector is same
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

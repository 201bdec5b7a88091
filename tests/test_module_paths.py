"""What scripts for TorchRL import is where they import it from: only the first part of the name differs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

#: By module of TorchRL: public names that scripts import from there.
IMPORTED = {
    "collectors.collectors": [
        "BaseCollector",
        "Collector",
        "AsyncCollector",
        "MultiCollector",
        "MultiSyncCollector",
        "MultiAsyncCollector",
        "DEFAULT_EXPLORATION_TYPE",
    ],
    "collectors.utils": ["split_trajectories"],
    "collectors.weight_update": [
        "WeightUpdaterBase",
        "VanillaWeightUpdater",
        "MultiProcessedWeightUpdater",
        "RemoteModuleWeightUpdater",
        "RayWeightUpdater",
    ],
    "collectors.distributed.generic": ["DEFAULT_SLURM_CONF", "DistributedCollector", "DistributedWeightUpdater"],
    "collectors.distributed.default_configs": ["DEFAULT_SLURM_CONF", "DEFAULT_SLURM_CONF_MAIN", "TCP_PORT"],
    "collectors.distributed.sync": ["DistributedSyncCollector"],
    "collectors.distributed.rpc": ["RPCCollector", "RPCWeightUpdater"],
    "collectors.distributed.ray": ["RayCollector"],
    "collectors.distributed.utils": ["submitit_delayed_launcher"],
    "weight_update.weight_sync_schemes": ["WeightStrategy", "WeightSyncScheme", "TransportBackend"],
}
_OF_ONE_PLACE = {"collectors.distributed.default_configs", "collectors.collectors"}


@pytest.mark.parametrize("module", IMPORTED)
def test_imports_of_scripts(module: str) -> None:
    found = importlib.import_module(f"swath.{module}")
    for name in IMPORTED[module]:
        assert getattr(found, name, None) is not None, name
    if module not in _OF_ONE_PLACE:  # the same objects, wherever they are imported from
        above = importlib.import_module(f"swath.{module.rpartition('.')[0]}")
        for name in IMPORTED[module]:
            assert getattr(above, name) is getattr(found, name), name


def test_what_slurm_is_asked_for_is_complete() -> None:
    from swath.collectors.distributed.default_configs import DEFAULT_SLURM_CONF, DEFAULT_SLURM_CONF_MAIN

    assert DEFAULT_SLURM_CONF_MAIN == {**DEFAULT_SLURM_CONF, "slurm_gpus_per_node": 1}


@pytest.mark.processes
def test_collectors_are_imported_without_them() -> None:
    code = (
        "import sys, swath.collectors\n"
        "assert not {'swath.collectors.distributed', 'swath.collectors.collectors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.torchrl
@pytest.mark.parametrize("module", IMPORTED)
def test_torchrl_has_them_there(module: str) -> None:
    theirs = pytest.importorskip(f"torchrl.{module}")
    for name in IMPORTED[module]:
        assert hasattr(theirs, name), name

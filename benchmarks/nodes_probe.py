"""One contender of part `nodes`, in a process of its own: prints what it measured as JSON.

python nodes_probe.py collect LIBRARY ENGINE sync|async ENVS_PER_NODE SECONDS
python nodes_probe.py weights LIBRARY ENGINE CALLS
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from contenders import swath_env, swath_policy, torchrl_env, torchrl_policy
from setting import Setting

NUM_NODES = 2
FRAMES = 1000
WARM_UP_BATCHES = 20
RAY = {"num_cpus": 4, "include_dashboard": False, "log_to_driver": False, "object_store_memory": 500_000_000}


def _several(library: str, setting: Setting) -> Any:
    """A node's envs, stepped one after the other."""
    one = swath_env if library == "swath" else torchrl_env
    if setting.num_envs == 1:
        return one(setting)
    return import_module(f"{library}.envs").SerialEnv(setting.num_envs, partial(one, setting))


def make_swath(engine: str, sync: bool, setting: Setting, frames: int, network: Any, num_nodes: int) -> Any:
    from swath.collectors import Collector

    options = {"ray": {"ray_init_config": RAY}}.get(engine)
    return Collector(
        partial(_several, "swath", setting),
        swath_policy(setting, network),
        frames_per_batch=frames,
        num_collectors=num_nodes,
        backend="distributed" if engine == "gloo" else engine,
        backend_options=options,
        sync=sync,
    )


def make_torchrl(engine: str, sync: bool, setting: Setting, frames: int, network: Any, num_nodes: int) -> Any:
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
    from torchrl.collectors.distributed import DistributedCollector, RayCollector

    envs = [partial(_several, "torchrl", setting)] * num_nodes
    policy = torchrl_policy(setting, network)
    common = {"frames_per_batch": frames, "total_frames": 10**9}
    if engine == "process":
        return (MultiSyncCollector if sync else MultiAsyncCollector)(envs, policy, **common)
    if engine == "ray":
        remote = {"num_cpus": 1, "num_gpus": 0, "memory": 10**8}
        return RayCollector(envs, policy, sync=sync, ray_init_config=RAY, remote_configs=remote, **common)
    return DistributedCollector(
        envs, policy, sync=sync, launcher="mp", backend="gloo", tcp_port=str(20_000 + os.getpid() % 20_000), **common
    )


def measure(library: str, engine: str, sync: bool, envs_per_node: int, seconds: float) -> dict[str, Any]:
    setting = Setting("CartPole-v1", envs_per_node, FRAMES // NUM_NODES // envs_per_node)
    frames = -(-FRAMES // (envs_per_node * NUM_NODES)) * envs_per_node * NUM_NODES
    started = time.perf_counter()
    collector = (make_swath if library == "swath" else make_torchrl)(
        engine, sync, setting, frames, setting.make_network(), NUM_NODES
    )
    batches = iter(collector)
    first = next(batches)
    start_up_s = time.perf_counter() - started
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    delivered, count, cpu_s, started = 0, 0, time.process_time(), time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        delivered += next(batches).numel()
        count += 1
    expected = frames
    assert first.numel() == expected, (tuple(first.shape), expected)
    result = {"fps": delivered / elapsed, "batches_per_s": count / elapsed, "start_up_s": start_up_s}
    result["driver_cpu_s_per_batch"] = (time.process_time() - cpu_s) / count
    num_bytes = getattr(getattr(collector, "_engine", None), "num_bytes", None)
    if num_bytes is not None:
        result["bytes_per_batch"] = num_bytes[1] / collector._iter
    print(json.dumps(result), flush=True)
    return result


def measure_weights(library: str, engine: str, num_calls: int) -> None:
    """``update_policy_weights_`` of 10 MB to 4 nodes, a batch and new weights before each call."""
    setting = Setting("CartPole-v1", 1, 50)
    network = nn.Sequential(nn.Linear(4, 1577), nn.ReLU(), nn.Linear(1577, 1577), nn.ReLU(), nn.Linear(1577, 2))
    make = make_swath if library == "swath" else make_torchrl
    collector = make(engine, False, setting, 50, network, 4)
    policy = swath_policy(setting, network) if library == "swath" else torchrl_policy(setting, network)
    batches, seconds = iter(collector), []
    for _ in range(num_calls):
        next(batches)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(0.999)
        started = time.perf_counter()
        if library == "swath":
            collector.update_policy_weights_()
        else:
            collector.update_policy_weights_(policy)
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": seconds[num_calls // 10 :]}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, library, engine, *rest = sys.argv[1:]
    if what == "weights":
        measure_weights(library, engine, int(rest[0]))
    else:
        mode, envs, seconds = rest
        measure(library, engine, mode == "sync", int(envs), float(seconds))
    sys.stdout.flush()
    os._exit(0)  # some contenders do not end

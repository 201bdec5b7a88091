"""A fresh program that starts a collector twice; prints the seconds that each took, as JSON. `startup.py` runs it.

Constructor to first batch. What the program imports before is not counted, but the workers import this file too: so
nothing of the rival is imported here.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module

import torch

from multi_contenders import multi_sync, worker_per_env
from setting import Setting

SETTING = Setting("CartPole-v1", 4, 250)


def seconds_to_first_batch(library: str) -> float:
    network = SETTING.make_network()
    started = time.perf_counter()
    contender = multi_sync(library, SETTING, network, **worker_per_env(library, SETTING))
    contender.collect(1)
    elapsed = time.perf_counter() - started
    contender.close()
    return elapsed


def main() -> None:
    library = sys.argv[1]
    torch.set_num_threads(1)
    for module in ("collectors", "envs"):
        import_module(f"{library}.{module}")
    print(json.dumps([seconds_to_first_batch(library) for _ in range(2)]))


if __name__ == "__main__":
    main()

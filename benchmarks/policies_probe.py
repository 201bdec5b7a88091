"""A fresh program that starts one collector; prints the seconds until its first 1,000 frames. `policies.py` runs it.

Arguments: 1 or 4 envs (in one process, or each in a worker), and "capture" or "call".
"""

from __future__ import annotations

import json
import sys
import time

import torch

import swath.collectors
import swath.envs  # noqa: F401  not to be counted
from policy_contenders import CASES, collector, multi


def main() -> None:
    num_envs, how = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    case = CASES["agent"]
    setting = case.setting(num_envs, 1000)
    setting.make_env().close()  # Gymnasium imports an env's module when one is made
    options = {"capture_policy": how == "capture"}
    started = time.perf_counter()
    if num_envs == 1:
        contender = collector("swath", case, setting, **options)
    else:
        contender = multi("swath", "Sync", case, setting, num_workers=num_envs, **options)
    contender.collect(1)
    elapsed = time.perf_counter() - started
    contender.close()
    print(json.dumps(elapsed))


if __name__ == "__main__":
    main()

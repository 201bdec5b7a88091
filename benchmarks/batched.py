"""Part `batched`: envs in workers, one policy for whichever are ready; and EnvPool as the ceiling.

The ideal is C / (s + c + f(b) / b) with b = all envs: one call of the network for all of them, everything else spread
over C cores.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from contenders import (
    CollectorContender,
    Contender,
    Transitions,
    swath_env,
    swath_policy,
    torchrl_env,
    torchrl_policy,
)
from envpool_loop import EnvPoolLoop
from interleaved import Race
from machine import usable_cores
from report import Throughput, throughput_markdown
from setting import Setting

SETTINGS = [Setting("CartPole-v1", 8, 25), Setting("CartPole-v1", 64, 50)]
OURS = {"swath": "swath is"}
#: Collectors work ahead by less than a batch.
WARM_UP_ROUNDS = 1


class _Batched(CollectorContender):
    """Frames as they came: ``env_index`` says whose they are."""

    def checked(self) -> Iterator[tuple[Transitions, Setting]]:
        batch = self._batch.contiguous()
        env_index = batch["env_index"].flatten()
        for index in env_index.unique():
            frames = batch[env_index == index].unsqueeze(1)
            yield Transitions.of(frames, self.batches.discrete), Setting(self.batches.env_id, 1, len(frames))


def swath_batched(setting: Setting, **options: Any) -> Contender:
    from swath.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [partial(swath_env, setting)] * setting.num_envs,
        swath_policy(setting, setting.make_network()),
        frames_per_batch=setting.frames_per_batch,
        max_batch_size=setting.num_envs,
        **options,
    )
    return _Batched(setting, collector)


class _PausedBetween(_Batched):
    """torchrl's collects in threads of this process, until what it keeps ready is full, and looks every millisecond."""

    def __init__(self, setting: Setting, collector: Any) -> None:
        super().__init__(setting, collector)
        self._paused = ExitStack()

    def rest(self) -> None:
        self._paused.enter_context(self.collector.pause())

    def wake(self) -> None:
        self._paused.close()

    def close(self) -> None:
        self.wake()
        super().close()


def _torchrl_policy(setting: Setting) -> Any:
    return torchrl_policy(setting, setting.make_network())


def torchrl_batched(setting: Setting, **options: Any) -> Contender:
    from torchrl.collectors import AsyncBatchedCollector

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # defaults of its next version
        collector = AsyncBatchedCollector(
            [partial(torchrl_env, setting)] * setting.num_envs,
            frames_per_batch=setting.frames_per_batch,
            max_batch_size=setting.num_envs,
            **(options if "policy_factory" in options else {"policy": _torchrl_policy(setting), **options}),
        )
    return _PausedBetween(setting, collector)


def torchrl_processes(setting: Setting) -> Contender:
    """As many processes as cores; by default, there is one for each env."""
    per_worker = -(-setting.num_envs // usable_cores())
    return torchrl_batched(setting, env_backend="multiprocessing", envs_per_worker=per_worker)


def torchrl_served(setting: Setting) -> Contender:
    """What its documentation has as the fastest: a process for each env, the policy in one of its own."""
    make_policy = partial(_torchrl_policy, setting)
    return torchrl_batched(setting, env_backend="multiprocessing", policy_factory=make_policy, transport="auto")


#: By the names of the command line and of the results.
CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "swath": swath_batched,
    "torchrl-threads": torchrl_batched,
    "torchrl-processes": torchrl_processes,
    "torchrl-served": torchrl_served,
    "envpool": EnvPoolLoop,
}
RIVALS = [name for name in CONTENDERS if name not in OURS]

TITLES = {
    "swath": "swath AsyncBatched",
    "torchrl-threads": "torchrl, threads",
    "torchrl-processes": "torchrl, processes",
    "torchrl-served": "torchrl, policy served",
    "envpool": "EnvPool loop (C++)",
}


def heading(options: argparse.Namespace) -> str:
    return (
        f"AsyncBatchedCollector: envs in workers, one policy; {options.repeats} repeats, contenders interleaved\n"
        "EnvPool: envs in C++, the ceiling; its rows between two episodes are not counted"
    )


def run(options: argparse.Namespace) -> Iterator[Throughput]:
    for setting in SETTINGS:
        names = [*OURS, *(name for name in RIVALS if options.only is None or name in options.only)]
        if setting.num_envs > 8:  # a batch of torchrl's takes seconds there: its default only, and none for a look
            # (64 processes of envs and one of the policy do not come to rest between two rounds.)
            others = {"torchrl-processes", "torchrl-served"}
            left_out = {*others, "torchrl-threads"} if options.quick else others
            names = [name for name in names if name not in left_out]
        contenders = {name: CONTENDERS[name] for name in names}
        yield Race(setting, contenders, TITLES, OURS, WARM_UP_ROUNDS, usable_cores(), "central").run(options)


markdown = throughput_markdown

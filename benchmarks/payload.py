"""Part `payload`: frames of 84 × 84 × 4 bytes that cost nothing to make; what is left is moving them."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from tensordict.nn import TensorDictModule
from torch import nn

from contenders import CollectorContender, Contender, Transitions
from interleaved import frames_per_second, order_of, settle
from parallel import parallel_env
from report import markdown_table
from setting import Setting

SHAPE = (84, 84, 4)
#: For the numbers only: this env is not one of Gymnasium's.
SETTING = Setting("84 × 84 × 4 bytes", 8, 50)
MB_PER_FRAME = np.prod(SHAPE) / 1e6
REPEATS = 5
#: Collectors work ahead by no more than a batch.
WARM_UP_ROUNDS = 1


class PixelEnv(gymnasium.Env):
    """Two images in turn; no episode ends."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._images = [np.full(SHAPE, value, np.uint8) for value in (1, 2)]
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._images[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        return self._images[self._steps % 2], 0.0, False, False, {}


class Constant(nn.Module):
    """Always the first action, as one-hot; it costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.action: torch.Tensor
        self.register_buffer("action", torch.tensor([1, 0]))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.expand(*observation.shape[:-3], 2).clone()


def _policy() -> TensorDictModule:
    return TensorDictModule(Constant(), in_keys=["observation"], out_keys=["action"])


def _wrapped(library: str) -> Any:
    return import_module(f"{library}.envs").GymWrapper(PixelEnv())


class _Pixels(CollectorContender):
    """Checked to have moved the images: each frame has one, and its next one is the other."""

    def check(self) -> None:
        frames = self._batch.flatten()
        values = [frames[key] for key in ("observation", ("next", "observation"))]
        whole = all((value == value[:, :1, :1, :1]).all() for value in values)
        firsts = [value[:, 0, 0, 0].int() for value in values]
        assert whole, "an image is not one of the env's"
        assert set(firsts[0].tolist()) == {1, 2}, "an image is not one of the env's"
        assert (firsts[0] + firsts[1] == 3).all(), "the next image is not the one after"


def serial(library: str) -> Contender:
    return _collector(library, "Collector", import_module(f"{library}.envs").SerialEnv(8, partial(_wrapped, library)))


def parallel(library: str) -> Contender:
    return _collector(library, "Collector", parallel_env(library, SETTING.num_envs, partial(_wrapped, library)))


def multi_sync(library: str, **options: Any) -> Contender:
    if library == "torchrl":  # its own choice, unless somebody has used multiprocessing before it
        multiprocessing.set_start_method("spawn", force=True)
    return _collector(library, "MultiSyncCollector", [partial(_wrapped, library)] * SETTING.num_envs, **options)


def batched(library: str) -> Contender:
    makers = [partial(_wrapped, library)] * SETTING.num_envs
    return _collector(library, "AsyncBatchedCollector", makers, max_batch_size=SETTING.num_envs)


def _collector(library: str, class_name: str, envs: Any, **options: Any) -> Contender:
    if library == "torchrl" and class_name == "Collector":
        options["auto_register_policy_transforms"] = False  # as by default; said, it does not warn
    make = getattr(import_module(f"{library}.collectors"), class_name)
    collector = make(envs, _policy(), frames_per_batch=SETTING.frames_per_batch, total_frames=-1, **options)
    return _Pixels(SETTING, collector)


class PixelLoop(Contender):
    """A hand-written loop over ``AsyncVectorEnv``; images are written to arrays that the next batch overwrites."""

    def __init__(self) -> None:
        self.batches = SETTING
        self.frames_per_round = SETTING.frames_per_batch
        self._envs = AsyncVectorEnv(
            [PixelEnv] * SETTING.num_envs,
            shared_memory=True,
            copy=False,
            context="forkserver",
            autoreset_mode=AutoresetMode.SAME_STEP,
        )
        self._obs, _ = self._envs.reset()
        lead = (SETTING.steps_per_batch, SETTING.num_envs)
        self._stored_obs = np.empty((*lead, *SHAPE), np.uint8)
        self._stored_next = np.empty((*lead, *SHAPE), np.uint8)
        self._rewards = np.empty(lead, np.float32)
        self._flags = np.empty((2, *lead), np.bool_)

    def collect(self, frames: int) -> int:
        delivered, obs, envs, network = 0, self._obs, self._envs, Constant()
        with torch.no_grad():
            while delivered < frames:
                for t in range(SETTING.steps_per_batch):
                    self._stored_obs[t] = obs
                    actions = network(torch.from_numpy(obs)).argmax(-1).numpy()
                    obs, self._rewards[t], self._flags[0, t], self._flags[1, t], _ = envs.step(actions)
                    self._stored_next[t] = obs
                delivered += SETTING.frames_per_batch
        self._obs = obs
        return delivered

    def last_batch(self) -> Transitions:
        raise NotImplementedError

    def check(self) -> None:
        sums = self._stored_obs[..., 0, 0, 0].astype(int) + self._stored_next[..., 0, 0, 0]
        assert (sums == 3).all(), "the next image is not the one after"

    def close(self) -> None:
        self._envs.close()


CONTENDERS: dict[str, Callable[[], Any]] = {
    "swath Collector(SerialEnv)": partial(serial, "swath"),
    "swath Collector(ParallelEnv)": partial(parallel, "swath"),
    "swath MultiSync, 2 workers": partial(multi_sync, "swath", num_workers=2),
    "swath AsyncBatched": partial(batched, "swath"),
    "torchrl Collector(ParallelEnv)": partial(parallel, "torchrl"),
    "torchrl MultiSync": partial(multi_sync, "torchrl"),
    "AsyncVectorEnv loop": PixelLoop,
}
#: The ones of swath that the others are compared with, by how they spread envs.
OURS = {"swath Collector(ParallelEnv)": "Parallel is", "swath MultiSync, 2 workers": "sync is"}
_HEADER = ["contender", "median fps", "min .. max", "MB/s", *OURS.values()]


@dataclass
class Moved:
    """By contender: frames per second in every repeat."""

    fps: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> list[list[str]]:
        return [
            [
                title,
                f"{median(samples):,.0f}",
                f"{min(samples):,.0f} .. {max(samples):,.0f}",
                f"{MB_PER_FRAME * median(samples):,.0f}",
                *("" if ours == title else f"{self.ratio(ours, title):.2f} ×" for ours in OURS),
            ]
            for title, samples in self.fps.items()
        ]

    def ratio(self, ours: str, title: str) -> float:
        return median(mine / theirs for mine, theirs in zip(self.fps[ours], self.fps[title], strict=True))

    def table(self) -> str:
        return "\n".join(
            f"  {title:<32}{fps:>11}{spread:>20}{rate:>9}" + "".join(f"{ratio:>13}" for ratio in ratios)
            for title, fps, spread, rate, *ratios in [_HEADER, *self.rows()]
        )

    def as_json(self) -> dict[str, Any]:
        return {"mb_per_frame": MB_PER_FRAME, "fps": self.fps}


def heading(options: argparse.Namespace) -> str:
    return (
        f"{SETTING.num_envs} envs with images of {SETTING.env_id}, made for nothing; batches of "
        f"{SETTING.frames_per_batch} frames, {_repeats(options)} repeats, interleaved\n"
        "MB/s: one image per frame, though each is delivered twice, as observation and as the next one"
    )


def _repeats(options: argparse.Namespace) -> int:
    return 2 if options.quick else REPEATS


def run(options: argparse.Namespace) -> Iterator[Moved]:
    # Eight more processes that import torch: too slow for a look.
    titles = [title for title in CONTENDERS if not options.quick or title != "torchrl MultiSync"]
    contenders: dict[str, Any] = {}
    result = Moved({title: [] for title in titles})
    try:
        for title in titles:
            contenders[title] = CONTENDERS[title]()
            contenders[title].collect(2 * SETTING.frames_per_batch)
            contenders[title].check()
        for repeat in range(_repeats(options)):
            for title in order_of(list(contenders), repeat):
                settle(has_processes=True)
                result.fps[title].append(frames_per_second(contenders[title], WARM_UP_ROUNDS, options))
        yield result
    finally:
        for contender in contenders.values():
            contender.close()


def markdown(results: Sequence[Moved]) -> str:
    return markdown_table(_HEADER, results[0].rows())

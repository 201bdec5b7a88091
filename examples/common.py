"""What the examples share, so that each can be about its algorithm: options, progress, evaluation, plot."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDictBase

from swath.collectors import Collector
from swath.envs import EnvBase, ExplorationType, SerialEnv

#: Seeds of evaluations: those that may end the training, and the last, whose result is reported. Training has others.
STOPPING_SEED, REPORT_SEED = 1_000_000, 2_000_000


def read_options(description: str | None, frames: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=frames, help="the most to train on; it ends at the target")
    drawing = Path("runs") / f"{Path(sys.argv[0]).stem}.png"
    parser.add_argument(
        "--plot", type=Path, default=drawing, metavar="FILE", help=f"draw the learning curve here (default: {drawing})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    return parser.parse_args()


class Returns:
    """Returns of the last episodes that ended, put together over batches of any shape.

    >>> batch = Collector("CartPole-v1", frames_per_batch=100).next()
    >>> returns = Returns(last=20)
    >>> returns.add(batch)
    >>> returns.count == batch["next", "done"].sum()
    tensor(True)
    """

    def __init__(self, last: int) -> None:
        self.last: deque[float] = deque(maxlen=last)
        self.count = 0
        self._under_way: dict[int, float] = {}

    def add(self, batch: TensorDictBase) -> None:
        traj_ids = batch["collector", "traj_ids"].reshape(-1)
        rewards = batch["next", "reward"].flatten()
        episodes, episode_of_frame = traj_ids.unique(return_inverse=True)
        sums = torch.zeros(len(episodes)).index_add_(0, episode_of_frame, rewards)
        for episode, reward in zip(episodes.tolist(), sums.tolist(), strict=True):
            self._under_way[episode] = self._under_way.get(episode, 0.0) + reward
        for episode in traj_ids[batch["next", "done"].flatten()].tolist():
            self.last.append(self._under_way.pop(episode))
            self.count += 1

    @property
    def mean(self) -> float:
        return sum(self.last) / len(self.last) if self.last else float("nan")


def evaluate(
    make_env: Callable[[], EnvBase], policy: Any, steps: int, seed: int, num_episodes: int = 100
) -> torch.Tensor:
    """Returns of whole episodes with the likeliest actions, ``[num_episodes]``; none is longer than ``steps``.

    Each episode is the first of an env of its own (a ``SerialEnv`` of all). The first few to end among fewer envs would
    be the short ones.
    """
    num_frames = num_episodes * steps
    with Collector(
        SerialEnv(num_episodes, make_env),
        policy,
        frames_per_batch=num_frames,
        total_frames=num_frames,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        collector.set_seed(seed)
        (batch,) = collector
    done = batch["next", "done"].squeeze(-1).int()
    is_first_episode = done.cumsum(-1) - done == 0
    return (batch["next", "reward"].squeeze(-1) * is_first_episode).sum(-1)


class Run:
    """One training: the display while it runs, then what came out of it.

    The clock runs from when it is made until the training ends: evaluations on the way count, the last does not.
    """

    def __init__(self, name: str, options: argparse.Namespace, target: float, curve_shows: str) -> None:
        self.name, self.options, self.target, self.curve_shows = name, options, target, curve_shows
        self.curve: list[tuple[int, float, float]] = []  # frames, seconds, return
        self._started = time.perf_counter()
        columns = "{task.description}", BarColumn(20), "{task.completed:,.0f}/{task.total:,.0f} frames"
        latest = TextColumn("return {task.fields[latest]:.1f}")
        # Drawn by show(), not by a thread: examples may fork.
        self._display = Progress(*columns, latest, TimeElapsedColumn(), auto_refresh=False)
        self._drawn_at = 0.0
        self._task = self._display.add_task(f"seed {options.seed}", total=options.frames, latest=float("nan"))

    def __enter__(self) -> Run:
        self._display.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._display.stop()

    def show(self, frames: int, latest: float) -> None:
        """How far it is, and how good; ``latest`` is nan as long as nobody knows."""
        now = time.perf_counter()
        is_due = now - self._drawn_at > 0.1
        self._drawn_at = now if is_due else self._drawn_at
        self._display.update(self._task, completed=frames, latest=latest, refresh=is_due)
        if latest == latest:
            self.curve.append((frames, round(now - self._started, 3), round(latest, 2)))

    def finish(self, frames: int, returns_of: Callable[[int], torch.Tensor]) -> dict[str, Any]:
        """Evaluate with other episodes than those that ended the training; print, write, draw."""
        seconds = time.perf_counter() - self._started
        returns = returns_of(REPORT_SEED)
        result = {
            "example": self.name,
            "seed": self.options.seed,
            "frames": frames,
            "seconds": round(seconds, 2),
            "target": self.target,
            "reached": bool(returns.mean() >= self.target),
            "episodes": len(returns),
            "mean_return": round(float(returns.mean()), 2),
            "std_return": round(float(returns.std()), 2),
            "curve_shows": self.curve_shows,
            "curve": self.curve,
        }
        print(
            f"{self.name}, seed {self.options.seed}: {frames:,} frames in {seconds:.1f} s, then a mean return of "
            f"{result['mean_return']:.1f} ± {result['std_return']:.1f} over {len(returns)} episodes "
            f"(target {self.target:g}: {'reached' if result['reached'] else 'missed'})"
        )
        if self.options.json:
            self.options.json.parent.mkdir(parents=True, exist_ok=True)
            self.options.json.write_text(json.dumps(result) + "\n")
        plot([result], self.options.plot)
        return result


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """The learning curves of one example, a line for each seed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print(f"{file} was not drawn: pip install 'swath[examples]' for matplotlib")
        return
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot(xlabel="frames", ylabel=results[0]["curve_shows"], title=results[0]["example"])
    for result in results:
        frames, returns = [point[0] for point in result["curve"]], [point[2] for point in result["curve"]]
        label = f"seed {result['seed']}: {result['mean_return']:.0f} at the end, {result['seconds']:.0f} s"
        axes.plot(frames, returns, label=label)
    axes.axhline(results[0]["target"], color="grey", linestyle=":", label="target")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    print(f"its curve: {file}")

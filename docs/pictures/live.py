"""The live view of a program that runs while this looks at it: `python docs/pictures/live.py 80 live.svg`.

Numbers are those of the machine that this ran on.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tensordict.nn import TensorDictModule
from torch import nn

from swath import GymEnv, GymWrapper, MultiAsyncCollector
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.insight.history import History
from swath.insight.screen import live_view

_SECONDS = 15.0
_LOOK_EVERY_S = 0.1


def an_env(step_s: float = 0.0) -> GymEnv:
    """A CartPole; its steps take so much longer."""
    import gymnasium as gym

    class Slow(gym.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            until = time.perf_counter() + step_s
            while time.perf_counter() < until:
                pass
            return self.env.step(action)

    return GymWrapper(Slow(gym.make("CartPole-v1"))) if step_s else GymEnv("CartPole-v1")


@cache
def history_of_a_learner() -> History:
    """Four workers, one of them slower, fill a replay buffer while it is learned from."""
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=4096)
    envs = [an_env] * 12 + [partial(an_env, 0.00003)] * 4
    collector = MultiAsyncCollector(
        envs, policy, num_workers=4, frames_per_batch=200, total_frames=4_000_000, replay_buffer=buffer
    )
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    history, due = History(), time.monotonic()
    collector.start()
    while (reading := collector.reading()).age_s < _SECONDS or reading.policy_version < 10:
        if time.monotonic() >= due:
            history.add(reading)
            due = time.monotonic() + _LOOK_EVERY_S
        batch = buffer.sample(wait=True)
        loss = network(batch["observation"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collector.update_policy_weights_()
        time.sleep(0.02)
    collector.async_shutdown()
    return history


def live_svg(width: int) -> str:
    """The view in a terminal of so many columns."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(live_view(history_of_a_learner(), width))
    svg = console.export_svg(title="swath.watch(collector)")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of the network; there are others


def live_page(width: int) -> Callable[[Path], Path]:
    """What writes a page with nothing but the view into a folder."""

    def make(folder: Path) -> Path:
        page = folder / f"live-{width}.html"
        page.write_text(f"<!DOCTYPE html><style>body {{ margin: 0 }} svg {{ width: 100% }}</style>{live_svg(width)}")
        return page

    return make


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(live_svg(int(sys.argv[1])))

"""Takes the pictures of the docs that show something that runs: `python docs/pictures/screens.py [NAME ...]` runs it,
looks at it in Chromium, and writes PNG files beside this one. All of them, if none is named; `--to FOLDER` puts them
elsewhere.

What is in them is real: numbers are those of the machine that this ran on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tensordict.nn import TensorDictModule
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

from live import live_page  # noqa: E402

from chromium import Chromium  # noqa: E402
from swath import GymEnv, GymWrapper, MultiAsyncCollector, MultiSyncCollector  # noqa: E402
from swath.data import LazyTensorStorage, ReplayBuffer  # noqa: E402

#: No picture is larger than this.
_MOST_BYTES = 200_000


def a_policy() -> TensorDictModule:
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def a_cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


def a_slow_cartpole() -> GymWrapper:
    """Whose steps and resets take some milliseconds longer."""
    import gymnasium as gym

    class Slow(gym.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            time.sleep(0.0006)
            return self.env.step(action)

        def reset(self, **kwargs: Any) -> Any:
            time.sleep(0.01)
            return self.env.reset(**kwargs)

    return GymWrapper(Slow(gym.make("CartPole-v1")))


# -- what runs ---------------------------------------------------------------------------------------------------------


@cache
def report_of_a_learner(folder: Path) -> Path:
    """Two workers that fill a replay buffer while it is learned from."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(40_000), batch_size=256)
    policy = a_policy()
    collector = MultiAsyncCollector(
        [a_cartpole] * 8, policy, num_workers=2, frames_per_batch=400, total_frames=120_000, replay_buffer=buffer
    )
    collector.set_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    with collector.report(folder / "learner.html") as report:
        collector.start()
        while buffer.write_count < 120_000:
            batch = buffer.sample(wait=True)
            loss = policy.module(batch["observation"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            collector.update_policy_weights_()
            time.sleep(0.05)
        collector.async_shutdown()
    return report.path


@cache
def report_of_a_straggler(folder: Path) -> Path:
    """Four workers: one is slower than the others, one is killed and started again."""
    collector = MultiSyncCollector(
        [a_cartpole, a_cartpole, a_slow_cartpole, a_cartpole], a_policy(), num_workers=4, frames_per_batch=800,
        total_frames=16_000, restart_workers=1,
    )  # fmt: skip
    collector.set_seed(0)
    with warnings.catch_warnings(), collector.report(folder / "straggler.html") as report:
        warnings.simplefilter("ignore")  # it says that a worker was started again
        for number, _ in enumerate(collector):
            collector.update_policy_weights_()
            time.sleep(0.03)
            if number == 7:
                os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
    return report.path


# -- pictures ----------------------------------------------------------------------------------------------------------

#: A picture: what it shows in a browser, or whatever else writes a file.
Take = Callable[[Chromium, Path, Path], None]


def of_page(make: Callable[[Path], Path], *, dark: bool = False, selector: str | None = None, height: int = 0) -> Take:
    """Of a page of HTML, or an element of it."""

    def take(browser: Chromium, folder: Path, picture: Path) -> None:
        page = browser.open(make(folder), width=1200, dark=dark)
        assert not page.errors, page.errors
        page.screenshot(picture, selector, height or None)

    return take


PICTURES: dict[str, Take] = {
    "live-80": of_page(live_page(80), selector="svg"),
    "live-160": of_page(live_page(160), selector="svg"),
    "report-light": of_page(report_of_a_learner, height=1500),
    "report-dark": of_page(report_of_a_learner, dark=True, height=1500),
    "report-timeline": of_page(report_of_a_straggler, selector="#timeline"),
}


def make_small(picture: Path) -> None:
    """As its own colours, packed as well as can be."""
    with Image.open(picture) as image:
        image.convert("RGB").save(picture, optimize=True)
        size = picture.stat().st_size
        print(f"{picture.name}: {image.width} x {image.height}, {size / 1000:.0f} kB")
    assert size <= _MOST_BYTES, f"{picture} is larger than {_MOST_BYTES:,} bytes: show less in it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--to", type=Path, default=HERE, metavar="FOLDER")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(PICTURES)
    if unknown:
        parser.error(f"there is no picture {min(unknown)!r}: {', '.join(PICTURES)}")
    arguments.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        for name in arguments.names or PICTURES:
            PICTURES[name](browser, Path(folder), arguments.to / f"{name}.png")
            make_small(arguments.to / f"{name}.png")


if __name__ == "__main__":
    main()

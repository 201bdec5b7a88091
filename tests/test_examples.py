"""Examples: they learn, and the one argument that says where rollouts run makes no difference to it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "backend",
    ["direct", "process", "distributed", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_one_argument(backend: str) -> None:
    """A policy that has learned nothing gets about 22."""
    assert load("one_argument").train(backend, total_frames=24_000) > 60


@pytest.fixture(scope="session")
def _fonts_are_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Matplotlib keeps the files open that its first picture needs."""
    nothing = {"curve_shows": "", "example": "", "curve": [], "seed": 0, "mean_return": 0, "seconds": 0, "target": 0}
    load("common").plot([nothing], tmp_path_factory.mktemp("plot") / "nothing.png")


@pytest.mark.processes
@pytest.mark.usefixtures("_fonts_are_open")
@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("ppo_cartpole", 1_024),
        ("dqn_cartpole", 1_024),
        ("sac_pendulum", 1_200),
        ("recurrent_ppo_masked_cartpole", 1_024),
        ("ppo_async_batched", 1_024),
    ],
)
def test_an_example_runs_and_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str, frames: int
) -> None:
    """Its `main`, here, and too short to learn; that it learns is below, and `make learn`."""
    command = [str(EXAMPLES / f"{name}.py"), "--frames", str(frames), *files_in(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    load(name).main()
    result = result_in(tmp_path, capfd.readouterr().out)
    assert result["episodes"] == 100
    assert 0 < result["frames"] <= frames


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "frames", "seed", "at_least"),
    [
        # A policy that has learned nothing gets 22 in CartPole (9 if it always says the same), -1,200 in Pendulum.
        ("ppo_cartpole", 20_480, 0, 60),
        ("dqn_cartpole", 4_000, 0, 60),
        ("sac_pendulum", 2_600, 0, -900),
        ("recurrent_ppo_masked_cartpole", 12_288, 0, 60),
        ("ppo_async_batched", 10_240, 0, 60),
        pytest.param("ppo_ray", 16_384, 0, 60, marks=pytest.mark.ray),
    ],
)
def test_an_example_learns(tmp_path: Path, name: str, frames: int, seed: int, at_least: float) -> None:
    """As its user runs it."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--frames", str(frames), "--seed", str(seed)]
    done = subprocess.run([*command, *files_in(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = result_in(tmp_path, done.stdout)
    assert result["seed"] == seed
    assert result["episodes"] == 100
    assert 0 < result["frames"] <= frames
    assert result["mean_return"] > at_least


def files_in(folder: Path) -> list[str]:
    return ["--json", str(folder / "result.json"), "--plot", str(folder / "curve.png")]


def result_in(folder: Path, said: str) -> dict[str, Any]:
    """What a run wrote, which must agree with itself and with what was said."""
    result = json.loads((folder / "result.json").read_text())
    assert f"{result['mean_return']:.1f}" in said
    assert (folder / "curve.png").stat().st_size > 1_000
    assert result["reached"] == (result["mean_return"] >= result["target"])
    frames, seconds, _ = zip(*result["curve"], strict=True)
    assert list(frames) == sorted(frames)
    assert frames[-1] == result["frames"]
    assert list(seconds) == sorted(seconds)
    return result


def test_evaluation_counts_the_first_episode_of_each_env() -> None:
    """A pole that is always pushed to the same side falls within a dozen steps."""
    common, cartpole = load("common"), load("ppo_cartpole")
    returns = common.evaluate(cartpole.make_env, lambda observation: torch.zeros(5, dtype=torch.int64), 500, 3, 5)
    assert returns.shape == (5,)
    assert set(returns.tolist()) <= set(range(7, 13))  # and 500 steps hold dozens of such episodes


def test_returns_are_put_together_over_batches() -> None:
    from swath.collectors import Collector
    from swath.envs import SerialEnv

    returns = load("common").Returns(last=1_000)
    with Collector(SerialEnv(3, lambda: gymnasium.make("CartPole-v1")), frames_per_batch=21) as collector:
        lengths = [0, 0, 0]
        expected = []
        for number, batch in enumerate(collector):
            returns.add(batch)
            for t in range(batch.shape[1]):
                for env in range(3):
                    lengths[env] += 1
                    if batch["next", "done"][env, t]:
                        expected.append(lengths[env])
                        lengths[env] = 0
            if number == 40:
                break
    assert sorted(returns.last) == sorted(expected)
    assert returns.count == len(expected) > 20


def test_the_page_of_results_has_every_result_and_nothing_else(tmp_path: Path) -> None:
    of_seeds = [
        {"seed": seed, "frames": 12_345, "seconds": 6.7, "mean_return": mean, "std_return": 1.25, "target": 475.0,
         "reached": mean >= 475, "example": "PPO", "curve_shows": "return", "curve": [(1, 0.1, 9.0), (2, 0.2, mean)]}
        for seed, mean in ((0, 499.5), (1, 300.0))
    ]  # fmt: skip
    for result in of_seeds:
        (tmp_path / f"ppo_cartpole-{result['seed']}.json").write_text(json.dumps(result))
    load("run_all").report(tmp_path, tmp_path)
    rows = re.findall(r"^\| ppo_cartpole .*$", (tmp_path / "results.md").read_text(), re.MULTILINE)
    assert len(rows) == 2
    assert "12,345" in rows[0]
    assert "499.5 ± 1.2" in rows[0]
    assert "missed" in rows[1]
    assert "missed" not in rows[0]

"""``swath collect``: what it writes, says and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import swath
from command_checks import batches_as_frames, code_in, frame_files, screen_of
from dataset_checks import check_episodes, check_steps


@pytest.mark.processes
def test_in_a_process_of_its_own(swath_process: Any) -> None:
    process = swath_process("collect", "CartPole-v1", "--frames", "1_003", "--envs", "4", "--seed", "0", "--out", "a/b")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "collecting 1,003 frames: CartPole-v1 · 4 envs · random actions · seed 0" in stderr
    assert "Traceback" not in stderr
    for said in ("1,003 frames of CartPole-v1", "unfinished", "mean", "saved in", "a/b (", 'swath.load("a/b")'):
        assert said in stdout
    data = swath.load("a/b")
    assert data.frames.shape == (1003,)
    assert TensorDict.load_memmap("a/b/frames").shape == (1003,)  # what TensorDict itself calls memory-mapped
    assert data.metadata["complete"] is True
    assert data.metadata["frames_per_env"] == [251, 251, 251, 250]
    assert [path.name for path in Path("a").iterdir()] == ["b"]
    check_episodes(data)
    namespace: dict[str, Any] = {"batches": []}
    exec(code_in(stdout), namespace)
    assert (batches_as_frames(namespace["batches"]) == data.frames).all()
    assert "Dataset(CartPole-v1: 1,003 frames" in repr(namespace["data"])


@pytest.mark.parametrize(("frames", "envs", "batch"), [(5, 8, 8), (103, 3, 30), (64, 1, 7), (96, 8, 24), (50, 7, 100)])
def test_every_frame_is_at_its_place(swath_here: Any, frames: int, envs: int, batch: int) -> None:
    size = -(-batch // envs) * envs
    arguments = ("--frames", str(frames), "--envs", str(envs), "--frames-per-batch", str(size), "--seed", "1")
    result = swath_here("collect", "my_envs:Count-v0", *arguments, "--out", "data")
    assert result.code == 0
    data = swath.load("data")
    assert len(data.frames) == frames
    check_episodes(data)
    check_steps(data)
    ended = [row for row in data.episodes if row["terminated"]]
    assert len(ended) == data.metadata["episodes"] == sum(n // 9 for n in data.metadata["frames_per_env"])
    assert all(row["length"] == 9 and row["return"] == 4.5 for row in ended)


def test_the_same_seed_gives_the_same_bytes(swath_here: Any) -> None:
    common = ("collect", "CartPole-v1", "--frames", "2k", "--envs", "3", "--policy", "my_agent.policies:make_policy")
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert swath_here(*common, "--seed", seed, "--out", out).code == 0
    assert frame_files("a") == frame_files("b") != frame_files("c")
    assert Path("a/episodes.csv").read_bytes() == Path("b/episodes.csv").read_bytes()


def test_the_python_lines_do_the_same_with_every_option(swath_here: Any) -> None:
    result = swath_here(
        *("collect", "CartPole-v1", "--frames", "1e3", "--envs", "2", "--policy", "my_agent.policies:make_policy"),
        *("--max-frames-per-traj", "11", "--frames-per-batch", "100", "--seed", "9", "--out", "data"),
    )
    assert result.code == 0
    namespace: dict[str, Any] = {"batches": []}
    exec(code_in(result.stdout), namespace)
    data = namespace["data"]
    assert (batches_as_frames(namespace["batches"]) == data.frames).all()
    assert max(row["length"] for row in data.episodes) == 11
    assert any(row["truncated"] for row in data.episodes)


def test_a_drawn_seed_is_recorded(swath_here: Any) -> None:
    first = json.loads(swath_here("collect", "CartPole-v1", "--frames", "100", "--out", "a", "--json").stdout)
    seed = swath.load("a").metadata["seed"]
    assert first["seed"] == seed
    assert swath_here("collect", "CartPole-v1", "--frames", "100", "--out", "b", "--seed", str(seed)).code == 0
    assert frame_files("a") == frame_files("b")


def test_integer_actions(swath_here: Any) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "20", "--categorical", "--out", "data")
    assert "categorical_action_encoding=True" in result.stdout
    assert swath.load("data").frames["action"].shape == (20,)


def test_metadata_says_how_and_not_where(swath_here: Any, folder: Path) -> None:
    out = str(folder / "deep" / "data")
    assert swath_here("collect", "CartPole-v1", "--frames", "50", "--seed", "3", "--out", out).code == 0
    text = Path(out, "metadata.json").read_text()
    assert str(folder) not in text
    metadata = json.loads(text)
    assert metadata["command"] == "swath collect CartPole-v1 --frames 50 --envs 1 --seed 3 --out data"
    assert set(metadata["versions"]) == {"swath", "python", "torch", "tensordict", "gymnasium", "numpy"}
    assert metadata["specs"]["action"]["action"] == {"type": "OneHot", "shape": [2], "dtype": "int64", "n": 2}
    assert metadata["specs"]["stored"]["next.observation"] == {"shape": [4], "dtype": "float32"}
    assert metadata["arguments"]["frames"] == 50


@pytest.mark.processes
def test_json_is_all_there_is_on_stdout(warm_swath: Any) -> None:
    process = warm_swath("collect", "my_envs:Noisy-v0", "--frames", "90", "--out", "data", "--json", "--seed", "0")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout.count("\n") == 1
    result = json.loads(stdout)
    assert result["frames"] == 90
    assert result["episodes"] == 10
    assert result["return"] == {"mean": 4.5, "min": 4.5, "max": 4.5}
    assert (result["out"], result["complete"], result["error"], result["exit_code"]) == ("data", True, None, 0)
    assert result["bytes"] > 0
    assert "an env that talks" in stderr


def test_quiet(swath_here: Any) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "50", "--out", "data", "--quiet")
    assert (result.code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.processes
def test_a_terminal_gets_a_live_display(swath_process: Any) -> None:
    process, screen = screen_of(swath_process, "collect", "my_envs:Slow-v0", "--frames", "900", "--out", "data")
    stdout, _ = process.communicate()
    assert process.returncode == 0
    for part in ("my_envs:Slow-v0 · 1 env · random actions", "loading PyTorch", "/ 900 frames", "ETA", "frames/s now"):
        assert part in screen
    assert "\x1b" not in stdout  # that one is a pipe


@pytest.mark.processes
def test_help_and_version_do_not_wait_for_torch() -> None:
    code = "import sys, swath, swath.cli.main; print('torch' in sys.modules, 'rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False False\n"
    assert subprocess.check_output([sys.executable, "-m", "swath", "--version"], text=True) == "swath 0.1.0\n"
    shown = subprocess.check_output([sys.executable, "-m", "swath.cli.main", "collect", "--help"], text=True)
    assert "examples:" in shown
    assert max(map(len, shown.splitlines())) < 80
    script = Path(sys.executable).with_name("swath")
    assert "collect" in subprocess.check_output([script, "--help"], text=True)
    assert subprocess.run([script], capture_output=True).returncode == 2

"""``swath collect`` when it does not go as planned: Ctrl-C, errors, places that are taken, mistyped names."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import swath
from command_checks import entries, wait_for
from dataset_checks import check_episodes

# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_collected(warm_swath: Any, number: signal.Signals) -> None:
    process = warm_swath("collect", "my_envs:Slow-v0", "--frames", "1M", "--envs", "3", "--out", "data", "--json")
    wait_for(process.stderr, " / 1,000,000 frames")
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + number, stderr
    result = json.loads(stdout)
    assert (result["complete"], result["stopped_by"]) == (False, number.name)
    data = swath.load("data")
    assert 0 < len(data.frames) == result["frames"] < 1_000_000
    assert len(data.frames) % 3 == 0
    assert data.metadata["complete"] is False
    assert f"kept {len(data.frames):,} of 1,000,000 frames in data" in stderr
    assert "Traceback" not in stderr
    assert entries() == {"data"}
    check_episodes(data)
    steps = data.frames["next", "observation"].reshape(3, -1, 2)[:, :, 0]
    assert (steps == steps[0]).all()
    assert steps[0].tolist() == list(range(1, len(data.frames) // 3 + 1))


@pytest.mark.processes
def test_the_second_ctrl_c_does_not_wait_for_the_step(warm_swath: Any) -> None:
    process = warm_swath(
        "collect", "my_envs:Stuck-v0", "--frames", "900", "--frames-per-batch", "20", "--out", "data", "--seed", "0"
    )
    wait_for(process.stdout, "waiting")
    process.send_signal(signal.SIGINT)
    wait_for(process.stderr, "Ctrl-C again leaves at once")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert len(swath.load("data").frames) == 67


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_env_that_fails_midway(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:Failing-v0", "--frames", "1k", "--envs", "2", "--out", "data")
    assert result.code == 1
    assert "error: RuntimeError: lost contact with '/home/someone/robot.sock'" in result.stderr
    assert "env 0 (Failing-v0)" in result.stderr  # the exception's note
    assert "kept 120 of 1,000 frames in data" in result.stderr
    assert "Traceback" not in result.stderr
    assert "partial_batch" not in result.stderr
    data = swath.load("data")
    assert len(data.frames) == 120
    assert data.metadata["frames_per_env"] == [60, 60]
    assert data.metadata["stopped_by"] == "error"
    assert "/home" not in data.metadata["error"]
    check_episodes(data)


def test_an_env_that_fails_at_once_leaves_nothing(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:FailingAtOnce-v0", "--frames", "1k", "--out", "data", "--json")
    assert result.code == 1
    assert json.loads(result.stdout)["out"] is None
    assert "nothing was saved" in result.stderr
    assert entries() == set()


def test_traceback(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:FailingAtOnce-v0", "--frames", "1k", "--out", "data", "--traceback")
    assert "Traceback (most recent call last)" in result.stderr
    assert "my_envs.py" in result.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("CartPol-v1", "there is no env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ("Qqqqqqqq-v7", "module:Env-v0"),
        ("ALE/Pong-v5", 'pip install "swath[atari]"'),
        ("my_envs:Missing-v0", 'Box2D is not installed, run `pip install "gymnasium[box2d]"`'),
        ("no_such_module:Env-v0", "there is no module 'no_such_module'"),
    ],
)
def test_an_env_that_is_not_there(swath_here: Any, env: str, said: str) -> None:
    result = swath_here("collect", env, "--frames", "10", "--out", "data")
    assert result.code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert result.stdout == ""
    assert entries() == set()


@pytest.mark.parametrize(
    ("policy", "code", "said"),
    [
        ("my_agent.policies", 2, "write it as module:factory"),
        (
            "my_agnt.policies:make_policy",
            2,
            "no module 'my_agnt', neither here nor installed; did you mean 'my_agent'?",
        ),
        ("my_agent.polices:make_policy", 2, "did you mean 'my_agent.policies'"),
        ("my_agent.policies:make_polcy", 2, "has no 'make_polcy'; did you mean 'make_policy'"),
        ("my_agent.needy:make_policy", 2, "pip install not_installed_anywhere"),
        ("my_agent.policies:make_nothing", 2, "it must return a policy"),
        ("my_agent.policies:make_with_weights", 2, "the factory wants (path, epoch)"),
        ("my_agent.policies:ready", 2, "not a function that makes a policy"),
        ("my_agent.policies:make_badly", 1, "raised by the factory"),
    ],
)
def test_a_policy_that_cannot_be_made(swath_here: Any, policy: str, code: int, said: str) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "10", "--out", "data", "--policy", policy)
    assert result.code == code
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    assert entries() == set()


def test_more_than_the_disk_holds(swath_here: Any) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "1e15", "--out", "data")
    assert result.code == 2
    assert "the disk has" in result.stderr
    assert entries() == set()


# -- places that are taken ---------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(swath_here: Any) -> Path:
    assert swath_here("collect", "CartPole-v1", "--frames", "10", "--out", "data").code == 0
    return Path("data")


AGAIN = ("collect", "CartPole-v1", "--frames", "20", "--out", "data")


def test_what_exists_is_not_overwritten(swath_here: Any, dataset: Path) -> None:
    result = swath_here(*AGAIN, "--json")
    assert result.code == 2
    assert "exists already" in result.stderr
    assert json.loads(result.stdout)["exit_code"] == 2
    assert len(swath.load(dataset).frames) == 10
    assert swath_here(*AGAIN, "--overwrite").code == 0
    assert len(swath.load(dataset).frames) == 20
    assert entries() == {"data"}


def test_a_failure_leaves_the_old_dataset(swath_here: Any, dataset: Path) -> None:
    failing = ("collect", "my_envs:FailingAtOnce-v0", "--frames", "20", "--out", "data", "--overwrite")
    assert swath_here(*failing).code == 1
    assert len(swath.load(dataset).frames) == 10
    assert entries() == {"data"}


def test_overwrite_removes_datasets_only(swath_here: Any, dataset: Path) -> None:
    (dataset / "notes.txt").write_text("mine")
    result = swath_here(*AGAIN, "--overwrite")
    assert result.code == 2
    assert "'notes.txt'" in result.stderr
    shutil.rmtree(dataset)
    dataset.mkdir()
    (dataset / "thesis.tex").write_text("mine")
    result = swath_here(*AGAIN, "--overwrite")
    assert result.code == 2
    assert "no swath dataset" in result.stderr
    assert (dataset / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("out", ["my_envs.py", "my_envs.py/data"])
def test_a_file_is_no_place(swath_here: Any, out: str) -> None:
    before = Path("my_envs.py").read_text()
    result = swath_here("collect", "CartPole-v1", "--frames", "10", "--out", out, "--overwrite")
    assert result.code == 2
    assert Path("my_envs.py").read_text() == before


def test_a_place_without_permission(swath_here: Any) -> None:
    # Not a locked directory: root, as which tests often run, may write there.
    result = swath_here("collect", "CartPole-v1", "--frames", "10", "--out", "/proc/self/data")
    assert result.code == 2
    assert "permission" in result.stderr

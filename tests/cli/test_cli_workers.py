"""``swath collect --workers``: the same datasets, from processes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import swath
from command_checks import batches_as_frames, code_in, entries, frame_files, screen_of
from dataset_checks import check_episodes, check_steps
from swath.cli.progress import CollectingLines

pytestmark = pytest.mark.processes
BOTH = pytest.mark.parametrize("sync", [(), ("--sync",)], ids=["async", "sync"])


@pytest.fixture
def interrupted_when_told() -> Iterator[None]:
    """Ctrl-C, as soon as an env tells that it is where it was asked to tell."""
    os.mkfifo("told")
    pipe = os.open("told", os.O_RDWR)  # envs that tell later do not wait for a reader

    def interrupt() -> None:
        if os.read(pipe, 1) == b"!":
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    os.write(pipe, b".")
    thread.join()
    os.close(pipe)


# -- what is written ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("frames", "envs", "workers", "batch"),
    [(103, 3, 2, 30), (5, 8, 2, 8), (900, 5, 5, None), (64, 1, 1, 7), (400, 4, 2, 1)],
)
def test_every_frame_is_at_its_place(
    swath_here: Any, sync: tuple[str, ...], frames: int, envs: int, workers: int, batch: int | None
) -> None:
    size = () if batch is None else ("--frames-per-batch", str(-(-batch // envs) * envs if sync else batch))
    arguments = ("--frames", str(frames), "--envs", str(envs), "--workers", str(workers), *sync, *size)
    result = swath_here("collect", "my_envs:Count-v0", *arguments, "--seed", "1", "--out", "data")
    assert result.code == 0, result.stderr
    data = swath.load("data")
    assert len(data.frames) == sum(data.metadata["frames_per_env"]) == frames
    assert len(data.metadata["frames_per_env"]) == envs
    if sync:
        assert max(data.metadata["frames_per_env"]) - min(data.metadata["frames_per_env"]) <= 1
    check_episodes(data)
    check_steps(data)
    ended = [row for row in data.episodes if row["terminated"]]
    assert len(ended) == data.metadata["episodes"] == sum(n // 9 for n in data.metadata["frames_per_env"])
    assert all(row["length"] == 9 and row["return"] == 4.5 for row in ended)
    assert ("collector", "env") not in data.frames.keys(True)
    assert entries() == {"data"}


def test_in_step_the_same_seed_gives_the_same_bytes(swath_here: Any) -> None:
    common = ("collect", "CartPole-v1", "--frames", "1003", "--envs", "3", "--workers", "2", "--sync")
    policy = ("--policy", "my_agent.policies:make_policy")
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        result = swath_here(*common, *policy, "--seed", seed, "--out", out)
        assert result.code == 0, result.stderr
    assert frame_files("a") == frame_files("b") != frame_files("c")
    assert Path("a/episodes.csv").read_bytes() == Path("b/episodes.csv").read_bytes()


@BOTH
def test_the_python_lines_do_the_same(swath_here: Any, sync: tuple[str, ...]) -> None:
    result = swath_here(
        *("collect", "CartPole-v1", "--frames", "500", "--envs", "3", "--workers", "2", *sync, "--categorical"),
        *("--max-frames-per-traj", "11", "--frames-per-batch", "60", "--seed", "9", "--out", "data"),
    )
    assert result.code == 0, result.stderr
    namespace: dict[str, Any] = {"batches": []}
    exec(code_in(result.stdout), namespace)
    data = namespace["data"]
    assert type(namespace["collector"]).__name__ == ("MultiSyncCollector" if sync else "MultiAsyncCollector")
    if sync:
        assert (batches_as_frames(namespace["batches"]) == data.frames).all()
    else:  # which env is first is not in our hands
        assert sum(map(len, namespace["batches"])) == 500
        assert set(namespace["batches"][0].keys(True, True)) == set(data.frames.keys(True, True))
    assert max(row["length"] for row in data.episodes) == 11
    assert data.frames["action"].shape == (500,)


@pytest.mark.parametrize("factory", ["make_policy", "Linear"])
def test_the_python_lines_make_the_same_policy(swath_here: Any, factory: str) -> None:
    result = swath_here(
        *("collect", "CartPole-v1", "--frames", "300", "--workers", "2", "--sync", "--seed", "9", "--out", "data"),
        *("--policy", f"my_agent.policies:{factory}"),
    )
    assert result.code == 0, result.stderr
    namespace: dict[str, Any] = {"batches": []}
    exec(code_in(result.stdout), namespace)
    assert (batches_as_frames(namespace["batches"]) == namespace["data"].frames).all()


@BOTH
def test_what_is_said_and_recorded(swath_here: Any, sync: tuple[str, ...]) -> None:
    arguments = ("collect", "my_envs:Count-v0", "--frames", "90", "--workers", "2", *sync, "--seed", "3")
    result = swath_here(*arguments, "--out", "data", "--json")
    assert result.code == 0, result.stderr
    told, metadata = json.loads(result.stdout), swath.load("data").metadata
    for said in (told, metadata):
        assert (said["num_envs"], said["workers"], said["sync"], said["frames"]) == (2, 2, bool(sync), 90)
    assert "2 envs in 2 workers" in result.stderr
    assert metadata["command"] == (
        "swath collect my_envs:Count-v0 --frames 90 --envs 2 --seed 3 --workers 2"
        + (" --sync" if sync else "")
        + " --out data"
    )
    assert metadata["specs"]["stored"]["next.observation"] == {"shape": [2], "dtype": "float32"}
    assert metadata["specs"]["action"]["action"]["n"] == 2


def test_without_workers_nothing_is_said_of_them(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:Count-v0", "--frames", "9", "--out", "data", "--json")
    assert "workers" not in json.loads(result.stdout)
    assert "workers" not in swath.load("data").metadata


def test_a_terminal_gets_a_line_for_each_worker(swath_process: Any) -> None:
    arguments = ("collect", "my_envs:Noisy-v0", "--frames", "20k", "--workers", "2", "--envs", "3", "--out", "data")
    process, screen = screen_of(swath_process, *arguments, "--json")
    stdout, _ = process.communicate()
    assert process.returncode == 0
    for part in ("3 envs in 2 workers", "starting the workers", "/ 20,000 frames", "time in env / policy / waiting"):
        assert part in screen
    assert stdout.count("\n") == 1  # what envs print is not among the results
    assert json.loads(stdout)["frames"] == 20_000
    assert "an env that talks" in screen


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sync",), "say how many with --workers N"),
        (("--workers", "4", "--envs", "3"), "--envs 3 is less than --workers 4"),
        (("--workers", "2", "--policy", "my_agent.policies:make_nothing"), "it must return a policy"),
    ],
)
def test_options_that_do_not_go_together(swath_here: Any, arguments: tuple[str, ...], said: str) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "10", *arguments, "--out", "data", "--json")
    assert result.code == 2
    assert said in result.stderr
    assert json.loads(result.stdout)["exit_code"] == 2
    assert entries() == set()


def test_a_policy_that_cannot_be_sent(swath_here: Any) -> None:
    policy = ("--policy", "my_agent.policies:make_unpicklable")
    assert swath_here("collect", "CartPole-v1", "--frames", "10", *policy, "--out", "a").code == 0
    result = swath_here("collect", "CartPole-v1", "--frames", "10", *policy, "--out", "b", "--workers", "1")
    assert result.code == 1
    assert "the policy cannot be sent to a worker process" in result.stderr
    assert entries() == {"a"}


def test_more_than_the_disk_holds(swath_here: Any) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "1e15", "--workers", "1", "--out", "data")
    assert result.code == 2
    assert "twice their size" in result.stderr
    assert entries() == set()


# -- endings -----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.usefixtures("interrupted_when_told")
def test_ctrl_c_keeps_what_was_collected(swath_here: Any, sync: tuple[str, ...]) -> None:
    arguments = ("collect", "my_envs:Telling-v0", "--frames", "1M", "--workers", "3", *sync, "--out", "data")
    result = swath_here(*arguments)
    assert result.code == 130, result.stderr
    data = swath.load("data")
    assert f"stopped by Ctrl-C; kept {len(data.frames):,} of 1,000,000 frames in data" in result.stderr
    # All envs had come about as far, and none had filled a batch.
    assert all(count >= 30 for count in data.metadata["frames_per_env"])
    assert (data.metadata["complete"], data.metadata["stopped_by"]) == (False, "SIGINT")
    check_episodes(data)
    check_steps(data)


@BOTH
@pytest.mark.usefixtures("interrupted_when_told")
def test_the_second_ctrl_c_does_not_wait_for_a_worker(
    swath_here: Any, sync: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_again(_: Any, line: str) -> None:
        if "Ctrl-C again leaves at once" in line:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(CollectingLines, "say", press_again)
    result = swath_here(
        *("collect", "my_envs:TellingAndStuck-v0", "--frames", "900", "--workers", "1", "--envs", "2", *sync),
        *("--frames-per-batch", "40" if sync else "20", "--out", "data"),
    )
    assert result.code == 130, result.stderr
    # Whatever was written by then: all that was collected is kept or said to be lost.
    said = re.search(r"stopped by Ctrl-C; kept (\d+) of 900 frames.* (\d+) later ones, not yet written", result.stderr)
    assert said is not None, result.stderr
    data = swath.load("data")
    kept, lost = map(int, said.groups())
    assert kept == len(data.frames) >= 40
    assert kept + lost == 134
    check_steps(data)


@BOTH
def test_an_env_that_fails(swath_here: Any, sync: tuple[str, ...]) -> None:
    arguments = ("collect", "my_envs:Failing-v0", "--frames", "1k", "--workers", "2", *sync, "--out", "data")
    result = swath_here(*arguments)
    assert result.code == 1
    assert "error: RuntimeError: lost contact with '/home/someone/robot.sock'" in result.stderr
    assert "raised in worker" in result.stderr
    assert "(Failing-v0) in its step" in result.stderr
    assert "Traceback" not in result.stderr
    assert "partial_batch" not in result.stderr
    data = swath.load("data")
    assert f"kept {len(data.frames):,} of 1,000 frames in data" in result.stderr
    assert max(data.metadata["frames_per_env"]) <= 60
    if not sync:  # of the env that failed, all that came before is there
        assert max(data.metadata["frames_per_env"]) == 60
    assert data.metadata["stopped_by"] == "error"
    assert "/home" not in data.metadata["error"]
    check_episodes(data)
    check_steps(data)


@BOTH
def test_a_worker_that_dies(swath_here: Any, sync: tuple[str, ...]) -> None:
    size = ("--frames-per-batch", "40" if sync else "20")
    arguments = ("collect", "my_envs:Dying-v0", "--frames", "1k", "--workers", "2", *size, *sync, "--out", "data")
    result = swath_here(*arguments)
    assert result.code == 1
    assert "WorkerDied: worker " in result.stderr
    assert "was killed by SIGKILL" in result.stderr
    data = swath.load("data")
    assert 0 < len(data.frames) <= 120
    check_episodes(data)
    check_steps(data)


def test_a_worker_that_dies_at_once_leaves_nothing(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:FailingAtOnce-v0", "--frames", "1k", "--workers", "2", "--out", "data")
    assert result.code == 1
    assert "lost contact" in result.stderr
    assert entries() == set()

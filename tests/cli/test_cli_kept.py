"""``swath collect`` that is killed, or has no room: what was committed is there."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import swath
from command_checks import entries
from dataset_checks import check_episodes, check_steps
from leaks import wait_until
from programs import WarmProgram
from small_disk import ON_A_SMALL_DISK
from swath.dataset_files import read_commits

WAYS = {
    "one env": (),
    "several": ("--envs", "3"),
    "sync": ("--envs", "3", "--workers", "2", "--sync"),
    "async": ("--envs", "3", "--workers", "2"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
pytestmark = pytest.mark.processes


def committed(folder: Path) -> int:
    """How many frames were committed in a folder that is being written."""
    return sum(read_commits(folder).frames_per_env) if (folder / "metadata.json").exists() else 0


def kill_after_two_batches(warm_swath: Any, *arguments: str) -> tuple[Path, int]:
    """The folder that is left, and how many frames it had shortly before."""
    process = warm_swath("collect", *arguments, "--frames", "1M", "--seed", "0", "--out", "data", "--quiet")
    place = Path(f"data.unfinished-{process.pid}")
    assert wait_until(lambda: committed(place) >= 60, 60)
    before = committed(place)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    return place, before


@EVERY_WAY
def test_what_was_committed_before_a_kill_can_be_opened(warm_swath: Any, way: tuple[str, ...]) -> None:
    size = "30" if "--envs" in way and ("--sync" in way or "--workers" not in way) else "10"
    place, before = kill_after_two_batches(warm_swath, "my_envs:Slow-v0", *way, "--frames-per-batch", size)
    data = swath.load(place)
    assert before <= len(data.frames) == data.metadata["frames"] < 1_000_000
    assert data.metadata["complete"] is False
    assert data.metadata["env_id"] == "my_envs:Slow-v0"
    assert data.metadata["specs"]["stored"]["next.observation"] == {"shape": [2], "dtype": "float32"}
    check_episodes(data)
    check_steps(data)
    ended = [row for row in data.episodes if row["terminated"]]
    assert len(ended) == data.metadata["episodes"] == sum(n // 9 for n in data.metadata["frames_per_env"])
    assert data.metadata["return"] == {"mean": 4.5, "min": 4.5, "max": 4.5}
    assert (data.metadata["length"]["max"], data.metadata["seconds"]) == (9, None)
    with pytest.raises(FileNotFoundError, match=rf"'{place}' is one that is not finished, or was killed"):
        swath.load("data")


def test_a_line_that_a_kill_cut_off_does_not_count(warm_swath: Any) -> None:
    place, _ = kill_after_two_batches(warm_swath, "my_envs:Slow-v0", "--frames-per-batch", "20")
    frames = len(swath.load(place).frames)
    commits = (place / "commits.jsonl").read_bytes().splitlines(keepends=True)
    (place / "commits.jsonl").write_bytes(b"".join(commits)[:-5])
    data = swath.load(place)
    assert len(data.frames) == frames - 20
    check_episodes(data)
    check_steps(data)
    (place / "commits.jsonl").write_bytes(commits[0])
    with pytest.raises(ValueError, match="before its first batch"):
        swath.load(place)


_COLLECT = """
import shutil
from swath.cli.main import main

inside, outside, *arguments = sys.argv[1:]
code = main([*arguments, "--out", inside + "/data"])
shutil.copytree(inside, outside)  # nobody else sees the disk
sys.exit(code)
"""


def on_a_small_disk(num_bytes: int, *arguments: str) -> tuple[int, str, str]:
    os.mkdir("disk")
    where = str(Path("disk").absolute())
    command = ("collect", *arguments, "--seed", "0", "--frames", "2000")
    with WarmProgram(ON_A_SMALL_DISK + _COLLECT, where, str(num_bytes), where, "seen", *command) as program:
        stdout, stderr = program.communicate()
    assert program.returncode is not None
    return program.returncode, stdout, stderr


@EVERY_WAY
def test_a_disk_that_fills_up_ends_it_with_a_sentence_and_keeps_what_was_committed(way: tuple[str, ...]) -> None:
    # Room enough for what the env says of its frames, and not for what the policy adds to them.
    policy = ("--policy", "my_agent.policies:make_wordy", "--frames-per-batch", "60")
    code, stdout, stderr = on_a_small_disk(400_000, "my_envs:Count-v0", *way, *policy, "--json")
    assert code == 1, stderr
    assert "error: DiskFull: the next frames need " in stderr
    assert " B are free; make room, or choose another disk" in stderr
    assert "Traceback" not in stderr
    result, data = json.loads(stdout), swath.load("seen/data")
    assert 0 < len(data.frames) == result["frames"] < 2000
    assert f"kept {len(data.frames):,} of 2,000 frames in " in stderr
    assert {path.name for path in Path("seen").iterdir()} == {"data"}
    assert data.metadata["complete"] is False
    check_episodes(data)
    check_steps(data)


def test_frames_that_cannot_be_put_in_order_stay_as_they_came(swath_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swath.cli.writer.DatasetWriter._copy", full)
    result = swath_here("collect", "my_envs:Failing-v0", "--frames", "1k", "--envs", "2", "--out", "data")
    assert result.code == 1
    assert "kept 120 of 1,000 frames in data (marked incomplete)" in result.stderr
    assert "it is not in its final form (No space left on device); swath.load opens it all the same" in result.stderr
    data = swath.load("data")
    assert data.metadata["frames_per_env"] == [60, 60]
    assert data.metadata["stopped_by"] == "error"
    assert entries() == {"data"}
    check_episodes(data)
    check_steps(data)
    again = ("collect", "my_envs:Count-v0", "--frames", "9", "--out", "data", "--overwrite")
    assert swath_here(*again).code == 0
    shutil.rmtree("data")


@pytest.mark.parametrize("out", ["/proc/nope", "/proc/nope/deeper", "/sys/nope"])
def test_a_place_where_nothing_can_be_made(swath_here: Any, out: str) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "10", "--out", out)
    assert result.code == 2
    assert f"--out {out}: cannot write there: " in result.stderr
    assert "bytes left" not in result.stderr


@pytest.mark.parametrize("sync", [(), ("--sync",)], ids=["async", "sync"])
def test_frames_that_were_shown_are_kept_or_said_to_be_lost(swath_here: Any, sync: tuple[str, ...]) -> None:
    """One env fails while the other is in the middle of its batch."""
    arguments = ("collect", "my_envs:OneFails-v0", "--frames", "1k", "--workers", "2", *sync, "--out", "data")
    result = swath_here(*arguments)
    assert result.code == 1
    assert "lost contact" in result.stderr
    data = swath.load("data")
    counts = data.metadata["frames_per_env"]
    if sync:  # all envs of a batch have the same number of steps
        assert 30 <= counts[0] == counts[1] < 60
        assert " later ones, not yet written, are lost" in result.stderr
    else:
        assert 30 <= min(counts) < max(counts) == 60
        assert "are lost" not in result.stderr
    check_episodes(data)
    check_steps(data)


def test_frames_that_died_with_a_worker_are_said_to_be_lost(swath_here: Any) -> None:
    result = swath_here("collect", "my_envs:Dying-v0", "--frames", "1k", "--workers", "1", "--out", "data")
    assert result.code == 1
    assert "nothing was collected, so nothing was saved; 60 frames, not yet written, are lost" in result.stderr
    assert entries() == set()

"""What is typed wrong is answered with what was meant; all of the path is on the screen."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import pytest

from swath.cli.main import main
from swath.cli.options import CollectOptions
from swath.cli.progress import collecting
from swath.envs import GymEnv


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("collect CartPole-v1 --frames 9 --out x --worker 2", "--worker: did you mean --workers?"),
        ("collect CartPole-v1 --frames 9 --out x --num-envs=2", "--num-envs: did you mean --envs?"),
        ("collect CartPole-v1 --total-timesteps 9 --out x", "--total-timesteps: did you mean --frames?"),
        ("collect CartPole-v1 --frame 9 --out x", "--frame: did you mean --frames?"),
        ("collct CartPole-v1", "did you mean swath collect?"),
        (
            "collect CartPole-v1 --frames 9 --out x --resume",
            "--resume: a folder is not gone on with: collect the rest with another --out and another --seed, then "
            "swath.load both",
        ),
    ],
)
def test_a_misspelt_option_is_answered_with_the_right_one(command: str, said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(command.split())
    assert left.value.code == 2
    assert said in capsys.readouterr().err.splitlines()


def test_out_where_no_folder_can_be_says_so(swath_here: Any) -> None:
    result = swath_here("collect", "CartPole-v1", "--frames", "9", "--out", "/proc/nope")
    assert result.code == 2
    assert "no folder can be made in /proc: that is no place for files; choose another place" in result.stderr


@pytest.mark.parametrize(
    ("env", "options", "package", "extra"),
    [
        ("HalfCheetah-v5", {}, "mujoco", "mujoco"),
        ("ALE/Pong-v5", {}, "ale_py", "atari"),
        ("dm_control/cartpole-swingup-v0", {}, "dm_control", "dm-control"),
        ("CartPole-v1", {"render_mode": "rgb_array"}, "pygame", "classic-control"),
    ],
)
def test_a_missing_package_names_swaths_own_extra(
    env: str, options: dict[str, Any], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises((gymnasium.error.DependencyNotInstalled, ModuleNotFoundError), match=rf"swath\[{extra}\]"):
        GymEnv(env, **options)


@pytest.mark.parametrize("width", [60, 80])
def test_the_live_header_has_all_of_the_path(width: int) -> None:
    out = "/data/of/a/project/with/a/long/name/collected/on/a/wednesday/for/the/paper/pendulum"
    shown = collecting(CollectOptions("Pendulum-v1", 1000, out, envs=16, workers=4), None, width).plain
    assert out in "".join(shown.splitlines())
    assert max(map(len, shown.splitlines())) <= width

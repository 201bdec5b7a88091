"""``swath tune``: what it says, suggests and returns."""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import Any

import pytest

from command_checks import wait_for
from swath.cli.tune import TuneOptions, code_of
from swath.tuning import Arrangement, Form, Trial

LONG = ("--seconds", "30", "--frames-per-batch", "32")
QUICK = ("--seconds", "0.2", "--frames-per-batch", "32")


def code_in(stdout: str) -> list[str]:
    """What is suggested: indented by four, from its imports on."""
    pieces = re.split(r"\n(?=\S)|\n(?=  \S)", stdout)
    found = ["\n".join(line[4:] for line in piece.splitlines() if line.startswith("    ")) for piece in pieces]
    return [piece for piece in found if "collector = " in piece]


def test_the_suggestion_runs_as_it_stands(swath_here: Any) -> None:
    result = swath_here("tune", "CartPole-v1", "--collector", "single", "--envs", "1", *QUICK)
    assert result.code == 0, result.stderr
    for said in ("CartPole-v1 · random actions", "a step takes", "predicted   measured", "on-policy"):
        assert said in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "swath: measuring the env and the policy" in result.stderr
    (code,) = code_in(result.stdout)
    names: dict[str, Any] = {}
    exec(code, names)
    with names["collector"] as collector:
        assert next(iter(collector)).numel() == 32


@pytest.mark.processes
def test_both_kinds_are_suggested_with_the_policy(swath_here: Any) -> None:
    policy = ("--policy", "my_agent.policies:make_policy")
    result = swath_here("tune", "CartPole-v1", *policy, "--envs", "2", *QUICK)
    assert result.code == 0, result.stderr
    codes = code_in(result.stdout)
    assert len(codes) == 2
    for code in codes:
        assert "policy = make_policy(env)" in code
        names: dict[str, Any] = {}
        exec(code, names)
        with names["collector"] as collector:
            assert next(iter(collector)).numel() >= 16


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.processes
def test_every_kind_of_code_runs(form: Form, categorical: bool, folder: Any) -> None:
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {}
    options = TuneOptions("my_envs:Count-v0", "my_agent.policies:make_unpicklable", categorical=categorical)
    if form in (Form.SYNC, Form.ASYNC) or categorical:
        options = TuneOptions("my_envs:Count-v0", categorical=categorical)
    exec("\n".join(code_of(options, Trial(Arrangement(form, 2, 2), 8, 1.0))), names)
    with names["collector"] as collector:
        batch = next(iter(collector))
        assert batch.numel() == 8
        assert batch["action"].ndim == batch.ndim + (0 if categorical else 1)


@pytest.mark.processes
def test_json_is_all_there_is_on_stdout(warm_swath: Any) -> None:
    process = warm_swath("tune", "my_envs:Noisy-v0", "--collector", "single", "--envs", "1", *QUICK, "--json")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout.count("\n") == 1
    told = json.loads(stdout)
    assert (told["env_id"], told["complete"], told["error"], told["exit_code"]) == ("my_envs:Noisy-v0", True, None, 0)
    assert {each["num_envs"] for each in told["trials"]} == {1}
    assert told["costs"]["turns"]["1"]["policy_s"] >= 0
    (suggestion,) = told["suggestions"]
    assert "collector = Collector(" in suggestion["code"]
    assert suggestion["measured_fps"] > 0
    assert "an env that talks" in stderr


@pytest.mark.processes
def test_ctrl_c_prints_what_is_known(warm_swath: Any) -> None:
    process = warm_swath("tune", "my_envs:Slow-v0", "--collector", "single", "--envs", "1,2,4", *LONG)
    wait_for(process.stderr, "trying Collector")
    wait_for(process.stderr, "trying Collector")  # the first one has been tried
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "stopped; this is what is known by now" in stderr
    assert "Traceback" not in stderr
    assert "a step takes" in stdout
    assert len(code_in(stdout)) == 1


@pytest.mark.processes
def test_ctrl_c_before_anything_is_known(warm_swath: Any) -> None:
    process = warm_swath("tune", "my_envs:Stuck-v0", "--collector", "single", "--envs", "1", "--json")
    wait_for(process.stderr, "waiting")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "nothing is known yet" in stderr
    assert json.loads(stdout)["error"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["CartPol-v1"], 2, "there is no env 'CartPol-v1'; did you mean 'CartPole-v1'"),
        (["my_envs:Missing-v0"], 2, "Box2D is not installed"),
        (["not_there:Env-v0"], 2, "there is no module 'not_there'"),
        (["CartPole-v1", "--policy", "my_agent"], 2, "write it as module:factory"),
        (["CartPole-v1", "--policy", "my_agent.policies:make_polcy"], 2, "did you mean 'make_policy'"),
        (["CartPole-v1", "--policy", "my_agent.needy:make"], 2, "'not_installed_anywhere', which is not installed"),
        (["CartPole-v1", "--policy", "my_agent.policies:make_badly"], 1, "raised by the factory of --policy"),
        (["CartPole-v1", "--policy", "my_agent.policies:make_nothing"], 2, "must return a policy"),
        (["my_envs:Failing-v0"], 1, "lost contact with '/home/someone/robot.sock'"),
    ],
)
def test_errors(swath_here: Any, arguments: list[str], code: int, said: str) -> None:
    result = swath_here("tune", *arguments, "--collector", "single", *QUICK)
    assert result.code == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--envs", "0"], "not between 1"),
        (["--envs", "8,many"], "'many' is no number"),
        (["--envs", "20k"], "20,000 envs are too many"),
        (["--seconds", "soon"], "'soon' is no number of seconds"),
        (["--seconds", "0"], "not between 0 and 3600"),
        (["--collector", "multi"], "invalid choice: 'multi'"),
        (["--num-envs", "8"], "did you mean --envs?"),
        (["--agent", "a:b"], "did you mean --policy?"),
    ],
)
def test_options_that_cannot_be_meant(
    swath_here: Any, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as left:
        swath_here("tune", "CartPole-v1", *arguments)
    assert left.value.code == 2
    assert said in capfd.readouterr().err

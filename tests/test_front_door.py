"""What a user, an editor and a type checker see of the constructors."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from counting import make_counting
from swath.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from swath.collectors.distributed import DistributedCollector, DistributedSyncCollector, RayCollector, RPCCollector
from swath.collectors.distributed.arguments import NodesArguments
from swath.collectors.distributed.driver import NodesCollector
from swath.collectors.distributed.launched import LaunchedArguments, LaunchedCollector
from swath.collectors.front_door import documentation
from swath.envs import SerialEnv

COLLECTORS = [
    Collector,
    MultiCollector,
    MultiSyncCollector,
    MultiAsyncCollector,
    AsyncCollector,
    AsyncBatchedCollector,
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
]

SCRIPT = """\
import swath
from swath.collectors import AsyncBatchedCollector, AsyncCollector, Collector, MultiAsyncCollector, MultiCollector
from swath.collectors import MultiSyncCollector
from swath.collectors.distributed import DistributedCollector, DistributedSyncCollector, RayCollector, RPCCollector

{calls}
"""
#: What is right, and what a checker has to flag.
RIGHT = "Collector('CartPole-v1', frames_per_batch=10, total_frames=100, max_frames_per_traj=None)"
RIGHT += "; swath.Collector('CartPole-v1', frames_per_batch=10); swath.envs.GymEnv('CartPole-v1')"
WRONG = [f"{kind.__name__}(['CartPole-v1'], frame_per_batch=10)" for kind in COLLECTORS]
WRONG += ["Collector('CartPole-v1', frames_per_batch='ten')", "RayCollector('CartPole-v1', frames_per_batch='ten')"]
WRONG += ["MultiCollector('CartPole-v1', sync='no', frames_per_batch=10)"]
WRONG += ["swath.Collector('CartPole-v1', frame_per_batch=10)", "swath.Colector", "swath.collectors.Colector"]


@pytest.mark.parametrize("kind", COLLECTORS)
def test_every_argument_is_in_the_signature_and_in_help(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters)[:2] == ["create_env_fn", "policy"]
    assert not [each for each in parameters.values() if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    documented = documentation(inspect.cleandoc(kind.__doc__ or ""))
    assert set(parameters) == set(documented)
    assert all(text.strip() for text in documented.values())


def test_defaults_are_the_configs_own() -> None:
    """Constructors repeat them for editors; what is not given must be what is documented."""
    for kind in COLLECTORS:
        config: Any = kind._config_class  # type: ignore[attr-defined]
        defaults = {name: field.default for name, field in config.__dataclass_fields__.items()}
        for name, parameter in inspect.signature(kind).parameters.items():
            if name in defaults and name not in ("create_env_fn", "collector_class"):
                assert parameter.default == defaults[name], (kind, name)


@pytest.mark.parametrize(
    ("kind", "arguments"), [(NodesCollector, NodesArguments), (LaunchedCollector, LaunchedArguments)]
)
def test_arguments_of_collectors_on_nodes_are_told_to_type_checkers(kind: type, arguments: Any) -> None:
    own = {n: each for n, each in inspect.signature(kind.__init__).parameters.items() if n != "common"}
    inherited = {} if arguments is NodesArguments else NodesArguments.__annotations__
    told = {n: each.__forward_arg__ for n, each in arguments.__annotations__.items() if n not in inherited}
    assert list(told) == list(own)[3:]
    assert told == {name: own[name].annotation for name in told}


class OfAUser(Collector):
    """Mine."""

    def __init__(self, create_env_fn: Any, *, mine: int = 3, **kwargs: Any) -> None:
        super().__init__(create_env_fn, **kwargs)


def test_a_subclass_shows_its_own_arguments_and_ours() -> None:
    parameters = inspect.signature(OfAUser).parameters
    assert {"create_env_fn", "mine", "frames_per_batch"} <= parameters.keys()
    assert OfAUser.__doc__ == "Mine."
    with pytest.raises(TypeError, match=r"OfAUser got an unknown argument: 'total_frame' \(did you mean"):
        OfAUser(make_counting, frames_per_batch=5, total_frame=3)


def test_a_warning_is_about_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Collector(SerialEnv(3, make_counting), frames_per_batch=10):
            pass
    (warning,) = [each for each in seen if "does not divide" in str(each.message)]
    assert warning.filename == __file__


def lines_flagged(output: str) -> set[int]:
    """As both write it: ``script.py:6:1 - error: …`` and ``script.py:6: error: …``."""
    return {int(number) for number in re.findall(r"script\.py:(\d+):.*error", output)}


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_type_checkers_flag_misspelt_and_wrong_arguments(checker: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(calls="\n".join([RIGHT, *WRONG])))
    first = SCRIPT.splitlines().index("{calls}") + 1
    if checker == "pyright":
        command = ["pyright", "--pythonpath", sys.executable, str(script)]
    else:
        # Only our own front door is read: torch's types take mypy half a minute.
        config = tmp_path / "mypy.ini"
        config.write_text(
            "[mypy]\nfollow_imports = skip\n[mypy-swath,swath.collectors,swath.collectors.*]\nfollow_imports = silent\n"
        )
        command = ["mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(script)]
    ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert lines_flagged(ran.stdout) == set(range(first + 1, first + 1 + len(WRONG))), ran.stdout + ran.stderr

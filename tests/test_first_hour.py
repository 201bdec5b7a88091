"""What a new user trips over: names at the top, guesses, completion, where warnings point."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

import swath
from public_names import PUBLIC
from swath import Collector, MultiSyncCollector
from swath.collectors import VanillaWeightUpdater
from swath.collectors.base import BaseCollector
from swath.data import ListStorage
from swath.envs import StepCounter
from swath.hints import inner_names
from warned import warned_here


def test_top_level_names_are_those_of_their_folders() -> None:
    names = [name for name in swath.__all__ if name not in (*swath._FOLDERS, "__version__", "load")]
    assert sorted(names) == sorted(swath._HOMES)
    for name in names:
        home = import_module(f"swath.{swath._HOMES[name]}")
        assert name in getattr(home, "__all__", dir(home)) or name == "ExplorationType"
        assert getattr(swath, name) is getattr(home, name)
    for folder in swath._FOLDERS:
        assert getattr(swath, folder) is import_module(f"swath.{folder}")
    assert set(dir(swath)) == set(swath.__all__)


def test_a_name_that_is_not_at_the_top_says_where_to_look() -> None:
    with pytest.raises(AttributeError, match=r"StepCounter.*swath\.collectors, swath\.data, swath\.envs"):
        swath.StepCounter  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Colector'"):
        from swath import Colector  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.processes
def test_import_swath_stays_light() -> None:
    """Neither torch nor any other module of swath, until a name is asked for; then each works by itself."""
    code = """\
import sys
before = set(sys.modules)
import swath
dir(swath), hasattr(swath, "nothing")
print(sorted(name for name in sys.modules if name.startswith("swath")))
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"swath"}))
swath.GymEnv
print("torch" in sys.modules, "swath.collectors" in sys.modules)
print(swath.envs.GymEnv is swath.GymEnv)
"""
    shown = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert shown == ["['swath', 'swath.dataset', 'swath.dataset_format']", "[]", "True False", "True"]


@pytest.mark.processes
def test_every_top_level_name_can_be_the_first() -> None:
    """No name needs another one of swath to have been imported before."""
    code = """\
import os, swath, torch, tensordict.nn, gymnasium
firsts = {home: name for name, home in swath._HOMES.items()}
for name in [*firsts.values(), *swath._FOLDERS]:
    pid = os.fork()
    if not pid:
        getattr(swath, name)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- warnings point at the user's line (those of other tests are looked at by warned_here, too) ---------------------


def linear() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def test_every_warning_is_given_in_one_way() -> None:
    source = Path(swath.__file__).parent
    direct = [path for path in source.rglob("*.py") if re.search(r"warnings\.warn(_explicit)?\(", path.read_text())]
    assert direct == [source / "warn.py"]


@pytest.mark.parametrize("kind", [Collector, pytest.param(MultiSyncCollector, marks=pytest.mark.processes)])
def test_warnings_of_old_arguments_point_at_the_users_line(kind: Any) -> None:
    envs = ["Pendulum-v1"] if kind is MultiSyncCollector else "Pendulum-v1"
    policy = linear()
    with warned_here(DeprecationWarning, match="weight_updater= is deprecated"):
        collector: BaseCollector = kind(envs, policy, frames_per_batch=4, weight_updater=VanillaWeightUpdater)
    collector.shutdown()
    with (
        kind(envs, policy, frames_per_batch=4) as collector,
        warned_here(DeprecationWarning, match="policy_weights= is now called weights="),
    ):
        collector.update_policy_weights_(policy_weights=policy)


# -- completion -----------------------------------------------------------------------------------------------------


def shown(thing: Any) -> list[str]:
    return sorted({name for name in dir(thing) if not name.startswith("_")} - set(dir(torch.nn.Module)))


def policy_of_cartpole() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def in_this_process() -> list[Any]:
    policy, env = policy_of_cartpole(), swath.GymEnv("CartPole-v1")
    rb = swath.TensorDictReplayBuffer(storage=swath.LazyTensorStorage(10), batch_size=2)
    things: list[Any] = [Collector("CartPole-v1", policy, frames_per_batch=4), rb, rb.storage]
    things += [swath.LazyMemmapStorage(10), ListStorage(10), env, swath.SerialEnv(2, "CartPole-v1")]
    things += [swath.TransformedEnv(env, StepCounter()), swath.InferenceServer(policy)]
    return [*things, things[-1].client(), swath.Evaluator(swath.GymEnv("CartPole-v1"), policy)]


def test_completion_shows_what_is_public() -> None:
    things = in_this_process()
    for thing in things:
        name = {"SerialGymEnv": "SerialEnv", "ThreadClient": "InferenceClient"}.get(kind := type(thing).__name__, kind)
        assert shown(thing) == sorted(PUBLIC[name].split()), name
    things[-1].shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["MultiSyncCollector", "MultiAsyncCollector", "AsyncBatchedCollector"])
def test_completion_shows_what_is_public_of_collectors_elsewhere(name: str) -> None:
    with getattr(swath, name)(["CartPole-v1"], policy_of_cartpole(), frames_per_batch=4) as collector:
        assert shown(collector) == sorted(PUBLIC[name].split())
        for internal in ("wake_worker", "collect_into", "traj_pool", "mail"):
            assert internal not in dir(collector)


def test_what_is_not_shown_is_there() -> None:
    """A name that nothing has any more is taken out of the list."""
    kinds = {kind for thing in in_this_process() for kind in type(thing).__mro__ if "_inner" in vars(kind)}
    source = "\n".join(path.read_text() for path in Path(swath.__file__).parent.rglob("*.py"))
    for name in {name for kind in kinds for name in inner_names(kind)}:
        assert re.search(rf"(def |self\.|^    ){name}\b", source, re.M), name


def test_a_users_own_names_are_shown() -> None:
    class Mine(Collector):
        def paint(self) -> None: ...

    assert "paint" in dir(Mine("CartPole-v1", frames_per_batch=4))


def test_a_profile_without_a_path_says_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with Collector("CartPole-v1", frames_per_batch=4, total_frames=16) as collector:
        collector.enable_profile()
        list(collector)
    (path,) = re.findall(r"the profile is in (\S+);", capfd.readouterr().err)
    assert "traceEvents" in json.loads(Path(path).read_text())
    Path(path).unlink()

"""A directory with modules of a user's, and ways to run the command in it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium
import pytest

from programs import WarmProgram
from swath.cli.main import main

ENVS = '''
import os
import contextlib
import signal
import time

import gymnasium
import numpy as np


class Count(gymnasium.Env):
    """Observes how many steps it took; episodes of 9 steps; may fail, wait, print, tell how far it is, or die."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fail_at=-1, wait_at=-1, tell_at=-1, die_at=-1, pause=0.0, noisy=False, missing=False):
        if missing:
            raise gymnasium.error.DependencyNotInstalled('Box2D is not installed, run `pip install "gymnasium[box2d]"`')
        self.fail_at, self.wait_at, self.tell_at, self.die_at = fail_at, wait_at, tell_at, die_at
        self.pause, self.noisy = pause, noisy
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def _observe(self):
        return np.array([self.steps, self.t], dtype=np.float32)

    def step(self, action):
        if self.steps == self.fail_at:
            raise RuntimeError("lost contact with '/home/someone/robot.sock'")
        if self.steps == self.tell_at:
            with open("told", "w") as pipe:
                pipe.write("!")
        if self.steps == self.wait_at:
            print("waiting", flush=True)
            time.sleep(100)
        if self.steps == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.noisy:
            print("an env that talks")
        if self.pause:
            time.sleep(self.pause)
        self.t += 1
        self.steps += 1
        return self._observe(), 0.5, self.t == 9, False, {}


def register(name, **kwargs):
    gymnasium.register(name, Count, kwargs=kwargs, disable_env_checker=True)


register("Count-v0")
register("Slow-v0", pause=0.001)
register("Noisy-v0", noisy=True)
register("Failing-v0", fail_at=60)
register("FailingAtOnce-v0", fail_at=0)
register("Stuck-v0", wait_at=67)
register("Telling-v0", tell_at=60, pause=0.001)
register("TellingAndStuck-v0", tell_at=67, wait_at=67)
register("Dying-v0", die_at=60)


class OneFails(Count):
    """Of two, the first to be there fails in its step 60, once the other has taken 30; that one goes on slowly."""

    def step(self, action):
        if self.steps == 0:
            with contextlib.suppress(FileExistsError), open("first", "x"):
                self.fail_at = 60
        if self.fail_at < 0 and self.steps == 30:
            open("halfway", "w").close()
        if self.fail_at < 0 and self.steps >= 30:
            time.sleep(0.05)
        while self.steps == self.fail_at and not os.path.exists("halfway"):
            time.sleep(0.001)
        return super().step(action)


gymnasium.register("OneFails-v0", OneFails, disable_env_checker=True)
register("Missing-v0", missing=True)
'''

POLICIES = """
import threading

import numpy
import torch
from tensordict.nn import TensorDictModule


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, observation):
        noise = torch.rand(2) + torch.as_tensor(numpy.random.rand(2))
        return torch.nn.functional.one_hot((self.net(observation) + noise).argmax(-1), 2)


def make_policy(env):
    assert env.full_action_spec["action"].shape[-1] == 2
    return Linear()


def make_unpicklable():
    lock = threading.Lock()

    def policy(observation):
        with lock:
            return torch.nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.int64), 2)

    return policy


def make_nothing():
    pass


def make_with_weights(path, epoch):
    return Linear()


def make_badly():
    raise KeyError("no weights")


def make_wordy():
    def policy(observation):
        action = torch.nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.int64), 2)
        return action, torch.ones(*observation.shape[:-1], 100)

    return TensorDictModule(policy, in_keys=["observation"], out_keys=["action", "features"])


ready = Linear()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory: ``my_envs``, ``my_agent.policies``, and a module whose own import is missing."""
    (tmp_path / "my_envs.py").write_text(ENVS)
    agent = tmp_path / "my_agent"
    agent.mkdir()
    (agent / "__init__.py").write_text("")
    (agent / "policies.py").write_text(POLICIES)
    (agent / "needy.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(gymnasium.registry)
    yield tmp_path
    for env_id in set(gymnasium.registry) - known:
        del gymnasium.registry[env_id]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_envs", "my_agent")]:
        del sys.modules[name]


_COMMAND = "import sys; from swath.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Result:
    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr


@pytest.fixture
def swath_here(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command in this process, where torch is imported already."""

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(arguments)
        said = capfd.readouterr()
        return Result(code, said.out, said.err)

    return run


def start(*arguments: str, module: str = "swath", **options: object) -> subprocess.Popen[str]:
    """The command in a process of its own, that Ctrl-C reaches even if it does not reach us (``nohup``)."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", module, *arguments],
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},  # type: ignore[call-overload]
    )


@pytest.fixture
def warm_swath() -> Iterator[Callable[..., WarmProgram]]:
    """Start the command where torch is imported already; it ends with the test."""
    with contextlib.ExitStack() as started:
        yield lambda *arguments: started.enter_context(WarmProgram(_COMMAND, *arguments))


@pytest.fixture
def swath_process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command in a process of its own, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: object) -> subprocess.Popen[str]:
        started.append(start(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield run
    for process in started:
        with process:  # closes its pipes
            if process.poll() is None:
                process.kill()

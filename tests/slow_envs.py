"""Envs that wait, raise, hang, or die."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counting import CountingEnv
from swath.envs import EnvBase, GymWrapper


class _Sleeping(CountingEnv):
    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


def Sleeping() -> EnvBase:
    return GymWrapper(_Sleeping())


class Switch:
    """A file that tells processes to go on."""

    def __init__(self, path: str) -> None:
        self.path = path

    def is_on(self) -> bool:
        return os.path.exists(self.path)

    def turn_on(self) -> None:
        Path(self.path).touch()


class _Waits(CountingEnv):
    """Waits in its steps, from one on, until a file appears; a step at a time, for ten milliseconds each."""

    def __init__(self, switch: Switch, after: int) -> None:
        super().__init__(10**6)
        self.switch = switch
        self.after = after
        self.taken = 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.taken > self.after and not self.switch.is_on():
            time.sleep(0.01)
        return super().step(action)


def WaitsForFile(switch: Switch, after: int) -> EnvBase:
    return GymWrapper(_Waits(switch, after))


@contextlib.contextmanager
def released() -> Iterator[Switch]:
    with tempfile.TemporaryDirectory() as folder:
        yield Switch(os.path.join(folder, "go"))

"""Envs that wait, raise, hang, or die; and functions that must be importable in another process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from counting import CountingEnv
from swath.envs import EnvBase, GymWrapper
from swath.errors import WorkerRaised
from swath.weight_update import WeightSyncScheme


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


def receive_in_a_process(scheme: WeightSyncScheme, index: int, results: Any) -> None:
    model = nn.Linear(2, 1)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    results.send(model.weight.tolist())
    while scheme.receive(timeout=10) is not None:
        results.send(model.weight.tolist())
        if float(model.weight[0, 0].detach()) == 99:
            break
    scheme.shutdown()


class _Fails(CountingEnv):
    """Does something bad at a step (or in its reset, at step -1)."""

    def __init__(self, at: int, deed: Any) -> None:
        super().__init__(10**6)
        self.at = at
        self.deed = deed
        self.taken = 0

    def reset(self, **kwargs: Any) -> Any:
        if self.at == -1:
            self.deed()
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self.taken == self.at:
            self.deed()
        self.taken += 1
        return super().step(action)


def Fails(at: int, deed: Any) -> EnvBase:
    return GymWrapper(_Fails(at, deed))


class Unpicklable(Exception):
    def __init__(self, number: int, name: str) -> None:
        super().__init__(f"{name} is {number}")
        self.handle = lambda: number


class NeedsTwo(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(f"{name} is {number}")


# -- exceptions that fail themselves -----------------------------------------------------------------------------------


class FailsAsText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


class _NoRepr:
    def __repr__(self) -> str:
        raise ZeroDivisionError("in __repr__")


class FailsAsRepr(KeyError):
    """Whose text is the ``repr`` of what it was given."""

    def __init__(self) -> None:
        super().__init__(_NoRepr())


class FailsToLeave(Exception):
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("in __reduce__")


class FailsToArrive(Exception):
    """Can be unpickled where it was made, and nowhere else."""

    def __init__(self, home: int | None = None) -> None:
        super().__init__("far from home")
        self.home = home or os.getpid()

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        if state is not None and state["home"] != os.getpid():
            raise OSError("in __setstate__")


class BecomesText(Exception):
    def __reduce__(self) -> Any:
        return str, ("no exception any more",)


class TakesNoNotes(Exception):
    def add_note(self, note: str) -> None:
        raise ZeroDivisionError("in add_note")


class HasOddNotes(Exception):
    def __init__(self) -> None:
        super().__init__("notes that are no strings")
        self.__notes__ = [_NoRepr(), lambda: 5]


#: And the type that it has in its owner's process.
ODD_EXCEPTIONS: dict[type[Exception], type[Exception]] = {
    FailsAsText: FailsAsText,
    FailsAsRepr: WorkerRaised,
    FailsToLeave: WorkerRaised,
    FailsToArrive: WorkerRaised,
    BecomesText: WorkerRaised,
    TakesNoNotes: TakesNoNotes,
    HasOddNotes: WorkerRaised,
}

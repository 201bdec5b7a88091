"""What swath raises::

    SwathError
    ├── EnvError (RuntimeError)              the env broke its contract
    │   ├── EnvDataError (ValueError)        … by a key, shape or dtype that differs from its layout
    │   ├── EnvClosed                        … or was used after close()
    │   ├── EnvBusy                          an env of a pool was sent something before the last was received
    │   └── NothingSent                      … or was to be received without anything being sent
    ├── PolicyError (RuntimeError)           the policy broke its contract
    │   ├── PolicyInputError (KeyError)      … it asks for a key that nobody writes
    │   ├── PolicyOutputError (ValueError)   … it returned nothing, or something that does not fit
    │   └── CaptureError                     … what was captured of it is not what calling it gives
    ├── NonFiniteData (FloatingPointError)   check_finite=True met a NaN or an infinity
    ├── CollectorClosed (RuntimeError)       the collector was used after shutdown()
    ├── WorkerError (RuntimeError)           a worker process could not go on
    │   ├── WorkerDied                       … it was killed, or left by itself
    │   ├── WorkerHangs (TimeoutError)       … it did not take a step in time, or did not answer
    │   ├── WorkerRaised                     … it raised an exception that cannot leave its process
    │   └── NodeLost                         a node of a distributed collector is gone, or cannot be reached
    ├── BackgroundFailed (RuntimeError)      a collector that was started has ended with an exception, its cause
    ├── WeightSyncError (RuntimeError)       weights did not reach a worker
    ├── InferenceError (RuntimeError)        an inference server could not answer
    │   ├── ServerClosed                     … it was shut down, or not started
    │   ├── ServerDied                       … its process was killed, or its thread has ended
    │   └── NoFreeSlot                       … it has as many clients as it has slots
    ├── CannotCopy (TypeError)               a copy or a pickle of what owns processes, threads or shared memory
    ├── StateMismatch (ValueError)           load_state_dict was given the state of something else
    ├── OutOfSharedMemory (MemoryError)      no room, or no descriptor, for memory that workers share
    ├── DiskFull (OSError)                   no room on the disk for what is to be written
    ├── UnsupportedPlatform (NotImplementedError)  this system, or processor, lacks what something needs
    └── NoLength (RuntimeError, TypeError)   len() of a collector that cannot know it

An exception that a user's env or policy raises is not wrapped: it keeps its type, and a note
(``exception.__notes__``) says which env, which step and what to do. One from a worker has the traceback there as its
``__cause__``.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Collection, Iterable
from contextlib import suppress

__all__ = [
    "BackgroundFailed",
    "CannotCopy",
    "CaptureError",
    "CollectorClosed",
    "DiskFull",
    "EnvBusy",
    "EnvClosed",
    "EnvDataError",
    "EnvError",
    "InferenceError",
    "NoFreeSlot",
    "NoLength",
    "NodeLost",
    "NonFiniteData",
    "NothingSent",
    "OutOfSharedMemory",
    "PolicyError",
    "PolicyInputError",
    "PolicyOutputError",
    "ServerClosed",
    "ServerDied",
    "StateMismatch",
    "SwathError",
    "UnsupportedPlatform",
    "WeightSyncError",
    "WorkerDied",
    "WorkerError",
    "WorkerHangs",
    "WorkerRaised",
]


class SwathError(Exception):
    """The root of everything that swath raises itself."""


class EnvError(SwathError, RuntimeError):
    """An env broke its contract."""


class EnvDataError(EnvError, ValueError):
    """An env delivered a key, shape or dtype that differs from its layout."""


class EnvClosed(EnvError):
    """An env was used after ``close()``."""


class EnvBusy(EnvError):
    """An env of a pool was sent something before the last was received."""


class NothingSent(EnvError):
    """An env of a pool was to be received without anything being sent."""


class PolicyError(SwathError, RuntimeError):
    """A policy broke its contract."""


class PolicyInputError(PolicyError, KeyError):
    """A policy asks for a key that neither the env nor the policy itself writes."""

    __str__ = Exception.__str__  # KeyError would show the message as a repr


class PolicyOutputError(PolicyError, ValueError):
    """A policy returned nothing, or something that does not fit its layout."""


class CaptureError(PolicyError):
    """What was captured of a policy is not what calling it gives (see docs/policies.md)."""


class NonFiniteData(SwathError, FloatingPointError):
    """``check_finite=True`` met a NaN or an infinity."""


class BackgroundFailed(SwathError, RuntimeError):
    """A collector that was started has ended with an exception: its ``__cause__``."""


class CollectorClosed(SwathError, RuntimeError):
    """A collector was used after ``shutdown()``."""


class WorkerError(SwathError, RuntimeError):
    """A worker process could not go on; ``worker`` is its number."""

    def __init__(self, message: str = "", worker: int = -1) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDied(WorkerError):
    """A worker process was killed, or left by itself."""


class WorkerHangs(WorkerError, TimeoutError):
    """A worker did not take a step, or did not answer, in the time that it was given."""


class WorkerRaised(WorkerError):
    """A worker raised an exception that cannot be pickled, or is no error (``SystemExit``); this has its text."""


class NodeLost(WorkerError):
    """A node of a distributed collector is gone, or was not heard of for too long; ``worker`` is its number, ``host``
    and ``pid`` are where it ran (None before it has said so)."""

    def __init__(self, message: str = "", worker: int = -1, host: str | None = None, pid: int | None = None) -> None:
        super().__init__(message, worker)
        self.host = host
        self.pid = pid


class WeightSyncError(SwathError, RuntimeError):
    """Weights did not reach a worker."""


class InferenceError(SwathError, RuntimeError):
    """An inference server could not answer. (What the policy raises keeps its type.)"""


class ServerClosed(InferenceError):
    """An inference server was asked that was shut down, or not started."""


class ServerDied(InferenceError):
    """An inference server's process was killed, or its thread has ended by itself."""


class NoFreeSlot(InferenceError):
    """An inference server has as many clients as it has slots."""


class CannotCopy(SwathError, TypeError):
    """A copy, or a pickle, of something that owns processes, threads or shared memory; the message says what to do."""


class StateMismatch(SwathError, ValueError):
    """``load_state_dict`` was given the state of something else; nothing was changed."""


class OutOfSharedMemory(SwathError, MemoryError):
    """There is no room, or no descriptor, for memory that workers share."""


class DiskFull(SwathError, OSError):
    """There is no room on the disk; the message says what is needed and what is free. ``errno`` is the system's."""

    def __init__(self, message: str = "", number: int = errno.ENOSPC) -> None:
        super().__init__(message)
        self.errno = number


class UnsupportedPlatform(SwathError, NotImplementedError):
    """This system, or its processor, lacks what something needs; the message says what to use instead."""


class NoLength(SwathError, RuntimeError, TypeError):
    """``len()`` of a collector that cannot know it; a TypeError, so that ``list`` and ``tqdm`` go on without."""


# -- exceptions of others, which may fail themselves -------------------------------------------------------------------


def message_of(error: object) -> str:
    """What an exception says; one whose ``__str__`` fails must not hide what happened."""
    try:
        return str(error)
    except Exception as reason:
        return f"(its text cannot be had: {type(reason).__name__})"


def told(error: BaseException) -> str:
    """
    >>> told(ValueError("the door is stuck"))
    'ValueError: the door is stuck'
    """
    return f"{type(error).__name__}: {message_of(error)}"


def notes_of(error: BaseException) -> list[str]:
    """Those that are notes."""
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, (list, tuple)) else []


def require_one_of(name: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A clause that names the known names most like ``name``, or says otherwise.

    >>> did_you_mean("make_polcy", ["make_policy", "torch"])
    "; did you mean 'make_policy'?"
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def add_note(error: BaseException, note: str) -> None:
    """Also to an exception that lets nothing be set (a frozen dataclass), or has something else for notes."""
    try:
        error.add_note(note)
    except Exception:
        with suppress(Exception):
            BaseException.__setattr__(error, "__notes__", [*notes_of(error), note])

"""Ctrl-C comes where a collector waits, and not in the middle of a message or of its books.

Python raises ``KeyboardInterrupt`` between any two instructions of the main thread. Half of a message to a worker, or a
batch that was taken from one list and is not yet in the next, could not be made good afterwards.
"""

from __future__ import annotations

import functools
import threading

# ``signal`` makes enums of all it returns, which takes 20 times as long.
from _signal import SIGINT, getsignal
from _signal import signal as set_handler
from collections.abc import Callable, Sequence
from multiprocessing import connection
from types import FrameType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

#: What the program does about Ctrl-C, while ``_receive`` is in its place.
_program: Any = None
#: A Ctrl-C that has to wait, or has not got through yet: the frame that it came in.
_pressed: list[FrameType | None] = []
_may_come = False


def _receive(number: int, frame: FrameType | None) -> None:
    if _may_come:
        # What it raises in a finalizer, which may run in the middle of a wait, Python swallows: then it comes later.
        _pressed.append(frame)
        _program(number, frame)
        _pressed.clear()
    elif not _pressed:
        _pressed.append(frame)
    else:  # whoever presses it twice does not want to wait
        set_handler(SIGINT, _program)
        _pressed.clear()
        _program(number, frame)


def ctrl_c_waits(function: Function) -> Function:
    """Within this function Ctrl-C comes in ``interruptible`` calls, or at its end, or when it is pressed twice.

    >>> @ctrl_c_waits
    ... def change_both() -> None:
    ...     signal.raise_signal(signal.SIGINT)
    ...     books.append("changed")
    >>> import signal
    >>> books = []
    >>> try:
    ...     change_both()
    ... except KeyboardInterrupt:
    ...     books
    ['changed']
    """

    @functools.wraps(function)
    def held_off(*args: Any, **kwargs: Any) -> Any:
        global _program
        program = getsignal(SIGINT)
        # Other threads are not interrupted; whoever ignores Ctrl-C goes on to; and it may be held off already.
        if not callable(program) or program is _receive or not _is_main_thread():
            return function(*args, **kwargs)
        _program = program
        _pressed.clear()
        set_handler(SIGINT, _receive)
        try:
            return function(*args, **kwargs)
        finally:
            if getsignal(SIGINT) is _receive:
                set_handler(SIGINT, program)
            _let_through()

    return cast(Function, held_off)


def interruptible(wait: Callable[..., Result], *args: Any) -> Result:
    """In this call Ctrl-C may come, and what it returns may be lost: it must wait only, and take nothing."""
    global _may_come
    if not _is_main_thread():
        return wait(*args)
    try:
        _may_come = True
        _let_through()
        return wait(*args)
    except BaseException:
        _pressed.clear()
        raise
    finally:
        _may_come = False


def wait(objects: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """``multiprocessing.connection.wait``; Ctrl-C may come."""
    return interruptible(connection.wait, objects, timeout)


def _let_through() -> None:
    if _pressed:
        frame = _pressed.pop()
        _pressed.clear()
        _program(SIGINT, frame)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident

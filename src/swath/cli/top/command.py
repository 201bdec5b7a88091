"""``swath top``: prints or shows programs that collect; the exit code."""

from __future__ import annotations

import getpass
import json
import os
import sys
import textwrap
import time
from collections.abc import Sequence

from swath import platforms
from swath.cli.errors import FAILED, USAGE
from swath.cli.streams import reader_may_leave
from swath.cli.top.as_json import as_json
from swath.cli.top.drawing import views
from swath.cli.top.watched import Everyone, Watched, farewell
from swath.errors import UnsupportedPlatform
from swath.insight.board import NEEDS
from swath.insight.programs import ask_all, is_anothers, is_there
from swath.insight.terminal import can_redraw

#: A program that runs answers within milliseconds; one that is busy in C, or stopped, does not.
_SECONDS_FOR_AN_ANSWER = 1.0
_SECONDS_BETWEEN_LOOKS = 0.5
#: How fast a program is just now takes two looks.
_SECONDS_TO_MEASURE = 1.0


def top(pid: int | None, *, json_wanted: bool, once: bool) -> int:
    """The command; its exit code."""
    try:
        platforms.require("swath top", NEEDS, "use swath.watch(collector) in the program itself")
    except UnsupportedPlatform as error:
        print(f"swath: {error}", file=sys.stderr)
        return USAGE
    try:
        with Everyone(pid) as everyone, reader_may_leave(sys.stdout):
            if json_wanted:
                return _print_json(pid, everyone)
            if once or not can_redraw(sys.stdout):
                return _print_once(pid, everyone)
            return _show(pid, everyone)
    except KeyboardInterrupt:
        return 0  # the usual way to leave
    except OSError as error:
        print(f"swath: what was found cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return FAILED
    return 0  # whoever read the first lines knows enough


def _print_json(pid: int | None, everyone: Everyone) -> int:
    watched = _asked(everyone)
    print(json.dumps(as_json(everyone, watched), allow_nan=False))
    if pid is not None and not watched:
        print(f"swath: {_why_not(pid)}", file=sys.stderr)
        return FAILED
    return 0


def _print_once(pid: int | None, everyone: Everyone) -> int:
    from rich.console import Console

    watched = _asked(everyone)
    if any(each.program.silent_s == 0.0 for each in watched):
        time.sleep(_SECONDS_TO_MEASURE)
        watched = _asked(everyone)
    if not watched:
        return _nothing(pid, everyone)
    console = Console(highlight=False, markup=False, soft_wrap=False)
    console.print(views(watched, everyone.notes, console.width))
    return 0


def _asked(everyone: Everyone) -> Sequence[Watched]:
    watched = everyone.find()
    ask_all([each.program for each in watched], _SECONDS_FOR_AN_ANSWER)
    for each in watched:
        each.take()
    return watched


def _show(pid: int | None, everyone: Everyone) -> int:
    watched = _asked(everyone)
    if not watched:
        return _nothing(pid, everyone)
    from rich.console import Console
    from rich.live import Live

    from swath.cli.top.keys import Keys, ended_in_order, stopped_in_order

    console = Console(highlight=False, markup=False)
    live = Live(console=console, screen=True, auto_refresh=False)
    last = watched
    with ended_in_order(), Keys() as keys, live, stopped_in_order(keys, live):
        while watched or pid is None:
            shown = views(watched, everyone.notes, console.width, console.height) if watched else _nobody(everyone)
            live.update(shown, refresh=True)
            for each in watched:
                each.program.ask()
            if set(keys.wait(_SECONDS_BETWEEN_LOOKS)) & set("qQ\x03"):
                break
            for each in watched:
                if each.program.has_answered():
                    each.take()
            last, watched = watched or last, everyone.find()
    if pid is not None and not watched:
        console.print(views(last, [farewell(last[0])], console.width))
    return 0


def _nobody(everyone: Everyone) -> str:
    return "\n".join([*everyone.notes, "No program collects now; this waits for one (q leaves)."])


def _nothing(pid: int | None, everyone: Everyone) -> int:
    """There is nothing to show; the exit code."""
    for note in everyone.notes:
        print(note)
    if pid is not None:
        print(f"swath: {_why_not(pid)}", file=sys.stderr)
        return FAILED
    if not everyone.notes:
        said = (
            f"No program of {_user()} collects on this machine. (swath top looks for processes with an open collector "
            "of swath, also in notebooks; in a container it sees those in there. Programs of other users are not seen.)"
        )
        print(textwrap.fill(said, 80))
    return 0


def _why_not(pid: int) -> str:
    if not is_there(pid):
        return f"there is no process {pid}; swath top shows all programs that collect"
    if is_anothers(pid):
        return f"process {pid} is another user's, whose programs are not seen; you are {_user()}"
    return (
        f"process {pid} has no open collector of swath (workers and nodes are shown with the program that they belong "
        "to); swath top shows all programs that collect"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # one without a name
        return f"user {os.geteuid()}"

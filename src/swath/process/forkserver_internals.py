"""What swath uses of ``multiprocessing.forkserver`` that Python does not document: known of Python 3.11.

Where it is not there any more, a process that was forked from a server starts another one, which imports everything
again: slower by seconds, and right.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
from typing import Any


def _above() -> Any:
    """What ``multiprocessing`` left in this process of the server that it was forked from."""
    return getattr(multiprocessing.forkserver, "_forkserver", None)


def was_forked_from_server() -> bool:
    """Whether this process was forked from a server, which can be asked for more processes."""
    above = vars(_above()) if _above() is not None else {}
    return above.get("_forkserver_alive_fd") is not None and above.get("_forkserver_pid", 0) is None


class ServerAbove(multiprocessing.forkserver.ForkServer):
    """The server that this process was forked from, as ``multiprocessing`` left it in its children.

    (Which would start another one all the same, since it looks for the server's number, and only its owner has that.)
    """

    def __init__(self) -> None:
        super().__init__()
        above = _above()
        self._forkserver_address = above._forkserver_address
        self._forkserver_alive_fd = above._forkserver_alive_fd
        self._forkserver_pid = None

    def ensure_running(self) -> None:
        multiprocessing.resource_tracker.ensure_running()

"""Imported by the server that worker processes are forked from, and nowhere else: what every worker needs.

Many workers on few cores: each computes with one thread (``num_sub_threads`` says otherwise for torch). Libraries read
these variables when they are loaded.
"""

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait


@contextlib.contextmanager
def _leaving_with_owner() -> Iterator[None]:
    """The server looks whether its owner is there when its imports are done, which takes seconds; this looks meanwhile.

    No thread is left afterwards: processes will be forked from this one.
    """
    started = re.search(r"\bmain\(\d+, (\d+),", sys.orig_argv[-1])  # ``main(listener_fd, alive_r, …)``
    if started is None:
        yield
        return
    alive, (done, tell) = int(started[1]), os.pipe()

    def watch() -> None:
        if alive in wait([alive, done]):
            os._exit(1)

    watching = threading.Thread(target=watch, name="swath-watch-owner", daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(tell)
        watching.join()
        os.close(done)


_is_server = any("multiprocessing.forkserver" in argument for argument in sys.orig_argv)
# Whoever imports this elsewhere (a tool that looks at every module) must not have its process changed.
if _is_server:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, also while this is imported
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

with _leaving_with_owner() if _is_server else contextlib.nullcontext():
    import gymnasium  # noqa: F401
    import tensordict  # noqa: F401
    import torch  # noqa: F401

    import swath.collectors
    import swath.envs
    import swath.remote.worker
    import swath.stepping.env_worker  # noqa: F401


if _is_server:
    # The end of an interpreter with torch in it takes a second, and far more on a busy machine; nothing is left to do.
    _server = os.getpid()
    atexit.register(lambda: os._exit(0) if os.getpid() == _server else None)

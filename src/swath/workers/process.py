"""The process of a worker: it begins here, and it ends here, at the latest when its owner does."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from swath.process.channel import Channel, pack
from swath.process.memory import map_and_close
from swath.process.owner import leave_with_owner
from swath.process.seeding import seed_process
from swath.workers.spec import Incarnation
from swath.workers.status_page import StatusPage

#: A worker whose owner is gone has so long to close its envs.
_SECONDS_TO_LEAVE = 3.0
#: And after that, for threads of envs to end.
_SECONDS_FOR_THREADS = 0.5


def _leave_anyway() -> None:
    time.sleep(_SECONDS_FOR_THREADS)
    os._exit(0)


def main(
    connection: Connection, receivers: Mapping[str, Any], worker: int, incarnation: Incarnation, num_bytes: int
) -> None:
    """The process."""
    built: list[Any] = []
    leave_with_owner(lambda: [each.leave() for each in built], _SECONDS_TO_LEAVE)
    channel = Channel(connection)
    try:
        page = StatusPage(map_and_close(channel.receive_descriptor(), num_bytes), worker)
        try:
            spec = cloudpickle.loads(connection.recv_bytes())
            torch.set_num_threads(spec.num_threads)
            seed_process(spec.base_seed, worker, incarnation.number)
            me = spec.make_worker(channel, page, incarnation)
            built.append(me)
            description = me.build()
            page.write(started_at=time.monotonic())
            channel.send("hello", description)
            me.connect(receivers)
        except (EOFError, BrokenPipeError):
            raise
        except BaseException as error:
            channel.send("failed", -1, pack(error), [])
            return
        gc.freeze()
        me.serve()
    except (EOFError, ConnectionError):  # the owner is gone
        pass
    finally:
        for each in built:
            each.close()
        with suppress(OSError):
            channel.close()
        # A thread that an env left behind must not keep the process.
        threading.Thread(target=_leave_anyway, name="swath-leave", daemon=True).start()

"""What runs in processes that are started by themselves. (Found there by its name, which a test's module is not.)"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from swath.process.owner import leave_with_owner


def follow(connection: Connection, obeys: bool) -> None:
    """Leaves with the number that it is sent."""
    leave_with_owner()
    if not obeys:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("ready")
    sys.exit(connection.recv())

"""``swath node``: become a node of somebody's DistributedCollector."""

from __future__ import annotations

import sys

from swath.collectors.distributed.launchers import serve_from_folder
from swath.errors import NodeLost, UnsupportedPlatform


def serve(folder: str, number: int, wait_s: float | None) -> int:
    """Its exit code: 0 when the collector was done with it."""
    try:
        serve_from_folder(folder, number, wait_s)
    except (NodeLost, UnsupportedPlatform, OSError) as error:
        print(f"swath node: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

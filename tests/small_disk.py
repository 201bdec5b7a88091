"""A real filesystem that is full after a few kilobytes, for a program that writes until there is no room.

It is mounted in a namespace of the program's own: nobody else sees it, and it goes with the program. Root may do so,
and where the system lets them, other users too. Where nobody may, tests that need it fail and say so.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_RECURSIVE, _PRIVATE = 0x4000, 1 << 18

#: Put before the text of a program whose first two arguments are a folder and its size in bytes; they are taken off.
ON_A_SMALL_DISK = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import small_disk
small_disk.mount(sys.argv.pop(1), int(sys.argv.pop(1)))
"""


def mount(folder: str, num_bytes: int) -> None:
    """From here on ``folder`` is an empty filesystem with room for ``num_bytes``, for this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    _require(libc.unshare(_NEW_MOUNTS | (_NEW_USER if user else 0)), "a namespace")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _require(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "mounts of its own")
    _require(libc.mount(b"none", folder.encode(), b"tmpfs", 0, f"size={num_bytes}".encode()), "a small filesystem")


def _require(returned: int, what: str) -> None:
    if returned:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}; this test needs to mount: run it as root")

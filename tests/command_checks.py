"""What a command leaves behind and says: files, Python lines, a screen."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict


def frame_files(folder: str) -> dict[str, bytes]:
    root = Path(folder) / "frames"
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def entries() -> set[str]:
    """What is in the current directory besides the user's modules."""
    return {path.name for path in Path().iterdir()} - {"my_envs.py", "my_agent", "__pycache__"}


def code_in(summary: str) -> str:
    """The Python lines of a summary, collecting into ``batches``."""
    lines = [line[4:] for line in summary.splitlines() if line.startswith("    ") or not line]
    return "\n".join(lines).replace("    ...", "    batches.append(batch)")


def batches_as_frames(batches: list[TensorDict]) -> TensorDict:
    """What a dataset of these batches holds: each env's frames in a piece."""
    rows = [batch.reshape(-1, batch.shape[-1]) for batch in batches]
    envs = [torch.cat([row[env] for row in rows if env < len(row)]) for env in range(len(rows[0]))]
    frames: Any = torch.cat(envs)
    return frames


def wait_for(stream: Any, text: str) -> None:
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


def screen_of(swath_process: Any, *arguments: str) -> tuple[Any, str]:
    """Run a command whose stderr is a terminal; the process, and all that was shown."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = swath_process(*arguments, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux says so when the other side is closed
        pass
    os.close(ours)
    return process, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())

"""Record terminals for docs/recordings.md: type commands into a real one, in an empty folder, and keep what it shows.

    make recordings
    python tools/record.py dataset    # only this one

Needs tmux. Each recording begins with a new home that holds nothing but a copy of this repository, `~/swath`. A
command that fails ends it, and the page stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recordings.md"
COLUMNS, LINES = 110, 50
LONGEST = 1200  # seconds that a command may take; a first `pip install` downloads torch

_INSTALL = (
    "ls -A",
    "python3 -m venv .venv && . .venv/bin/activate",
    "pip install -qq -c ~/swath/constraints.txt torch",
    'pip install -qq -c ~/swath/constraints.txt "$HOME/swath[examples]"',
)
RECORDINGS: dict[str, tuple[str, ...]] = {
    "cleanrl": (
        *_INSTALL,
        "cp ~/swath/examples/from_cleanrl.py .",
        "python from_cleanrl.py --workers 4 --total-timesteps 40000",
        "python from_cleanrl.py --workers 4 --total-timesteps 50000 --resume runs/from_cleanrl/checkpoint.pt",
        "tensorboard --inspect --logdir runs --tag charts/episodic_return 2>&1 | tail -n 12",
    ),
    "sac": (
        *_INSTALL,
        "cp ~/swath/examples/sac_pendulum.py ~/swath/examples/common.py .",
        "grep -A 7 'collector = ' sac_pendulum.py",
        "python sac_pendulum.py --frames 6000",
        "ls runs",
    ),
    "dataset": (
        *_INSTALL,
        "swath collect CartPole-v1 --frames 100k --envs 8 --seed 0 --out cartpole",
        "ls cartpole",
        "python -c 'import swath; data = swath.load(\"cartpole\"); print(data.episodes[0])'",
        'python -c \'import swath; data = swath.load("cartpole"); print(data.frames["observation"][:3])\'',
    ),
}


def block_of(name: str) -> re.Pattern[str]:
    """Where a recording is in the page: the block behind its name."""
    return re.compile(rf"(<!-- recording: {name} -->\n```console\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


class Terminal:
    """A shell in a tmux of its own, which tells when it has a prompt, and how the last command ended."""

    def __init__(self, home: Path) -> None:
        self._name, self._status = f"swath-record-{os.getpid()}", home / ".status"
        self._prompts = 0
        folder = home / "new"
        folder.mkdir()
        told = f"echo $? >> {self._status}"
        env = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PROMPT_COMMAND": told}
        env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        env |= {"VIRTUAL_ENV_DISABLE_PROMPT": "1", "HISTFILE": "", "TMUX_TMPDIR": str(home)}
        self._env = {**env, "TERM": "xterm-256color"}
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-c",
            str(folder),
            *size,
            "env",
            "PS1=$ ",
            "bash",
            "--norc",
            "--noprofile",
        )
        self._wait()

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._name, *arguments]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def _wait(self) -> None:
        """For the next prompt."""
        self._prompts += 1
        until = time.monotonic() + LONGEST
        while len(self._statuses()) < self._prompts:
            if time.monotonic() > until:
                raise SystemExit(f"{self.shown()}\nno prompt in {LONGEST} seconds")
            time.sleep(0.1)

    def _statuses(self) -> list[str]:
        return self._status.read_text().split() if self._status.exists() else []

    def type(self, command: str) -> None:
        self._tmux("send-keys", "-l", command)
        self._tmux("send-keys", "Enter")
        self._wait()
        if (status := self._statuses()[-1]) != "0":
            raise SystemExit(f"{self.shown()}\n{command!r} ended with {status}")

    def shown(self) -> str:
        """All that was on the screen, long lines in one piece."""
        lines = [line.rstrip() for line in self._tmux("capture-pane", "-p", "-J", "-S", "-").splitlines()]
        while lines and lines[-1] in ("", "$"):
            lines.pop()
        return "\n".join(lines)

    def close(self) -> None:
        self._tmux("kill-server")


def copy_repository(to: Path) -> None:
    """The files as they are now, those that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def record(name: str) -> str:
    with tempfile.TemporaryDirectory(prefix="demo-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        copy_repository(home / "swath")
        terminal = Terminal(home)
        try:
            for command in RECORDINGS[name]:
                print(f"{name}: {command}", flush=True)
                terminal.type(command)
            shown = terminal.shown()
        finally:
            terminal.close()
    if folder in shown:
        raise SystemExit(f"{shown}\nit shows where it was recorded")
    return shown


def main() -> None:
    for name in sys.argv[1:] or RECORDINGS:
        shown = record(name)
        text, count = block_of(name).subn(lambda block: block[1] + shown + "\n" + block[3], PAGE.read_text())  # noqa: B023
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for {name}")
        PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""What chaos is played with: envs that sign their frames, a policy that signs its actions, and a board to kill by."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from swath.envs import GymWrapper

#: Of an observation; everything from CHECK on is the same sum over what is before it.
ENV, LIFE, EPISODE, STEP, TICK, END, RECEIVED, CHECK = range(8)
SIZE = 12
GOES_ON, TERMINATED, TRUNCATED = range(3)
#: An action: the frame that it was chosen for, then the first and the last entry of each of the policy's weights.
NUM_WEIGHTS = 6
ACTION_SIZE = 1 + 2 * NUM_WEIGHTS
_PRIMES = np.array([1_000_003, 7919, 104_729, 15_485_863, 32_452_843, 49_979_687, 86_028_121], dtype=np.int64)
_SALT = 271_828_183  # so that zeros are not signed


def check_of(observations: np.ndarray) -> np.ndarray:
    return (observations[..., :CHECK] * _PRIMES).sum(-1) + _SALT


def digest_of(actions: np.ndarray) -> np.ndarray:
    """Of every bit of an action, in order."""
    bits = np.ascontiguousarray(actions, dtype=np.float32).view(np.int32).astype(np.int64)
    return (bits * (2 * np.arange(ACTION_SIZE) + 3) ** 5).sum(-1)


def seen_in(observations: Any) -> Any:
    """What an action says of the observation that it was chosen on; fits into a float."""
    return observations[..., ENV] * 2**17 + observations[..., TICK] % 2**17


class Board:
    """A file that envs and the test share: where each env lives, and after how many steps it kills its process."""

    def __init__(self, path: str, num_envs: int = 0) -> None:
        if num_envs:
            Path(path).write_bytes(bytes(4 * 8 * num_envs))
        self.path = path
        self.fuses, self.burnt, self.pids, self.born = np.memmap(path, np.int64, "r+").reshape(4, -1)

    def move_in(self, env: int) -> None:
        self.pids[env], self.born[env] = 0, _born(os.getpid())
        self.pids[env] = os.getpid()

    def burn(self, env: int) -> None:
        if self.fuses[env]:
            self.fuses[env] -= 1
            if not self.fuses[env]:
                self.burnt[env] += 1
                os.kill(os.getpid(), signal.SIGKILL)

    def kill(self, env: int) -> bool:
        """Kill the process that an env lives in; False where there is none now."""
        pid, born = int(self.pids[env]), int(self.born[env])
        try:
            handle = os.pidfd_open(pid)
        except (OSError, ValueError):
            return False
        try:
            if _born(pid) != born:  # somebody else has the number by now
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


def _born(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class SignedEnv(gymnasium.Env):
    """Every observation says which env made it, in which life, episode and step, after which action; and is signed.

    Args:
        pause_s: how long a step takes.
        board: the path of one; None for an env in the test's own process, which is not to be killed.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, number: int, longest: int, pause_s: float, board: str | None) -> None:
        self.observation_space = spaces.Box(-(2**62), 2**62, (SIZE,), np.int64)
        self.action_space = spaces.Box(-2.0, -1.0, (ACTION_SIZE,), np.float32)  # no policy's action is in it
        self.number, self.longest, self.pause_s = number, longest, pause_s
        self.incarnation = time.monotonic_ns()
        self.tick = self.episode = 0
        self.lengths = np.random.default_rng(self.incarnation)
        self.board = None if board is None else Board(board)
        if self.board is not None:
            self.board.move_in(number)

    def _observe(self, end: int, received: int) -> np.ndarray:
        self.tick += 1
        observation = np.empty(SIZE, dtype=np.int64)
        observation[:CHECK] = self.number, self.incarnation, self.episode, self.taken, self.tick, end, received
        observation[CHECK:] = check_of(observation)
        return observation

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode += 1
        self.taken = 0
        self.length = int(self.lengths.integers(1, self.longest + 1))
        return self._observe(GOES_ON, 0), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.pause_s:
            time.sleep(self.pause_s)
        if self.board is not None:
            self.board.burn(self.number)
        self.taken += 1
        end = GOES_ON if self.taken < self.length else TERMINATED + self.length % 2
        observation = self._observe(end, int(digest_of(np.asarray(action))))
        return observation, float(self.tick), end == TERMINATED, end == TRUNCATED, {}


def signed_envs(pauses_s: list[float], longest: int, board: str | None) -> list[Any]:
    return [partial(_make, number, longest, pause_s, board) for number, pause_s in enumerate(pauses_s)]


def _make(number: int, longest: int, pause_s: float, board: str | None) -> GymWrapper:
    return GymWrapper(SignedEnv(number, longest, pause_s, board))


class Signature(nn.Module):
    """Weights that are all the number of their version, so that an action tells of which versions it was made."""

    def __init__(self, version: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(size)) for _ in range(NUM_WEIGHTS)])
        self.become(version)

    def become(self, version: int) -> Signature:
        for weight in self.weights:
            weight.data.fill_(version)
        return self

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        ends = torch.cat([weight[:: len(weight) - 1] for weight in self.weights])
        seen = seen_in(observation).unsqueeze(-1).float()
        return torch.cat([seen, ends.expand(*observation.shape[:-1], -1)], -1)


def signing_policy(version: int, size: int) -> TensorDictModule:
    return TensorDictModule(Signature(version, size), in_keys=["observation"], out_keys=["action"])

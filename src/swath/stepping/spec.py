"""What a worker that steps envs for its owner is made from, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from swath.rollout.layout import Layout
from swath.workers.spec import EnvsOfWorker, Incarnation

if TYPE_CHECKING:
    from swath.envs.base import EnvBase


@dataclass(frozen=True)
class EnvWorkerSpec(EnvsOfWorker):
    """What a worker is made from that only steps envs, for an owner who has the policy."""

    #: Several envs as one, stepped together.
    join: Callable[[Sequence[EnvBase]], EnvBase]
    #: Truncate an episode after so many steps.
    max_steps: int | None

    def make_worker(self, channel: Any, page: Any, incarnation: Incarnation) -> Any:
        from swath.stepping.env_worker import EnvWorker

        return EnvWorker(channel, page, self)

    def make_host(self) -> Any:
        from swath.stepping.env_worker import EnvHost

        return EnvHost(self)


@dataclass(frozen=True)
class EnvDescription:
    """What a worker says of its envs, which are alike."""

    #: The batch size of each env.
    env_size: torch.Size
    device: torch.device | None
    #: The env's specs by kind: "observation", "action" and so on.
    specs: Mapping[str, Any]
    #: Of one env.
    layout: Layout
    env: str
    resets_single_envs: bool
    steps_stay_in_episodes: bool = True
    merged: bool = True

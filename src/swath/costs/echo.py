"""EchoEnv: as many envs as one likes that cost nothing, for finding out what a policy costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from swath.envs.base import EnvBase
from swath.envs.rows import RowEnv, specs_of_all
from swath.keys import Key
from swath.rollout.layout import Layout
from swath.rollout.strip import Strip


class EchoEnv(RowEnv):
    """Shows what another env has shown, in each of its rows and at every step.

    Args:
        env: whose keys it has.
        row: what that one has observed, ``[*env.batch_size, *shape]`` a key.
        num_envs: so many of it side by side; None for one as it is.
    """

    def __init__(self, env: EnvBase, row: Mapping[Key, torch.Tensor], num_envs: int | None) -> None:
        lead = () if num_envs is None else (num_envs,)
        super().__init__(batch_size=(*lead, *env.batch_size), device=env.device)
        self._env = env
        self._row_shown = row
        self.full_specs = env.full_specs if num_envs is None else specs_of_all(env.full_specs, num_envs)

    def row_layout(self) -> Layout:
        return self.layout_around(self._env.row_layout())

    def complete_policy(self, policy: Any) -> None:
        self._env.complete_policy(policy)

    def bind_rows(self, strip: Strip) -> EchoStepper:
        return EchoStepper(strip, self._row_shown)


class EchoStepper:
    """All rows are written before the first step, and no more."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, strip: Strip, row: Mapping[Key, torch.Tensor]) -> None:
        for key, value in row.items():
            for shown in strip.carried[key].rows:
                shown.copy_(value.expand_as(shown))

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None: ...

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        return None

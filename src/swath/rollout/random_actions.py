"""Random actions, drawn for many steps at once."""

from __future__ import annotations

from typing import Any

from swath.rollout.layout import as_key
from swath.rollout.strip import Column, Strip


class RandomActions:
    """Writes random actions into a strip; whatever else a policy would write is zero."""

    def __init__(self, action_specs: dict[Any, Any], strip: Strip) -> None:
        self._actions: list[tuple[Any, Column]] = [
            (spec, strip.outputs[as_key(key)]) for key, spec in action_specs.items()
        ]
        drawn = [column for _, column in self._actions]
        self._others = [column for column in strip.outputs.values() if column not in drawn]
        self._state = [strip.carried[key] for key in strip.layout.policy_state]

    def fill(self, num_steps: int) -> None:
        """Rows 0 to ``num_steps`` of all envs."""
        for spec, column in self._actions:
            rows = column.tensor[:num_steps]
            rows.copy_(spec.rand((num_steps,)).reshape(rows.shape))
        for column in self._others:
            column.tensor[:num_steps] = 0
        for column in self._state:
            column.tensor[1 : num_steps + 1] = 0

    def replace(self, t: int, env_ids: list[int]) -> None:
        """Row ``t`` of these envs, over what the policy wrote."""
        for spec, column in self._actions:
            row = column.tensor[t]
            row[env_ids] = spec.rand().reshape(row.shape)[env_ids].to(row)
        for column in self._others:
            column.tensor[t, env_ids] = 0
        for column in self._state:
            column.tensor[t + 1, env_ids] = 0

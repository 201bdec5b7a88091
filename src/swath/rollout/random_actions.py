"""Random actions, drawn for many steps at once."""

from __future__ import annotations

from typing import Any

from swath.errors import PolicyError
from swath.keys import as_key, show
from swath.rollout.layout import Field
from swath.rollout.strip import Column, Strip
from swath.specs import Categorical, OneHot, masked_rand


class RandomActions:
    """Writes random actions into a strip; whatever else a policy would write is zero."""

    def __init__(self, action_specs: dict[Any, Any], strip: Strip) -> None:
        columns = {key: strip.outputs[as_key(key)] for key in action_specs}
        self._actions: list[tuple[Any, Column]] = [
            (for_all_envs(spec, strip.num_envs, columns[key].field), columns[key]) for key, spec in action_specs.items()
        ]
        drawn = [column for _, column in self._actions]
        self._others = [column for column in strip.outputs.values() if column not in drawn]
        self._state = [strip.carried[key] for key in strip.layout.policy_state]
        #: What the policy would have written for the env, which then stays as it is.
        self._primed = [strip.carried[key] for key in strip.layout.primed]
        #: Where the env says which actions are allowed: that changes with every step.
        self._mask = _mask_for(self._actions, strip)

    @property
    def follows_steps(self) -> bool:
        """Whether something depends on the row, and cannot be filled in ahead."""
        return self._mask is not None or bool(self._primed)

    def act(self, t: int) -> None:
        """Row ``t`` of all envs, among the actions that are allowed in it."""
        for column in self._primed:
            column.tensor[t + 1].copy_(column.tensor[t])
        if self._mask is not None:
            ((spec, column),) = self._actions
            column.tensor[t] = masked_rand(spec, self._mask.tensor[t]).to(column.tensor)

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
            drawn = spec.rand().reshape(row.shape) if self._mask is None else masked_rand(spec, self._mask.tensor[t])
            row[env_ids] = drawn[env_ids].to(row)
        for column in self._others:
            column.tensor[t, env_ids] = 0
        for column in self._state:
            column.tensor[t + 1, env_ids] = 0
        for column in self._primed:
            column.tensor[t + 1, env_ids] = column.tensor[t, env_ids]


def for_all_envs(spec: Any, num_envs: int, field: Field) -> Any:
    """A spec of as many actions as there are envs, also if it is that of one of them."""
    wanted = num_envs * field.shape.numel()
    if spec.shape.numel() == wanted:
        return spec
    if spec.shape.numel() * num_envs == wanted:
        return spec.expand((num_envs, *spec.shape))
    raise PolicyError(
        f"a random policy's spec for {show(field.key)} has shape {tuple(spec.shape)}; the envs take "
        f"{(num_envs, *field.shape)}"
    )


def _mask_for(actions: list[tuple[Any, Column]], strip: Strip) -> Column | None:
    """The env's ``action_mask``, if it has one that fits its only action."""
    mask = strip.carried.get(("action_mask",))
    if mask is None or len(actions) != 1:
        return None
    spec, _ = actions[0]
    fits = isinstance(spec, (OneHot, Categorical)) and mask.field.shape == (spec.n,)
    return mask if fits else None

"""RandomPolicy: actions drawn from the action spec."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from swath.specs import Composite, NestedKey


class RandomPolicy:
    """Draws actions from a spec; without one, a collector takes its env's.

    >>> from swath.envs import GymEnv
    >>> env = GymEnv("CartPole-v1")
    >>> env.rollout(2, RandomPolicy(env.action_spec))["action"].shape
    torch.Size([2, 2])
    """

    def __init__(self, action_spec: Any = None, action_key: NestedKey = "action") -> None:
        self.action_spec = action_spec
        self.action_key = action_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.action_spec is None:
            raise RuntimeError("RandomPolicy was made without an action spec: RandomPolicy(env.action_spec)")
        drawn = self.action_spec.rand()
        if isinstance(self.action_spec, Composite):
            return tensordict.update(drawn)
        return tensordict.set(self.action_key, drawn)

    def __repr__(self) -> str:
        return f"RandomPolicy({self.action_spec})"

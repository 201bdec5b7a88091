"""Team: an env with the methods of TorchRL's, and without TorchRL."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from swath.envs import Unbounded

#: Of an episode.
LENGTH = 5


class ActionSpec(dict):
    """One leaf, as ``Composite`` would be asked for it."""

    def rand(self, shape: Any = ()) -> TensorDict:
        return TensorDict({key: leaf.rand(shape) for key, leaf in self.items()}, batch_size=shape)


class Team:
    """Two agents that see vectors of 2 and 3 numbers, which count; a word; and a list of numbers that grows.

    Only the methods that a guest needs.
    """

    batch_size = torch.Size([])
    device = None
    _has_dynamic_specs = True
    action_keys = ("action",)
    done_keys = (("agents", "done"), ("agents", "terminated"))
    done_keys_groups = (done_keys,)
    reset_keys = (("agents", "_reset"),)
    full_action_spec = ActionSpec(action=Unbounded((1,)))

    def __init__(self, with_objects: bool = True) -> None:
        self.with_objects = with_objects
        self.count = 0
        self.is_closed = False

    @property
    def full_state_spec(self) -> Any:
        return _Items({})

    @property
    def full_observation_spec(self) -> Any:
        return _Items({"growing": Unbounded((1,))}, open_keys=("growing",)) if self.with_objects else _Items({})

    def _data(self, *, is_step: bool) -> TensorDict:
        done = torch.tensor([self.count >= LENGTH])
        agents = []
        for size in (2, 3):
            agent = TensorDict(observation=torch.full((size,), float(self.count)), done=done, terminated=done.clone())
            if is_step:
                agent["reward"] = torch.tensor([1.0])
            agents.append(agent)
        data = TensorDict(agents=LazyStackedTensorDict(*agents, stack_dim=0))
        if self.with_objects:
            data["word"] = NonTensorData(f"count {self.count}")
            data["growing"] = torch.arange(float(self.count + 1))
        return data

    def fake_tensordict(self) -> TensorDict:
        fake = self._data(is_step=False).set("action", torch.zeros(1))
        return fake.set("next", self._data(is_step=True))

    def reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        self.count = 0
        return self._data(is_step=False)

    def step_and_maybe_reset(self, tensordict: TensorDict) -> tuple[TensorDict, TensorDict]:
        assert tensordict["action"].shape == (1,)
        self.count += 1
        stepped = tensordict.set("next", self._data(is_step=True))
        return stepped, self.reset() if self.count >= LENGTH else self._data(is_step=False)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        return seed + 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.is_closed = True


class _Items(dict):
    def __init__(self, leaves: dict[str, Any], open_keys: tuple[str, ...] = ()) -> None:
        super().__init__(leaves)
        for key in open_keys:
            self[key].shape = torch.Size([-1])

    def items(self, *_: Any) -> Any:
        return super().items()

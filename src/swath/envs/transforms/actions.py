"""What becomes of actions on their way to the env."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from swath.envs.transforms.base import Keys, Transform, key_list
from swath.envs.transforms.own_tensors import Tensors, TensorTransform
from swath.envs.transforms.rows import NOTHING, Rows, Stage
from swath.envs.transforms.specs import Specs, bounds_of, bounds_through
from swath.keys import as_key, show
from swath.specs import Bounded, Categorical, NestedKey, OneHot, Spec, Unbounded


class ActionScaling(TensorTransform):
    """Actions in [-1, 1] (without ``standard_normal``: in [0, 1]), which the env gets in the bounds of its spec.

    With ``loc`` and ``scale``, the env gets ``action * scale + loc``, whatever its bounds.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("Pendulum-v1"), ActionScaling())
    >>> env.base_env.action_spec.high.item(), env.action_spec.high.item()
    (2.0, 1.0)
    """

    _shown = ("standard_normal",)
    loc = property(lambda self: self.tensors[0]["loc"])
    scale = property(lambda self: self.tensors[0]["scale"])

    def __init__(
        self,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        *,
        loc: torch.Tensor | float | None = None,
        scale: torch.Tensor | float | None = None,
        standard_normal: bool = True,
    ) -> None:
        if key_list(in_keys) or key_list(out_keys):
            raise ValueError("ActionScaling: in_keys and out_keys are for data that was stored; leave them out")
        super().__init__(in_keys_inv="action" if in_keys_inv is None else in_keys_inv, out_keys_inv=out_keys_inv)
        if len(self.in_keys_inv) != 1:
            raise ValueError(f"ActionScaling: one action each, got in_keys_inv={key_list(in_keys_inv)}")
        if (loc is None) != (scale is None):
            raise ValueError("ActionScaling: give both loc and scale, or neither")
        self.standard_normal = bool(standard_normal)
        self._is_given = loc is not None
        if loc is not None and scale is not None:
            loc, scale = (_as_float(torch.as_tensor(value)) for value in (loc, scale))
            if bool((scale == 0).any()):
                raise ValueError(f"ActionScaling: scale={scale} must not be zero")
        self._keep(loc=loc, scale=scale)  # type: ignore[arg-type]

    @classmethod
    def from_stats(
        cls,
        *,
        mean: Any = None,
        std: Any = None,
        low: Any = None,
        high: Any = None,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> ActionScaling:
        """From the statistics of actions: their mean and deviation, or their bounds.

        >>> ActionScaling.from_stats(low=[0.0], high=[4.0]).scale
        tensor([2.])
        """
        given = [pair for pair in ((mean, std), (low, high)) if pair != (None, None)]
        if len(given) != 1 or None in given[0]:
            raise ValueError("ActionScaling.from_stats: give mean and std, or low and high")
        first, second = (torch.as_tensor(value, dtype=torch.get_default_dtype()) for value in given[0])
        if first.shape != second.shape:
            raise ValueError(f"ActionScaling.from_stats: shapes {tuple(first.shape)} and {tuple(second.shape)} differ")
        loc, scale = (first, second) if low is None else ((first + second) / 2, (second - first) / 2)
        return cls(loc=loc, scale=scale.clamp_min(eps), **kwargs)

    def normalize(self, action: torch.Tensor) -> torch.Tensor:
        """An action of the env as who acts writes it."""
        normal = (action - self.tensor("loc")) / self.tensor("scale")
        return normal if self.standard_normal else (normal + 1) / 2

    def denormalize(self, action: torch.Tensor) -> torch.Tensor:
        """What the env is given for an action."""
        if not self.standard_normal:
            action = action * 2 - 1
        return action * self.tensor("scale") + self.tensor("loc")

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self.denormalize(value)

    def _made_action_spec(self, spec: Spec) -> Spec:
        is_bounded = isinstance(spec, Bounded) and all(bool(_is_finite(bound).all()) for bound in bounds_of(spec))
        if not spec.dtype.is_floating_point:
            raise ValueError(f"ActionScaling: the env's action is {spec}, which is not continuous")
        if not self._is_given:
            if not is_bounded:
                raise ValueError(f"ActionScaling: the env's action is {spec}, without bounds; give loc and scale")
            low, high = bounds_of(spec)  # type: ignore[arg-type]
            if bool((high <= low).any()):
                raise ValueError(f"ActionScaling: the bounds of {spec} leave no room")
            if len(self.tensors) == 1:  # else each env has its own already
                self._keep(loc=(high + low) / 2, scale=(high - low) / 2)
            return Bounded(-1.0 if self.standard_normal else 0.0, 1.0, spec.shape, spec.dtype, spec.device)
        self._require_same_shape(spec)
        self.require_fit(self.denormalize(spec.zero()), spec.zero())
        if not is_bounded:
            return Unbounded(spec.shape, spec.dtype, spec.device)
        assert isinstance(spec, Bounded)
        low, high = bounds_through(self.normalize, spec)
        return Bounded(low, high, spec.shape, spec.dtype, spec.device)

    def _part(self, tensors: Tensors, read: torch.Tensor, write: torch.Tensor, is_inverse: bool) -> Callable[[], Any]:
        scratch = torch.empty_like(read)
        is_centred = self.standard_normal

        def run() -> None:
            source = read
            if not is_centred:
                source = torch.sub(torch.mul(read, 2, out=scratch), 1, out=scratch)
            torch.mul(source, tensors["scale"], out=write)  # type: ignore[arg-type]
            torch.add(write, tensors["loc"], out=write)  # type: ignore[arg-type]

        return run


def _as_float(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def _is_finite(bound: torch.Tensor) -> torch.Tensor:
    """Not infinite, nor the largest number there is, which says the same."""
    return bound.abs() < torch.finfo(bound.dtype).max


class DiscreteActionProjection(Transform):
    """One-hot actions of ``max_actions`` choices for an env of ``num_actions_effective``; others are drawn again.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), DiscreteActionProjection(2, max_actions=5))
    >>> env.rollout(3)["action"].shape
    torch.Size([3, 5])
    """

    #: Those that are drawn again come from one source of randomness.
    is_by_env = False
    _shown = ("num_actions_effective", "max_actions")

    def __init__(
        self,
        num_actions_effective: int,
        max_actions: int,
        action_key: NestedKey = "action",
        include_forward: bool = True,
    ) -> None:
        if not include_forward:
            raise ValueError("DiscreteActionProjection: include_forward is for data that was stored; leave it out")
        if not 1 <= num_actions_effective <= max_actions:
            raise ValueError(
                f"DiscreteActionProjection: max_actions={max_actions} must be at least "
                f"num_actions_effective={num_actions_effective}, which must be at least 1"
            )
        super().__init__(in_keys_inv=[action_key])
        self.num_actions_effective = num_actions_effective
        self.max_actions = max_actions
        #: Whether a network's outputs are cut to integers first, as TorchRL's does.
        self.truncates = False

    def _made_action_spec(self, spec: Spec) -> Spec:
        if not isinstance(spec, OneHot) or spec.n != self.num_actions_effective:
            raise ValueError(f"{self}: the env's action is {spec}, not one-hot of {self.num_actions_effective}")
        return OneHot(self.max_actions, (*spec.shape[:-1], self.max_actions), spec.dtype, spec.device)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        choice = (value.long() if self.truncates or not value.is_floating_point() else value).argmax(-1)
        beyond = choice >= self.num_actions_effective
        if bool(beyond.any()):
            choice[beyond] = torch.randint(self.num_actions_effective, (int(beyond.sum()),))
        return functional.one_hot(choice, self.num_actions_effective)


class ActionMask(Transform):
    """Says that random actions are among those that the env's ``action_mask`` allows.

    Random actions of envs and collectors are that anyway; with this, an env without a mask that fits is refused.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> TransformedEnv(GymEnv("CartPole-v1"), ActionMask())
    Traceback (most recent call last):
    ...
    KeyError: "ActionMask(): the env gives no 'action_mask'; it gives 'observation', 'reward'"
    """

    def __init__(self, action_key: NestedKey = "action", mask_key: NestedKey = "action_mask") -> None:
        for name, key, known in (("action_key", action_key, "action"), ("mask_key", mask_key, "action_mask")):
            if key != known:
                raise ValueError(f"ActionMask: {name} is {known!r}; to call it {key!r}, put a RenameTransform around")
        super().__init__()

    def transform_specs(self, specs: Specs) -> None:
        mask, action = specs.find(("action_mask",), self), specs.find_action(("action",), self)
        if not isinstance(action, (OneHot, Categorical)):
            raise ValueError(f"ActionMask: the env's action is {action}; only a choice among some can be masked")
        shape = action.shape if isinstance(action, OneHot) else (*action.shape, action.n)
        if mask.shape != torch.Size(shape):
            raise ValueError(
                f"ActionMask: {show(as_key('action_mask'))} has shape {tuple(mask.shape)}, the choices {tuple(shape)}"
            )

    def bind(self, rows: Rows) -> Stage:
        return NOTHING

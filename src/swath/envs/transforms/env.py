"""TransformedEnv: an env and the transforms of its data, as one env."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from swath.envs.base import EnvBase
from swath.envs.guest import GuestEnv
from swath.envs.making import make_env
from swath.envs.rows import RowEnv
from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose, as_transform, leave
from swath.envs.transforms.foreign import is_of_torchrl
from swath.envs.transforms.pipeline import Pipeline
from swath.envs.transforms.specs import KINDS, Specs
from swath.envs.transforms.stepper import TransformedStepper
from swath.errors import EnvDataError, EnvError
from swath.hints import wrapped
from swath.keys import Key, as_key, show
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Layout
from swath.rollout.strip import Strip
from swath.workers.pool import WorkerPool


class TransformedEnv(RowEnv):
    """``env`` with its data changed by ``transform``.

    Args:
        auto_unwrap: of an env that is transformed already, the transforms become this one's.

    >>> from swath.envs import Compose, GymEnv, RewardSum, StepCounter
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))
    >>> sorted(env.rollout(2)["next"].keys())
    ['done', 'episode_reward', 'observation', 'reward', 'step_count', 'terminated', 'truncated']
    """

    def __init__(
        self,
        env: Any = None,
        transform: Any = None,
        cache_specs: bool = True,
        *,
        base_env: Any = None,
        auto_unwrap: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if (env is None) == (base_env is None):
            raise TypeError("TransformedEnv: give one env: TransformedEnv(env, transform)")
        if not cache_specs:
            raise ValueError("TransformedEnv: cache_specs=False: specs are found when transforms change; leave it out")
        base: EnvBase = make_env(env if base_env is None else base_env)
        if auto_unwrap and isinstance(base, TransformedEnv):
            base, transform = base.base_env, Compose(*base.transform, *(() if transform is None else (transform,)))
        if isinstance(base, GuestEnv) and is_of_torchrl(transform):  # both are TorchRL's
            base, transform = base.transformed(transform), None
        if getattr(base, "has_fillers", False):
            raise EnvError(
                "TransformedEnv: a vector env in NEXT_STEP mode has steps that are none; make it with "
                "AutoresetMode.DISABLED or SAME_STEP"
            )
        self.base_env = base
        super().__init__(batch_size=base.batch_size, device=base.device if device is None else device)
        self._pipeline: Pipeline | None = None
        self._transform = _own_compose(transform)
        self._read_specs()

    @property
    def transform(self) -> Compose:
        """All transforms, in their order; what is appended, exchanged or deleted there has its effect at once."""
        return self._transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        before, self._transform = self._transform, _own_compose(transform)
        try:
            self._read_specs()
        except Exception:
            refused, self._transform = self._transform, before
            self._let_go(refused)
            self.remind()
            raise
        self._let_go(before)

    def _let_go(self, transforms: Compose) -> None:
        transforms.container = None
        leave(transforms, self.transform)

    def append_transform(self, transform: Any) -> TransformedEnv:
        """Add one behind the others."""
        return self.insert_transform(len(self.transform), transform)

    def insert_transform(self, index: int, transform: Any) -> TransformedEnv:
        self.transform.insert(index, transform)
        return self

    def env_before(self, transform: Transform) -> TransformedEnv:
        """The same env with the transforms before this one only."""
        before = [other is transform for other in self.transform].index(True)
        env = TransformedEnv(self.base_env, self.transform[:before], device=self.device)
        self._adopt()
        return env

    def _adopt(self) -> None:
        self.transform.container = self
        for transform in self.transform:
            transform.container = self

    def refresh(self) -> None:
        """Learn the specs again, after a transform was changed so that its results look different."""
        self._read_specs()

    def remind(self) -> None:
        """Let transforms learn the specs again, after they were told others that came to nothing."""
        self._told_specs()

    def _read_specs(self) -> None:
        specs, self._primable = self._told_specs()
        self.full_specs = {kind: getattr(specs, kind) for kind in KINDS}
        self._single_steps.clear()
        self._pipeline = None

    def _told_specs(self) -> tuple[Specs, frozenset[Key]]:
        """The specs behind all transforms, and what a policy may write under "next" (of primers: what they keep)."""
        self._adopt()
        specs = Specs.of(self.base_env.full_specs, self.batch_size)
        theirs = self.base_env.row_layout()
        primable = theirs.primable
        kept = set(theirs.primable if theirs.has_flags else ())
        for transform in self.transform:
            if transform.ends_episodes and not self.base_env.resets_single_envs:
                raise EnvError(
                    f"{transform} needs an env whose parts can be reset one by one; {self.base_env} resets by itself. "
                    "Make it with AutoresetMode.DISABLED, or wrap its envs in a TimeLimit"
                )
            if transform.repeats_steps and not self.base_env.steps_stay_in_episodes:
                raise EnvError(
                    f"{transform} steps also envs whose episode ended, and {self.base_env} would go on with another "
                    "episode, or refuse; let each of its envs repeat actions, in a gymnasium.Wrapper or with "
                    "GymEnv(..., frame_skip=n)"
                )
            transform.transform_specs(specs)
            touched = set(transform.touched_keys()) - set(transform.primed_keys)
            if touched & kept:
                raise ValueError(
                    f"{transform}: {show(min(touched & kept))} is what a TensorDictPrimer keeps for the policy, which "
                    "nobody changes on the way; give the result another key"
                )
            kept |= set(transform.primed_keys)
            primable = (primable - touched) | frozenset(transform.primed_keys)
        return specs, primable

    def row_layout(self) -> Layout:
        return replace(self.layout_around(self.base_env.row_layout()), primable=self._primable)

    @property
    def stepped_by(self) -> object | None:  # type: ignore[override]
        return self.base_env.stepped_by

    @stepped_by.setter
    def stepped_by(self, who: object | None) -> None:
        self.base_env.stepped_by = who

    @property
    def worker_pools(self) -> Sequence[WorkerPool]:  # type: ignore[override]
        return self.base_env.worker_pools

    @property
    def resets_single_envs(self) -> bool:  # type: ignore[override]
        return self.base_env.resets_single_envs

    @property
    def steps_stay_in_episodes(self) -> bool:  # type: ignore[override]
        return self.base_env.steps_stay_in_episodes

    @property
    def num_busy_processes(self) -> int:  # type: ignore[override]
        return self.base_env.num_busy_processes

    def plan(self) -> str:
        names = ", ".join(type(transform).__name__ for transform in self.transform)
        return self.base_env.plan() + (f", then {names}" if names else "")

    def bind_rows(self, strip: Strip) -> Stepper:
        self._remind_of_this_env()
        return TransformedStepper(self.pipeline, strip, is_current=self._is_current)

    def _remind_of_this_env(self) -> None:
        """A transform that is part of other envs as well may have been told theirs since."""
        if any(transform.container is not self for transform in self.transform):
            self.remind()

    def _is_current(self, pipeline: Pipeline) -> bool:
        """Whether the transforms are those that it was made of."""
        return self._pipeline is pipeline

    @property
    def pipeline(self) -> Pipeline:
        """What is between the base env and whoever steps this one."""
        if self._pipeline is None:
            self._remind_of_this_env()
            pipeline = Pipeline(self.base_env, self.transform, [as_key(key) for key in self.action_keys])
            self._require_memory(pipeline)
            self._pipeline = pipeline
        return self._pipeline

    def _require_memory(self, pipeline: Pipeline) -> None:
        """That what transforms make is what they say: rows of another shape or dtype would be cast, or be zero."""
        layout = self.row_layout()
        for field in (*layout.carried, *layout.outcomes):
            slot = pipeline.rows.slots.get(field.key)
            made = None if slot is None else (slot.tensor.shape[1:], slot.tensor.dtype)
            if made != (field.shape, field.dtype):
                got = "is not made" if made is None else f"is made with shape {tuple(made[0])} and dtype {made[1]}"
                raise EnvDataError(
                    f"{show(field.key)} {got} by {self.transform!r}; their specs say shape {tuple(field.shape)} and "
                    f"dtype {field.dtype}. swath.testing.check_transform(transform) tells which rule is broken"
                )

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        return self.base_env.set_seed(seed, static_seed)

    def state_dict(self) -> dict[str, Any]:
        return {"base_env": self.base_env.state_dict(), "transforms": self.transform.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.base_env.load_state_dict(state_dict.get("base_env", {}), strict)
        self.transform.load_state_dict(state_dict.get("transforms", {}), strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.base_env.check_state_dict(state_dict.get("base_env", {}), strict)
        self.transform.check_state_dict(state_dict.get("transforms", {}), strict)

    def single_step(self, actions: Any = None, primed: frozenset[Key] = frozenset()) -> tuple[Strip, Stepper]:
        if actions is not None and self._pipeline is None:
            raise EnvError(
                "TransformedEnv.step: its transforms have not seen this episode's start, since they were changed, or "
                "copied with the env, or no episode has begun; call reset() first"
            )
        return super().single_step(actions, primed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pipeline": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt()

    def complete_policy(self, policy: Any) -> None:
        self.base_env.complete_policy(policy)

    def _close(self) -> None:
        self.base_env.close(raise_if_closed=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(wrapped(self, "base_env", name), name)

    def __repr__(self) -> str:
        return f"TransformedEnv({self.base_env!r}, {self.transform!r})"


def _own_compose(transform: Any) -> Compose:
    """What an env has of what was given: the same object, unless another env has it."""
    if transform is None:
        return Compose()
    transform = as_transform(transform)
    return transform if type(transform) is Compose and transform.container is None else Compose(transform)

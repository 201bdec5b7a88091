"""Transforms of several envs, made once for all of them: what each does to its env, one does to the rows of all."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

from swath.envs.gym import GymWrapper
from swath.envs.gym_rows import GymRowEnv
from swath.envs.serial import same_spaces
from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose
from swath.envs.transforms.env import TransformedEnv
from swath.errors import EnvError


class Hoisted:
    """The envs of a ``SerialEnv``, as long as all have the same transforms.

    >>> from swath.envs import GymEnv, SerialEnv, StepCounter
    >>> SerialEnv(3, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter())).plan()
    '3 Gymnasium envs stepped on rows, then StepCounter'
    """

    def __init__(self) -> None:
        self._env: TransformedEnv | None = None
        #: What it was made of: transforms, and the specs that children have since these were last changed.
        self._parts: list[Any] = []

    def of(self, children: Sequence[Any]) -> TransformedEnv | None:
        """An env on the rows of all; None where they differ, or a transform is not known to treat each row alike."""
        if not _may_be_hoisted(children):
            return None
        parts = [part for child in children for part in (child.full_specs, *child.transform)]
        # The same again while it can be: its stages remember where episodes are.
        if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
            self._env, self._parts = _hoist(children), parts
        return self._env


def _hoist(children: Sequence[Any]) -> TransformedEnv | None:
    stacks = zip(*[child.transform for child in children], strict=True)
    # Copies: each remembers something of the specs that it was given, and the first child's are others.
    joined = [copy.copy(alike[0].side_by_side(alike)) for alike in stacks]
    try:
        env = _OnRowsOfAll(_SideBySide([child.base_env for child in children]), Compose(*joined))
    except (EnvError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # dimensions counted from the front
        return None
    env.made_of = [(child, child.full_specs) for child in children]
    mine, theirs = env.row_layout(), children[0].row_layout()
    same = all(getattr(mine, name) == getattr(theirs, name) for name in ("carried", "outputs", "outcomes"))
    return env if same else None


def _may_be_hoisted(children: Sequence[Any]) -> bool:
    if len(children) < 2 or not all(type(child) is TransformedEnv for child in children):
        return False
    if not all(isinstance(child.base_env, GymWrapper) for child in children):
        return False
    stacks = [child.transform for child in children]
    return (
        all(_is_known(transform) for stack in stacks for transform in stack)
        and all(_are_alike(stacks[0], stack) for stack in stacks[1:])
        and same_spaces([child.base_env for child in children])
    )


def _are_alike(stack: Compose, other: Compose) -> bool:
    return len(stack) == len(other) and all(mine.is_like(theirs) for mine, theirs in zip(stack, other, strict=True))


def _is_known(transform: Transform) -> bool:
    """One of ours; what others write may count a value's dimensions from the front."""
    return transform.is_by_env and type(transform).__module__.startswith("swath.envs.transforms.")


class _OnRowsOfAll(TransformedEnv):
    """Its transforms are the children's, which stay the containers of theirs."""

    #: The children, and the specs that they had: they are others since a transform was changed.
    made_of: Sequence[tuple[TransformedEnv, Any]] = ()

    def _adopt(self) -> None:
        pass

    def _remind_of_this_env(self) -> None:
        """They are copies, and in no other."""

    def _is_current(self, pipeline: Any) -> bool:
        return super()._is_current(pipeline) and all(child.full_specs is specs for child, specs in self.made_of)


class _SideBySide(GymRowEnv):
    """Envs that are seeded, saved and closed as what they are: one by one."""

    def __init__(self, envs: Sequence[GymWrapper]) -> None:
        first = envs[0]
        super().__init__(
            [env.env for env in envs],
            batch_size=(len(envs),),
            categorical_action_encoding=first.categorical_action_encoding,
            info_keys=first.info_leaves,
        )
        self.pending_seeds = _SeedsOf(envs)


class _SeedsOf(list):
    """The seeds that the envs were given."""

    def __init__(self, envs: Sequence[GymWrapper]) -> None:
        super().__init__(envs)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index).pending_seeds[0]

    def __setitem__(self, index: Any, seed: Any) -> None:
        super().__getitem__(index).pending_seeds[0] = seed

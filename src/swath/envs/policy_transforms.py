"""What a policy needs of its env besides observations: a flag where episodes begin, and first values of its state.

Modules say so as those of TorchRL do (``LSTMModule``, ``GRUModule``): ``make_tensordict_primer()`` makes the transform.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swath.envs.base import EnvBase
from swath.envs.guest import GuestEnv
from swath.envs.known import import_extra
from swath.envs.making import make_env
from swath.envs.transforms.compose import as_transform
from swath.envs.transforms.counting import InitTracker
from swath.keys import as_key
from swath.warn import warn_user

INIT_KEY = "is_init"


@dataclass(frozen=True)
class PolicyTransforms:
    """Transforms that a policy needs; what an env gives already is left out."""

    tracks_starts: bool = False
    primers: Sequence[Any] = ()

    @classmethod
    def of(cls, policy: Any) -> PolicyTransforms:
        """Of a module; of anything else, nothing is known."""
        if not callable(getattr(policy, "modules", None)):
            return cls()
        primers = []
        for module in policy.modules():
            make = getattr(module, "make_tensordict_primer", None)
            if not callable(make):
                continue
            try:
                primers.append(make())
            except Exception as error:
                warn_user(
                    f"auto_register_policy_transforms: {type(module).__name__} of the policy could not say which "
                    f"primer it needs ({type(error).__name__}: {error}); add that transform to the env yourself"
                )
        return cls(bool(primers) or _may_read_starts(policy), primers)

    def complete(self, env: EnvBase) -> EnvBase:
        """The env with those that it lacks; one that has transforms already gets them, too."""
        if self.tracks_starts and not any(key[-1] == INIT_KEY for key in _keys(env)):
            env = env.append_transform(_init_tracker(env))
        for primer in self.primers:
            for each in _single(primer):
                if not _is_there(each, env):
                    env = env.append_transform(each if isinstance(env, GuestEnv) else as_transform(each))
        return env

    def without_primers(self, who: str) -> PolicyTransforms:
        """For envs that are given actions only: a state that a policy keeps is zero where episodes begin.

        Raises:
            ValueError: it is to begin with something else.
        """
        for primer in (each for given in self.primers for each in _single(given)):
            default = getattr(primer, "default_value", None)
            values = default.values() if isinstance(default, Mapping) else [default]
            if getattr(primer, "random", None) or any(
                callable(value) or torch.as_tensor(value).any() for value in values
            ):
                raise ValueError(
                    f"{who}: auto_register_policy_transforms=True: the policy's state begins with something else than "
                    "zero, and these envs are given actions only; use a Collector or a MultiCollector"
                )
        return PolicyTransforms(self.tracks_starts)

    def around(self, factory: Any) -> Any:
        """A function that makes complete envs; for those that are made elsewhere."""
        return _Completing(self, factory)


@dataclass(frozen=True)
class _Completing:
    transforms: PolicyTransforms
    factory: Any

    def __call__(self, **kwargs: Any) -> EnvBase:
        return self.transforms.complete(make_env(self.factory, kwargs))


def _may_read_starts(policy: Any) -> bool:
    """Of a module on TensorDicts it is not always known; a plain one would be given one observation too many."""
    if getattr(policy, "in_keys", None) is not None:
        return True
    try:
        names = inspect.signature(policy.forward).parameters.keys()
    except (TypeError, ValueError):  # one that is not of Python
        return False
    return bool({INIT_KEY, "tensordict", "td"} & names)


def complete_env(env: EnvBase, policy: Any) -> EnvBase:
    """The env with what this policy needs."""
    return PolicyTransforms.of(policy).complete(env)


def _keys(env: EnvBase) -> set[Any]:
    return {field.key for field in env.row_layout().carried}


def _init_tracker(env: EnvBase) -> Any:
    if isinstance(env, GuestEnv):
        return import_extra("torchrl.envs", "torchrl", f"InitTracker for {env}").InitTracker(init_key=INIT_KEY)
    return InitTracker(INIT_KEY)


def _single(primer: Any) -> list[Any]:
    """A module that has several primes them with a Compose."""
    inner = getattr(primer, "transforms", None)
    return [primer] if inner is None else [each for part in inner for each in _single(part)]


def _is_there(primer: Any, env: EnvBase) -> bool:
    primers: Mapping[Any, Any] | None = getattr(primer, "primers", None)
    return primers is not None and {as_key(key) for key in primers.keys(True, True)} <= _keys(env)  # type: ignore[call-arg]

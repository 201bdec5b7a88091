"""Envs of other packages: recognised without importing the package, which their user has done already.

A package that was not imported made no env, so it is enough to look among the modules that there are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: (module, class in it, the wrapper's module, its name). EnvPool's come first: they are also Gymnasium or dm_env envs.
_WRAPPERS = (
    ("envpool.python.envpool", "EnvPoolMixin", "swath.envs.envpool", "EnvPoolWrapper"),
    ("pettingzoo.utils.env", "ParallelEnv", "swath.envs.pettingzoo", "PettingZooWrapper"),
    ("pettingzoo.utils.env", "AECEnv", "swath.envs.pettingzoo", "PettingZooWrapper"),
    ("dm_env", "Environment", "swath.envs.dm_control", "DMControlWrapper"),
)


def wrapper_of(env: Any) -> Callable[..., Any] | None:
    """What makes a swath env of this one; None where no package in the table made it.

    >>> wrapper_of("CartPole-v1") is None
    True
    """
    for module, name, wrapper_module, wrapper in _WRAPPERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(env, kind):
            return getattr(importlib.import_module(wrapper_module), wrapper)
    return None


def wrap_known(env: Any) -> Any:
    """``env`` in its wrapper, or as it is."""
    wrapper = wrapper_of(env)
    return env if wrapper is None else wrapper(env)


def import_extra(module: str, extra: str, who: str) -> ModuleType:
    """Import what an extra of swath installs, or say which.

    >>> import_extra("no_package", "atari", "ALE/Pong-v5")
    Traceback (most recent call last):
    ModuleNotFoundError: ALE/Pong-v5 needs the package 'no_package', which is not installed: pip install "swath[atari]"
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if str(error.name).partition(".")[0] != package:
            raise  # it is there, but something that it needs is not
        raise ModuleNotFoundError(
            f'{who} needs the package {package!r}, which is not installed: pip install "swath[{extra}]"', name=package
        ) from None

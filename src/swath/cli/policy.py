"""``--policy module:factory``: finding the factory, and calling it."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from swath.cli.errors import UsageError, missing_module
from swath.errors import did_you_mean


def import_from_here() -> None:
    """Let modules of the current directory be imported, as ``python -m`` does; a console script does not."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def split_name(name: str) -> tuple[str, str]:
    """The module and the attribute of ``module:attribute``."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"--policy {name}: write it as module:factory, for example my_agent.policies:make_policy")
    return module, attribute


def find_factory(name: str) -> Callable[..., Any]:
    """What ``module:attribute`` names."""
    module_name, attribute = split_name(name)
    found: Any = _import(module_name, name)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [known for known in vars(found) if not known.startswith("_")]
            hint = did_you_mean(part, public)
            raise UsageError(f"--policy {name}: {module_name} has no {part!r}{hint}") from None
    if not callable(found) or _is_module_instance(found):
        raise UsageError(
            f"--policy {name}: {attribute} is a {type(found).__name__}, not a function that makes a policy; "
            "write one that returns it"
        )
    return found


def _import(module_name: str, name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(
            f"{missing}."
        ):  # the module was found, and imports another
            package = missing_module(error)
            raise UsageError(
                f"--policy {name}: {module_name} imports {missing!r}, which is not installed: pip install {package}"
            ) from error
        parent = missing.rpartition(".")[0]
        hint = did_you_mean(missing, _siblings(parent))
        raise UsageError(
            f"--policy {name}: there is no module {missing!r}, neither here nor installed{hint}"
        ) from error


def _siblings(parent: str) -> list[str]:
    """The modules beside which one was looked for."""
    path = getattr(sys.modules[parent], "__path__", ()) if parent else None
    return [f"{parent}.{module.name}" if parent else module.name for module in pkgutil.iter_modules(path)]


def _is_module_instance(found: Any) -> bool:
    import torch

    return isinstance(found, torch.nn.Module)


def takes_env(factory: Callable[..., Any], name: str) -> bool:
    """Whether a factory wants the env: it has one argument without a default, or one that is called env."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise UsageError(f"--policy {name}: the factory wants ({names}); it can be given the env, or nothing")
    return bool(required) or (bool(plain) and plain[0].name == "env")


def make_policy(factory: Callable[..., Any], name: str, env: Any) -> Any:
    """The policy that the factory called ``name`` makes for ``env``."""
    arguments = (env,) if takes_env(factory, name) else ()
    try:
        policy = factory(*arguments)
    except Exception as error:
        error.add_note(f"raised by the factory of --policy {name}")
        raise
    if not callable(policy):
        made = "nothing (a missing return?)" if policy is None else f"a {type(policy).__name__}, which cannot be called"
        raise UsageError(f"--policy {name}: the factory returned {made}; it must return a policy")
    return policy

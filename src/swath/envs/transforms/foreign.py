"""What is given as a transform and is none of ours: those of TorchRL that are known become ours, others are refused."""

from __future__ import annotations

from typing import Any, NoReturn

from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose, as_transform


def as_own_transform(thing: Any) -> Transform:
    """One of TorchRL's as ours, with the tensors of the given one; ``TypeError`` says what else to write."""
    if not is_of_torchrl(thing):
        _refuse(thing)
    from swath.envs.lowered_transforms import lower_transforms
    from swath.envs.recognising import NotLowered, name_of

    if name_of(thing) == "Compose":  # one by one: it may be one of them only
        return Compose(*map(as_transform, thing.transforms))
    try:
        return lower_transforms(thing)
    except NotLowered as reason:
        _refuse_torchrls(thing, str(reason))
    except Exception as error:  # most ask the env of TorchRL that they are a part of, which there is none of
        _refuse_torchrls(thing, f"it asks the env of TorchRL that it is a part of ({type(error).__name__}: {error})")


def is_of_torchrl(thing: Any) -> bool:
    """Also of somebody who has extended one of theirs."""
    return any(
        kind.__name__ == "Transform" and kind.__module__.startswith("torchrl.envs.") for kind in type(thing).__mro__
    )


def _refuse_torchrls(thing: Any, reason: str) -> NoReturn:
    import swath.envs

    name = type(thing).__name__
    own = getattr(swath.envs, name, None)
    known = isinstance(own, type) and issubclass(own, Transform) and type(thing).__module__.startswith("torchrl.")
    write = (
        f"swath.envs.{name}(...), with the same arguments"
        if known
        else "one of swath's, which is short (class Mine(swath.envs.Transform), docs/transforms.md)"
    )
    raise TypeError(
        f"{type(thing).__module__}.{name} is of TorchRL and cannot work in an env of swath: {reason}. Write {write}; "
        "or let TorchRL make the env, which swath's collectors take as it is: "
        f"torchrl.envs.TransformedEnv(torchrl.envs.GymEnv(...), {name}(...))"
    )


def _refuse(thing: Any) -> NoReturn:
    kind = type(thing)
    hint = "write class Mine(swath.envs.Transform) (docs/transforms.md)"
    if isinstance(thing, type):
        hint = f"that is a class: write {thing.__name__}(...)"
    elif isinstance(thing, (list, tuple)):
        hint = "of several, write Compose(*transforms)"
    elif callable(thing):
        hint = (
            "of a function of one key's values, write class Mine(swath.envs.Transform) with the method "
            "_apply_transform(self, value), and give Mine(in_keys=[...], out_keys=[...])"
        )
    name = f"the class {thing.__name__}" if isinstance(thing, type) else f"{kind.__module__}.{kind.__name__}"
    raise TypeError(f"a transform is a swath.envs.Transform, not {name}; {hint}")

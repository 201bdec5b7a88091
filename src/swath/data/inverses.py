"""Which of a buffer's transforms do something to what is written, by their ``inv``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any


def inverts(transform: Any) -> bool:
    """Whether its ``inv`` is to be called. Every transform of TorchRL's has one, of which most do nothing."""
    if not callable(getattr(transform, "inv", None)):
        return False
    return any(not _has_idle_inverse(part) for part in _parts_of(transform))


def require_by_env(transform: Any) -> None:
    """For what a collector writes: that it does not take one env's frames for the next of another."""
    for part in _parts_of(transform):
        if type(part).__name__ == "MultiStepTransform":
            raise TypeError(
                "torchrl's MultiStepTransform does not tell the envs of a collector apart: give the buffer "
                f"swath.envs.MultiStepTransform(n_steps={part.n_steps}, gamma={part.gamma})"
            )


#: Whose a transform is that keeps frames for later.
_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claimed(transform: Any, buffer: Any) -> Any:
    """The transform, which is this buffer's from now on, if it keeps frames: they would be written to another one."""
    if callable(getattr(transform, "holds", None)):
        owner = _owners.get(transform)
        if owner is not None and owner() is not None:
            raise ValueError(
                f"this {type(transform).__name__} is a buffer's already, and "
                "holds back frames of what is written there: make another one with the same arguments"
            )
        _owners[transform] = weakref.ref(buffer)
    return transform


class Inverted:
    """A transform the other way round: called with what is written, and its ``inv`` with samples."""

    def __init__(self, transform: Any) -> None:
        name = type(transform).__name__
        if not callable(transform):
            raise TypeError(f"invert=True calls a transform with what is written; {name} is not callable")
        if callable(getattr(transform, "holds", None)) or getattr(transform, "looks_ahead", False):
            raise TypeError(f"{name} is for what is written already: append it without invert=True")
        self.transform: Any = transform
        #: Whether it does something to samples.
        self.changes_samples = inverts(transform)

    def __call__(self, sample: Any) -> Any:
        return self.transform.inv(sample)

    def inv(self, data: Any) -> Any:
        return self.transform(data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transform!r})"


def checked_transform(transform: Any) -> Any:
    if callable(transform) or inverts(transform):
        return transform
    name = type(transform).__name__
    raise TypeError(
        f"a buffer's transform is called with samples, or its inv with what is written; {name} is neither. If it is "
        f"for envs, write TransformedEnv(env, {name}(...))"
    )


def _parts_of(transform: Any) -> Iterator[Any]:
    composed = getattr(transform, "transforms", None) if type(transform).__name__ == "Compose" else None
    if composed is None:
        yield transform
        return
    for part in composed:
        yield from _parts_of(part)


def _has_idle_inverse(transform: Any) -> bool:
    """A transform of TorchRL's without ``in_keys_inv`` that does not say by itself what its inverse is."""
    for name in ("inv", "_inv_call"):
        owner = next((kind for kind in type(transform).__mro__ if name in vars(kind)), None)
        is_plain = owner is not None and owner.__module__ == "torchrl.envs.transforms._base"
        if not is_plain or name in vars(transform):
            return False
    return not transform.in_keys_inv

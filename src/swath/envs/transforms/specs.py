"""Specs: what an env gives and takes, as the transforms before one have left it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from swath.keys import Key, as_key, show
from swath.specs import Bounded, Composite, Spec

if TYPE_CHECKING:
    from swath.envs.transforms.base import Transform

#: What no transform may call what it makes.
RESERVED = ("next", "collector", "_reset", "_step")


#: Of a spec's leaves, which are for whom.
KINDS = ("observation", "action", "state", "reward", "done")


@dataclass
class Specs:
    """The specs of an env, as the transforms before have left them; ``batch_size`` is in front of every shape."""

    batch_size: torch.Size
    observation: Composite
    action: Composite
    state: Composite
    reward: Composite
    done: Composite

    @classmethod
    def of(cls, full_specs: dict[str, Composite], batch_size: torch.Size) -> Specs:
        return cls(batch_size, **{kind: full_specs[kind].clone() for kind in KINDS})

    def kind_of(self, key: Key) -> str | None:
        """In which of them a key is that an env writes: ``"observation"`` or ``"reward"``."""
        for kind in ("observation", "reward", "state"):
            if key in map(as_key, getattr(self, kind).keys(True, True)):
                return kind
        return None

    def find(self, key: Key, who: Transform) -> Spec:
        kind = self.kind_of(key)
        if kind is None:
            known = [show(as_key(k)) for k in (*self.observation.keys(True, True), *self.reward.keys(True, True))]
            raise KeyError(f"{who}: the env gives no {show(key)}; it gives {', '.join(known)}")
        return getattr(self, kind)[key]

    def put(self, key: Key, spec: Spec, kind: str) -> None:
        if key[0] in RESERVED:
            raise ValueError(f"{show(key)}: {key[0]!r} is a name that the data uses for something else; give another")
        for among in (getattr(self, among) for among in KINDS):
            if isinstance(among.get(key), Composite):
                raise ValueError(f"{show(key)} is a group of keys already: {among.get(key)}; give another name")
            for front in (key[:end] for end in range(1, len(key))):
                if isinstance(among.get(front), Spec):
                    raise ValueError(f"{show(key)}: {show(front)} is no group of keys, but a value; give another name")
        if spec.shape[: len(self.batch_size)] != self.batch_size:
            raise ValueError(
                f"the spec of {show(key)} has shape {tuple(spec.shape)}, which does not begin with the env's batch "
                f"size {tuple(self.batch_size)}; write (*specs.batch_size, ...)"
            )
        for other in KINDS:
            if other != kind and key in map(as_key, getattr(self, other).keys(True, True)):
                raise ValueError(f"{show(key)} is in the env's {other}_spec already; give another name for {kind}s")
        getattr(self, kind)[key] = spec

    def drop(self, key: Key, who: Transform) -> None:
        """Take out what an env gives; it is no longer part of the data."""
        self.find(key, who)
        del getattr(self, self.kind_of(key) or "observation")[key]

    def find_action(self, key: Key, who: Transform) -> Spec:
        known = list(map(as_key, self.action.keys(True, True)))
        if key not in known:
            raise KeyError(f"{who}: the env takes no {show(key)}; it takes {', '.join(map(show, known))}")
        return self.action[key]


def bounds_of(spec: Bounded) -> tuple[torch.Tensor, torch.Tensor]:
    """Both bounds as tensors of the spec's shape and dtype."""
    low, high = (torch.from_numpy(np.array(bound)).to(spec.dtype) for bound in (spec.low, spec.high))
    return low.expand(spec.shape), high.expand(spec.shape)


def bounds_through(function: Callable[[torch.Tensor], torch.Tensor], spec: Bounded) -> tuple[np.ndarray, np.ndarray]:
    """Between what a function that rises, or falls, makes of them."""
    ends = [function(bound) for bound in bounds_of(spec)]
    return torch.minimum(*ends).numpy(), torch.maximum(*ends).numpy()

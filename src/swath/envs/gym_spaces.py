"""Gymnasium spaces as specs, and the codecs between an env's Python values and rows of memory.

An observation leaf is written as a flat buffer of the exact dtype and length, so a leaf only needs ``prepare``: a
function from what the env returned to such a buffer (None where it is one already). An action leaf needs
``decode``: a function from a row ``[num_envs, *shape]`` to an array with one value per env.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from swath.keys import Key
from swath.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Spec, Unbounded

TORCH_DTYPES: dict[Any, torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
}


RESERVED_KEYS = frozenset(["action", "reward", "done", "terminated", "truncated", "next", "collector"])


@dataclass(frozen=True)
class ObservationLeaf:
    """One leaf of an observation space: where it stands, what it looks like, how it is written."""

    key: Key
    path: tuple[str | int, ...]
    spec: Spec
    space: spaces.Space
    prepare: Callable[[Any], Any] | None

    def pick(self, observation: Any) -> Any:
        for part in self.path:
            observation = observation[part]
        return observation


@dataclass(frozen=True)
class ActionLeaf:
    """One leaf of an action space: where it stands, what it looks like, how a row of it is read."""

    key: Key
    path: tuple[str | int, ...]
    spec: Spec
    decode: Callable[[np.ndarray], np.ndarray]


def composite_of(leaves: Sequence[Any], batch_size: torch.Size) -> Composite:
    """The specs of some leaves, for a batch of envs."""
    specs = Composite(shape=batch_size)
    for leaf in leaves:
        specs[leaf.key] = leaf.spec.expand((*batch_size, *leaf.spec.shape))
    return specs


def torch_dtype(dtype: Any, where: str) -> torch.dtype:
    try:
        return TORCH_DTYPES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise TypeError(f"{where} has dtype {dtype}, which PyTorch does not have") from None


def _walk(space: spaces.Space, key: Key, path: tuple, root: Key) -> list[tuple[Key, tuple, spaces.Space]]:
    """The leaves of a space; a Dict's own names are keys, a Tuple's are "0", "1", … below ``root``."""
    if isinstance(space, spaces.Dict):
        items = [(str(name), name, sub) for name, sub in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        key = key or root
        items = [(str(i), i, sub) for i, sub in enumerate(space.spaces)]
    else:
        return [(key or root, path, space)]
    return [leaf for name, part, sub in items for leaf in _walk(sub, (*key, name), (*path, part), root)]


def observation_leaves(space: spaces.Space, categorical: bool) -> list[ObservationLeaf]:
    """The leaves of an observation space; a space that is not a Dict stands under "observation".

    >>> leaves = observation_leaves(spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(0, 1, (2,))])), False)
    >>> [(leaf.key, tuple(leaf.spec.shape)) for leaf in leaves]
    [(('a',), (3,)), (('b', '0'), (2,))]
    """
    leaves = _walk(space, (), (), ("observation",))
    for key, _, _ in leaves:
        if key[0] in RESERVED_KEYS:
            raise ValueError(
                f"the observation space has an entry {key[0]!r}, which is the name of something else in the data; "
                "rename it with an ObservationWrapper"
            )
    return [ObservationLeaf(key, path, *_observation_codec(leaf, categorical)) for key, path, leaf in leaves]


def dict_nodes(space: spaces.Space, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], set[str]]]:
    """Where an observation is a dictionary, and the names that it must have there, no more and no fewer."""
    if isinstance(space, spaces.Dict):
        own = [(path, set(space.spaces))]
        return own + [node for name, sub in space.spaces.items() for node in dict_nodes(sub, (*path, name))]
    if isinstance(space, spaces.Tuple):
        return [node for i, sub in enumerate(space.spaces) for node in dict_nodes(sub, (*path, i))]
    return []


def require_names(observation: Any, nodes: list[tuple[tuple[str | int, ...], set[str]]]) -> None:
    """Raise ``KeyError`` for a name that an observation has too much, or lacks."""
    for path, names in nodes:
        node = observation
        for part in path:
            node = node[part]
        if node.keys() != names:
            extra, missing = sorted(node.keys() - names), sorted(names - node.keys())
            problem = f"has {extra[0]!r}, which its space has not" if extra else f"lacks {missing[0]!r}"
            raise KeyError(f"the observation{''.join(f'[{part!r}]' for part in path)} {problem}")


def _observation_codec(
    space: spaces.Space, categorical: bool
) -> tuple[Spec, spaces.Space, Callable[[Any], Any] | None]:
    spec = spec_of(space, categorical)
    if isinstance(space, spaces.Discrete):
        if categorical:
            start = int(space.start)
            return spec, space, lambda value: np.array([value - start], dtype=np.int64)
        # A dictionary rather than a list: -1 and a value past the end are errors, not another row.
        table = dict(
            zip(
                range(int(space.start), int(space.start + space.n)),
                np.eye(int(space.n), dtype=np.int64),
                strict=True,
            )
        )
        return spec, space, lambda value: table[int(value)]
    if isinstance(space, spaces.MultiDiscrete):
        start, shape = np.asarray(space.start), space.shape
        if categorical:
            return spec, space, lambda value: _reshaped(np.asarray(value) - start, shape).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(space.nvec.reshape(-1))])
        total = int(offsets[-1])

        def one_hots(value: Any) -> np.ndarray:
            choice = _reshaped(np.asarray(value) - start, shape)
            if (choice < 0).any() or (choice >= space.nvec.reshape(-1)).any():
                raise ValueError(f"{value} is not in {space}")
            row = np.zeros(total, dtype=np.int64)
            row[offsets[:-1] + choice] = 1
            return row

        return spec, space, one_hots
    if len(space.shape or ()) == 1:
        return spec, space, None
    shape = space.shape
    assert shape is not None
    return spec, space, lambda value: _reshaped(value, shape)


def _reshaped(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    if np.shape(value) != shape:
        raise ValueError(f"shape {np.shape(value)} is not {shape}")
    return np.asarray(value).reshape(-1)


def spec_of(space: spaces.Space, categorical: bool) -> Spec:
    """The spec of a leaf space; Discrete and MultiDiscrete are one-hot unless ``categorical``."""
    if isinstance(space, spaces.Box):
        dtype = torch_dtype(space.dtype, str(space))
        if dtype.is_floating_point and np.isneginf(space.low).all() and np.isposinf(space.high).all():
            return Unbounded(space.shape, dtype)
        return Bounded(space.low, space.high, space.shape, dtype)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n)) if categorical else OneHot(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space.nvec) if categorical else MultiOneHot(space.nvec.reshape(-1))
    if isinstance(space, spaces.MultiBinary):
        return Binary(int(np.prod(space.shape)), space.shape)
    raise TypeError(
        f"{type(space).__name__} spaces have no fixed shape, so they cannot be stored; wrap the env so that it gives "
        "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple spaces"
    )


def action_leaves(space: spaces.Space, categorical: bool) -> list[ActionLeaf]:
    """The leaves of an action space, below "action" where there are several."""
    leaves = []
    composite = isinstance(space, (spaces.Dict, spaces.Tuple))
    for key, path, leaf in _walk(space, ("action",) if composite else (), (), ("action",)):
        leaves.append(ActionLeaf(key, path, spec_of(leaf, categorical), _decoder(leaf, categorical)))
    return leaves


def _decoder(space: spaces.Space, categorical: bool) -> Callable[[np.ndarray], np.ndarray]:
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        # NumPy integers, as space.sample() gives: Discrete.contains, which many envs call, is slower on Python's.
        if categorical:
            return lambda row: row + start
        if start == 0:
            return lambda row: row.argmax(-1)
        return lambda row: row.argmax(-1) + start
    if isinstance(space, spaces.MultiDiscrete):
        start, dtype = np.asarray(space.start), space.dtype
        if categorical:
            return lambda row: (row + start).astype(dtype)
        cuts = np.cumsum(space.nvec.reshape(-1))[:-1]
        shape = space.shape

        def choices(row: np.ndarray) -> np.ndarray:
            picked = np.stack([part.argmax(-1) for part in np.split(row, cuts, axis=-1)], -1)
            return (picked.reshape(len(row), *shape) + start).astype(dtype)

        return choices
    dtype = space.dtype

    def copied(row: np.ndarray) -> np.ndarray:
        # Always a copy: an env may keep the action it was given, and the row is written again.
        return row.copy() if row.dtype == dtype else row.astype(dtype)

    return copied


def action_builder(space: spaces.Space) -> Callable[[list[np.ndarray], int], Any]:
    """How to put one env's decoded leaves back together: ``build(decoded, env)``."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return lambda decoded, env: decoded[0][env]

    def build(space: spaces.Space, values: list[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {name: build(sub, values) for name, sub in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(build(sub, values) for sub in space.spaces)
        return values.pop(0)

    return lambda decoded, env: build(space, [leaf[env] for leaf in decoded])

"""TensorDictPrimer: keys that no env gives, there from an episode's first step on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.foreign_specs import as_own_spec
from swath.envs.transforms.arguments import require_one_episode
from swath.envs.transforms.base import Transform
from swath.envs.transforms.rows import Rows, Slot, Stage
from swath.envs.transforms.specs import Specs
from swath.keys import Key, as_key, show
from swath.specs import Composite, NestedKey, Spec


class TensorDictPrimer(Transform):
    """Adds keys: a value at an episode's start, which stays until a policy writes another one under ``"next"``.

    A policy's recurrent state needs none in swath: it is zero at an episode's start anyway. It is for a state that
    begins with something else, and for what is drawn once an episode (a goal, a skill).

    Args:
        primers: a spec for each key, as a dict or a ``Composite``; or as keyword arguments.
        random: draw the values from the specs, at each start of an episode.
        default_value: the value (0 by default); a function without arguments that returns one for all envs; or a dict
            of such by key.
        single_default_value: ``default_value`` is called once for all keys, with ``reset=``, a mask of the envs that
            begin, and returns a TensorDict, or a dict, of as many rows as the mask has.
        expand_specs: True: specs are those of one env. False: their shapes begin with the env's batch size. None: the
            same, as the shape of ``primers`` (``Composite(..., shape=...)``) says.

    >>> from swath.envs import GymEnv, TransformedEnv, Unbounded
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), TensorDictPrimer(goal=Unbounded((2,)), default_value=3.0))
    >>> env.rollout(2)["next", "goal"]
    tensor([[3., 3.],
            [3., 3.]])
    """

    _shown = ("primers", "default_value", "random")

    def __init__(
        self,
        primers: Mapping[Any, Any] | Composite | None = None,
        random: bool | None = None,
        default_value: Any = None,
        reset_key: NestedKey | None = None,
        expand_specs: bool | None = None,
        single_default_value: bool = False,
        call_before_env_reset: bool = False,
        **kwargs: Any,
    ) -> None:
        device = kwargs.pop("device", None)
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"TensorDictPrimer: device={device}: rows are in main memory; give the env a device")
        require_one_episode("TensorDictPrimer", "reset_key", reset_key, None, "_reset")
        if call_before_env_reset:
            raise ValueError(
                "TensorDictPrimer: call_before_env_reset=True: no env of swath reads a TensorDict when it is reset; "
                "leave it out"
            )
        if primers is not None and kwargs:
            raise ValueError(f"TensorDictPrimer: give primers or keywords, not both: {', '.join(kwargs)}")
        if random and (callable(default_value) or default_value):
            raise ValueError("TensorDictPrimer: random=True draws the values; leave default_value out")
        if single_default_value and not callable(default_value):
            raise ValueError("TensorDictPrimer: single_default_value=True is for a default_value that is a function")
        self.primers = _as_composite(kwargs if primers is None else primers)
        self.random = bool(random)
        self.single_default_value = single_default_value
        self.expand_specs = expand_specs
        #: By key; or a function for all of them.
        self.default_value: Any = default_value if single_default_value else self._by_key(default_value)
        super().__init__(out_keys=list(self.primers.keys(True, True)))

    _keys_are_pairs = False

    def _by_key(self, default_value: Any) -> dict[Key, Any]:
        keys = [as_key(key) for key in self.primers.keys(True, True)]
        if not isinstance(default_value, Mapping):
            value = 0.0 if default_value is None else default_value
            return dict.fromkeys(keys, value)
        given = {as_key(key): value for key, value in _flat(default_value)}
        if given.keys() != set(keys):
            raise ValueError(
                f"TensorDictPrimer: default_value has {_names(given)}, the primers are {_names(keys)}; give all of them"
            )
        return given

    @property
    def is_by_env(self) -> bool:  # type: ignore[override]
        """Not where something is drawn, or asked for, of all envs at once."""
        values = () if self.single_default_value else self.default_value.values()
        return not (self.random or self.single_default_value or any(map(callable, values)))

    def is_like(self, other: Transform) -> bool:
        """Exactly: what is shown of numbers is rounded."""
        if not isinstance(other, TensorDictPrimer) or not super().is_like(other):
            return False
        mine, theirs = self.default_value, other.default_value
        if self.single_default_value or other.single_default_value:
            return mine is theirs
        same = all(mine[key] is theirs[key] or np.array_equal(mine[key], theirs[key]) for key in mine)
        return same and self.primers == other.primers and self.expand_specs == other.expand_specs

    @property
    def primed_keys(self) -> list[Key]:
        return [as_key(key) for key in self.out_keys]

    def transform_specs(self, specs: Specs) -> None:
        for key, spec in self._specs_for(specs.batch_size).items():
            if specs.kind_of(key) is not None:
                raise KeyError(f"TensorDictPrimer: the env gives {show(key)} already; give another key")
            specs.put(key, spec, "observation")

    def _specs_for(self, batch_size: torch.Size) -> dict[Key, Spec]:
        lead = len(batch_size)
        leaves = {as_key(key): leaf for key, leaf in self.primers.items(True, True)}
        fits = self.primers.shape[:lead] == batch_size
        if not fits and self.expand_specs is None:
            raise ValueError(
                f"TensorDictPrimer: the primers have shape {tuple(self.primers.shape)}, the env {tuple(batch_size)}"
                "; say expand_specs=True where the specs are those of one env, False where their shapes begin with "
                f"{tuple(batch_size)}"
            )
        if self.expand_specs and not fits:
            return {key: leaf.expand((*batch_size, *leaf.shape)) for key, leaf in leaves.items()}
        for key, leaf in leaves.items():
            if leaf.shape[:lead] != batch_size:
                raise ValueError(
                    f"TensorDictPrimer: the spec of {show(key)} has shape {tuple(leaf.shape)}, which does not begin "
                    f"with the env's batch size {tuple(batch_size)}; say expand_specs=True to have it put in front"
                )
        return leaves

    def bind(self, rows: Rows) -> Stage:
        lead = len(rows.batch_size)
        specs = self._specs_for(rows.batch_size)
        slots = {key: rows.new(key, spec.shape[lead:], spec.dtype) for key, spec in specs.items()}
        if self.single_default_value:
            return _AskedAtOnce(self.default_value, slots, rows.batch_size)
        if self.random:
            return _Primed({key: spec.rand for key, spec in specs.items()}, slots)
        values = {key: _fitting(key, value, slots[key]) for key, value in self.default_value.items()}
        return _Primed(values, slots)


class _Primed:
    """Values that are written where an episode begins, and stay where they are."""

    def __init__(self, values: Mapping[Key, Any], slots: Mapping[Key, Slot]) -> None:
        self._values = [(key, value if callable(value) else None, value, slots[key]) for key, value in values.items()]

    def step(self, env_ids: Sequence[int] | None) -> None:
        pass

    def reset(self, env_ids: Sequence[int]) -> None:
        for key, draw, value, slot in self._values:
            if draw is None:
                slot.array[env_ids] = value
            else:
                drawn = _checked(key, draw(), slot.row.shape, slot.row.dtype)
                slot.array[env_ids] = drawn.reshape(slot.tensor.shape).numpy()[env_ids]


class _AskedAtOnce:
    """One function says what all keys are, for as many envs as begin."""

    def __init__(self, function: Callable[..., Any], slots: Mapping[Key, Slot], batch_size: torch.Size) -> None:
        self._function = function
        self._slots = slots
        self._batch_size = batch_size

    def step(self, env_ids: Sequence[int] | None) -> None:
        pass

    def reset(self, env_ids: Sequence[int]) -> None:
        num_envs = self._batch_size.numel()
        mask = torch.zeros(num_envs, dtype=torch.bool)
        mask[list(env_ids)] = True
        given = {as_key(key): value for key, value in _flat(self._function(reset=mask.view(*self._batch_size, 1)))}
        if given.keys() != self._slots.keys():
            raise ValueError(
                f"TensorDictPrimer: default_value gave {_names(given)}, the primers are {_names(self._slots)}"
            )
        lead = self._batch_size if bool(mask.all()) else torch.Size((len(env_ids),))
        for key, slot in self._slots.items():
            value = _checked(key, given[key], (*lead, *slot.tensor.shape[1:]), slot.row.dtype)
            slot.array[env_ids] = value.reshape(-1, *slot.tensor.shape[1:]).numpy()


def _as_composite(primers: Any) -> Composite:
    shape: Any = ()
    if isinstance(primers, Mapping):
        primers = dict(primers)
        shape = primers.pop("shape", primers.pop("batch_size", None)) or ()
    leaves = {as_key(key): as_own_spec(spec, f"TensorDictPrimer: {show(as_key(key))}") for key, spec in _flat(primers)}
    if not leaves:
        raise ValueError("TensorDictPrimer: which keys? Give a spec for each: TensorDictPrimer(goal=Unbounded((2,)))")
    return Composite(leaves, shape=getattr(primers, "shape", shape))


def _flat(tree: Any) -> list[tuple[Any, Any]]:
    """The leaves of a dict, a spec or a TensorDict, by their keys."""
    leaves: list[tuple[Any, Any]] = []
    if not hasattr(tree, "items"):
        raise TypeError(f"TensorDictPrimer: a dict, or a TensorDict, of keys was expected, not {type(tree).__name__}")
    for key, value in tree.items():
        if hasattr(value, "items"):
            leaves += [((*as_key(key), *as_key(inner)), leaf) for inner, leaf in _flat(value)]
        else:
            leaves.append((key, value))
    return leaves


def _fitting(key: Key, value: Any, slot: Slot) -> Any:
    """A number for all, or a tensor that fits: of one env, or of all of them."""
    if callable(value):
        return value
    tensor = torch.as_tensor(value)
    if tensor.ndim == 0:
        cast = tensor.to(slot.tensor.dtype)
        if cast.to(torch.float64) != tensor.to(torch.float64) and not slot.tensor.dtype.is_floating_point:
            raise ValueError(f"TensorDictPrimer: {show(key)} is {slot.tensor.dtype}, which cannot be {value}")
        return cast.numpy()
    return _checked(key, tensor, slot.tensor.shape[1:], slot.tensor.dtype).numpy()


def _checked(key: Key, value: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        value = torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value, dtype=dtype)
    if value.shape != torch.Size(shape) or value.dtype != dtype:
        raise ValueError(
            f"TensorDictPrimer: the default of {show(key)} has shape {tuple(value.shape)} and dtype {value.dtype}; its "
            f"spec says {tuple(shape)} and {dtype}"
        )
    return value.detach().cpu()


def _names(keys: Any) -> str:
    return ", ".join(sorted(show(as_key(key)) for key in keys)) or "nothing"

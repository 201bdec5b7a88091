"""Transform: what is done to an env's data between its step and whoever reads it.

A transform says what it makes of the specs, and is then bound to rows: memory of one entry per env for each key, always
the same, so that a step only runs functions whose arguments were found once.

Each key is read where the transform before has left it and written elsewhere, so a stage without memory of its own may
be run over all envs again at any time: that is what a reset of some of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from swath.errors import EnvDataError
from swath.keys import Key, as_key, show
from swath.rollout.layout import CPU
from swath.specs import Composite, NestedKey, Spec, Unbounded
from swath.states import check_by_loading, mismatch, require_empty

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


class Slot:
    """One key's memory: ``tensor`` is ``[num_envs, *shape]``, ``array`` the same, ``row`` ``[*batch_size, *shape]``."""

    __slots__ = ("array", "row", "tensor")

    def __init__(self, tensor: torch.Tensor, batch_size: torch.Size) -> None:
        self.tensor = tensor
        self.array: np.ndarray = tensor.numpy()
        self.row = tensor.view((*batch_size, *tensor.shape[1:]))


@dataclass
class Rows:
    """Where each key's entry of the current step is, as the transforms before have left it."""

    batch_size: torch.Size
    slots: dict[Key, Slot]
    #: ``[num_envs]``, of the current step.
    terminated: np.ndarray
    truncated: np.ndarray
    #: The env that is transformed.
    base: Any = None
    #: For a transform that ``drives``: the env as it sees it.
    driver: Driver | None = None
    #: Whether an episode ended in the last step, and no env was reset since.
    ended: bool = False
    #: Whether the step under way was taken again, by a transform that drives.
    is_repeated: bool = False
    num_envs: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_envs = self.batch_size.numel()

    def __getitem__(self, key: NestedKey) -> Slot:
        try:
            return self.slots[as_key(key)]
        except KeyError:
            known = ", ".join(map(show, self.slots))
            raise KeyError(f"a transform asks for {show(as_key(key))}, which nobody gives; there is {known}") from None

    def new(self, key: NestedKey, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """Memory for what this transform makes of a key; those behind it read it here."""
        slot = Slot(torch.zeros((self.num_envs, *shape), dtype=dtype, device=CPU), self.batch_size)
        self.slots[as_key(key)] = slot
        return slot

    def put(self, key: NestedKey, tensor: torch.Tensor) -> None:
        """What is already there in another form: a view of it, ``[num_envs, *shape]``."""
        self.slots[as_key(key)] = Slot(tensor, self.batch_size)

    def drop(self, key: NestedKey) -> Slot:
        return self.slots.pop(as_key(key))


class Driver(Protocol):
    """The env with the transforms before one, for that one to step by itself."""

    #: Whether there are no transforms before.
    is_first: bool
    reward_key: Key

    def act(self, actions: Any) -> None:
        """The actions of the next ``step``: a TensorDict."""
        ...

    def step(self, env_ids: list[int]) -> bool:
        """Step, besides the steps of whoever collects; whether an episode ended."""
        ...

    def reset(self, env_ids: list[int]) -> None: ...

    def again(self, env_ids: Sequence[int] | None) -> None:
        """Repeat the step that is under way: what ends is what ends by this one."""
        ...


class Stage(Protocol):
    """A transform bound to rows."""

    def step(self, env_ids: Sequence[int] | None) -> Sequence[int] | None:
        """These envs (None: all) have stepped. Returns those whose episode ends by it, besides those that have."""
        ...

    def reset(self, env_ids: Sequence[int]) -> None:
        """These envs have been reset."""
        ...


class Stateless:
    """A stage that has no memory: one function for a step and for a reset, which runs over all envs."""

    def __init__(self, *functions: Any) -> None:
        self._functions = functions
        if len(functions) == 1:
            self._only = functions[0]
            self.step = self._step_one  # type: ignore[method-assign]

    def _step_one(self, env_ids: Sequence[int] | None) -> None:
        self._only()

    def run(self) -> None:
        for function in self._functions:
            function()

    def step(self, env_ids: Sequence[int] | None) -> None:
        self.run()

    def reset(self, env_ids: Sequence[int]) -> None:
        self.step(None)


#: The stage of a transform that is done with when it is bound.
NOTHING = Stateless()


Apply = Callable[[torch.Tensor], torch.Tensor]


class Transform:
    """Changes what an env gives (``in_keys`` to ``out_keys``) or is given (``in_keys_inv`` to ``out_keys_inv``).

    The short way to write one is ``_apply_transform``, from the value of all envs to another one; its shape and dtype
    are found by calling it once:

    >>> class Halve(Transform):
    ...     def _apply_transform(self, value):
    ...         return value / 2
    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), Halve(in_keys=["observation"], out_keys=["half"]))
    >>> step = env.rollout(3)
    >>> bool((step["half"] == step["observation"] / 2).all())
    True
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | NestedKey | None = None,
        out_keys: Sequence[NestedKey] | NestedKey | None = None,
        in_keys_inv: Sequence[NestedKey] | NestedKey | None = None,
        out_keys_inv: Sequence[NestedKey] | NestedKey | None = None,
    ) -> None:
        self.in_keys = key_list(in_keys)
        self.out_keys = key_list(in_keys if out_keys is None else out_keys)
        self.in_keys_inv = key_list(in_keys_inv)
        self.out_keys_inv = key_list(in_keys_inv if out_keys_inv is None else out_keys_inv)
        for mine, theirs, names in (
            (self.in_keys, self.out_keys, "in_keys and out_keys"),
            (self.in_keys_inv, self.out_keys_inv, "in_keys_inv and out_keys_inv"),
        ):
            if len(mine) != len(theirs) and self._keys_are_pairs:
                raise ValueError(f"{type(self).__name__}: {names} differ in length: {mine} and {theirs}")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        theirs = [name for name in _TORCHRLS_WAYS if name in cls.__dict__]
        if theirs and not _says_by_itself(cls):
            raise TypeError(
                f"{cls.__name__}: a transform of swath has no {theirs[0]}, so nobody would call it; write "
                "_apply_transform(self, value) (of actions: _inv_apply_transform), or transform_specs and bind "
                "(docs/transforms.md)"
            )

    #: Whether each of ``in_keys`` becomes one of ``out_keys``.
    _keys_are_pairs = True
    #: Whether what it does to an env's data depends on that env's data alone.
    is_by_env = True
    #: Whether it steps the env; ``rows.driver`` is for it then.
    drives = False
    #: Whether it takes steps of the env again, also one that ended an episode.
    repeats_steps = False
    #: The env that it is a part of.
    container: Any = None

    @property
    def parent(self) -> Any:
        """That env with the transforms before this one only."""
        return None if self.container is None else self.container.env_before(self)

    def _change(self, name: str, value: Any) -> None:
        """Something that it was given is another now: an env begins anew with it, if it can be."""
        before = self.__dict__.get(name)
        self.__dict__[name] = value
        if self.container is None:
            return
        try:
            self.container.refresh()
        except Exception:
            self.__dict__[name] = before
            self.container.remind()
            raise

    @property
    def primed_keys(self) -> Sequence[Key]:
        """Keys that it keeps as they are until a policy writes another value under "next"."""
        return ()

    @property
    def ends_episodes(self) -> bool:
        """Whether it may end one that the env would go on with."""
        return False

    # -- to be written by a subclass -------------------------------------------------------------------------------

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        """Another value for that of one key, ``[*batch_size, *shape]``."""
        raise NotImplementedError(f"{type(self).__name__} does not define _apply_transform")

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        """What the env is given for what was written as an action."""
        raise NotImplementedError(f"{type(self).__name__} does not define _inv_apply_transform")

    def transform_specs(self, specs: Specs) -> None:
        """Change the specs as the data will be changed; of actions, as who acts will see them."""
        self._require_something_to_do()
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            spec = specs.find(as_key(in_key), self)
            kind = specs.kind_of(as_key(in_key)) or "observation"
            specs.put(as_key(out_key), self._made_spec(spec), kind)
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            spec = self._made_action_spec(specs.find_action(as_key(in_key), self))
            if as_key(in_key) != as_key(out_key):
                del specs.action[in_key]
            specs.put(as_key(out_key), spec, "action")

    def _require_something_to_do(self) -> None:
        if not self.in_keys and not self.in_keys_inv and not _says_by_itself(type(self)):
            raise ValueError(
                f"{type(self).__name__} has no keys, so it would do nothing; give in_keys (of actions: in_keys_inv)"
            )

    def _made_spec(self, spec: Spec) -> Spec:
        made = self._apply_transform(spec.zero())
        self._require_tensor(made)
        return Unbounded(made.shape, made.dtype, spec.device)

    def _require_tensor(self, made: Any) -> None:
        if not isinstance(made, torch.Tensor):
            raise TypeError(f"{self}: what it makes of a value must be a tensor, got {type(made).__name__}")

    def _made_action_spec(self, spec: Spec) -> Spec:
        return spec

    def bind(self, rows: Rows) -> Stage:
        """This transform on rows; by default what ``_apply_transform`` says, in each step."""
        pairs = zip(self.in_keys, self.out_keys, strict=True)
        functions = [self._bound(rows, read, write, self._apply_transform) for read, write in pairs]
        return Stateless(*functions) if functions else NOTHING

    def bind_inverse(self, rows: Rows) -> Callable[[], Any] | None:
        """On the way to the env, as ``bind``: what is in ``rows`` are the actions. None where nothing is to be done."""
        pairs = zip(self.in_keys_inv, self.out_keys_inv, strict=True)
        functions = [self._bound(rows, read, write, self._inv_apply_transform) for write, read in pairs]
        return None if not functions else functions[0] if len(functions) == 1 else Stateless(*functions).run

    def _bound(self, rows: Rows, read_key: NestedKey, write_key: NestedKey, apply: Apply) -> Callable[[], Any]:
        read = rows[read_key]
        made = apply(read.row.clone())
        self._require_tensor(made)
        write = rows.new(write_key, made.shape[len(rows.batch_size) :], made.dtype)
        return self._writing(apply, read, write)

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        """What a step runs: ``apply`` from one memory to the other."""
        source, target = read.row, write.row
        shape, dtype = target.shape, target.dtype

        def run() -> None:
            made = apply(source)
            if made.shape != shape or made.dtype != dtype:  # copied, it would be repeated or rounded in silence
                raise EnvDataError(
                    f"{self} made a value of shape {tuple(made.shape)} and {made.dtype}; when it was first called, "
                    f"they were {tuple(shape)} and {dtype}"
                )
            target.copy_(made)

        return run

    def touched_keys(self) -> list[Key]:
        """The keys that are written or taken out; of what the env gives."""
        return [as_key(key) for key in self.out_keys]

    def is_like(self, other: Transform) -> bool:
        """Whether they differ at most in what ``side_by_side`` puts together."""
        return type(self) is type(other) and repr(self) == repr(other)

    def side_by_side(self, others: Sequence[Transform]) -> Transform:
        """One for all envs that does to each what one of these (the first is this one) does; they are alike."""
        return self

    # -- what is kept ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        require_empty(type(self).__name__, state_dict, strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Raise what ``load_state_dict`` would raise, and change nothing."""
        check_by_loading(self, state_dict, strict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no env yet."""
        return {name: value for name, value in self.__dict__.items() if name != "container"}

    def _check_batched_worker_compat(self) -> None:  # what TorchRL's SerialEnv and ParallelEnv ask first
        raise TypeError(
            "torchrl.envs.SerialEnv and ParallelEnv are for TorchRL's envs, and this TransformedEnv is of swath: write "
            "swath.envs.SerialEnv(num_workers, create_env_fn) or swath.envs.ParallelEnv(num_workers, create_env_fn)"
        )

    def __repr__(self) -> str:
        shown = list(self._shown)
        shown += ["in_keys", "out_keys"] if self.in_keys or self.out_keys else []
        shown += ["in_keys_inv", "out_keys_inv"] if self.in_keys_inv or self.out_keys_inv else []
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in shown)})"

    #: Further attributes in which two of them can differ.
    _shown: Sequence[str] = ()


def _says_by_itself(kind: type[Transform]) -> bool:
    """Whether it is written the long way."""
    ways = ("transform_specs", "bind", "bind_inverse")
    return any(getattr(kind, name) is not getattr(Transform, name) for name in ways)


#: How TorchRL's transforms do it, which nobody would call here.
_TORCHRLS_WAYS = (
    "_call",
    "_inv_call",
    "_reset",
    "_step",
    "forward",
    *[f"transform_{kind}_spec" for kind in ("action", "done", "input", "observation", "output", "reward", "state")],
)


def key_list(keys: Sequence[NestedKey] | NestedKey | None) -> list[NestedKey]:
    if keys is None:
        return []
    if isinstance(keys, (str, tuple)):  # a tuple is one nested key
        return [as_key(keys) if isinstance(keys, tuple) else keys]
    return list(keys)


class Compose(Transform):
    """Transforms one after the other; a list of them, by index.

    >>> from swath.envs import RewardSum, StepCounter
    >>> Compose(StepCounter(), RewardSum())[0]
    StepCounter(max_steps=None)
    """

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self._transforms: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """All of them; to change them, ``append``, ``insert``, ``pop``, and assign to and delete indices."""
        return tuple(self._transforms)

    def append(self, transform: Any) -> None:
        self.insert(len(self._transforms), transform)

    def insert(self, index: int, transform: Any) -> None:
        self[index:index] = transform

    def pop(self, index: int = -1) -> Transform:
        taken = self._transforms[index]
        del self[index]
        return taken

    def __setitem__(self, index: int | slice, transform: Any) -> None:
        transform = as_transform(transform)
        given = list(transform) if isinstance(transform, Compose) else [transform]
        changed = list(self._transforms)
        if isinstance(index, slice):
            changed[index] = given
        else:
            index = range(len(changed))[index]
            changed[index : index + 1] = given
        self._become(changed)

    def __delitem__(self, index: int | slice) -> None:
        changed = list(self._transforms)
        del changed[index]
        self._become(changed)

    def _become(self, transforms: list[Transform]) -> None:
        """Of an env: if it can be with these."""
        before, self._transforms = self._transforms, transforms
        if self.container is None:
            return
        try:
            self.container.refresh()
        except Exception:
            self._transforms = before
            leave(transforms, before)
            self.container.remind()
            raise
        leave(before, transforms)

    def __getattr__(self, name: str) -> Any:
        # Scripts say env.transform.loc where there is one transform only.
        own = self.__dict__.get("_transforms", ())
        if name.startswith("_") or len(own) != 1:
            raise AttributeError(f"Compose of {len(own)} transforms has no attribute {name!r}")
        return getattr(own[0], name)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): transform.state_dict() for i, transform in enumerate(self._transforms)}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Each by its index; one that is not there has an empty state."""
        for transform, state in self._each_with(state_dict, strict):
            transform.load_state_dict(state, strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        for transform, state in self._each_with(state_dict, strict):
            transform.check_state_dict(state, strict)

    def _each_with(self, state_dict: Any, strict: bool) -> Iterator[tuple[Transform, Any]]:
        names = [str(i) for i in range(len(self._transforms))]
        if not isinstance(state_dict, Mapping) or (strict and not set(state_dict) <= set(names)):
            raise mismatch("Compose", state_dict, f"the states of {len(names)} transforms, by their numbers")
        return ((each, state_dict.get(name, {})) for each, name in zip(self._transforms, names, strict=True))

    def __len__(self) -> int:
        return len(self._transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self._transforms)

    def __getitem__(self, index: int | slice) -> Any:
        return Compose(*self._transforms[index]) if isinstance(index, slice) else self._transforms[index]

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._transforms))})"


def leave(before: Iterable[Transform], now: Iterable[Transform]) -> None:
    """Those that are not among the others any more are part of no env."""
    for transform in before:
        if not any(transform is other for other in now):
            transform.container = None


def as_transform(thing: Any) -> Transform:
    if isinstance(thing, Transform):
        return thing
    instead = getattr(thing, "instead_of_env", None)
    if isinstance(instead, str):
        raise TypeError(f"{type(thing).__name__} is for batches of steps, and an env gives one: write {instead}")
    from swath.envs.transforms.foreign import as_own_transform

    return as_own_transform(thing)

"""Transform: what is done to an env's data between its step and whoever reads it.

A transform says what it makes of the specs, and is then bound to rows: memory of one entry per env for each key, always
the same, so that a step only runs functions whose arguments were found once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from swath.envs.transforms.rows import NOTHING, Rows, Slot, Stage, Stateless
from swath.envs.transforms.specs import Specs
from swath.errors import EnvDataError
from swath.keys import Key, as_key
from swath.specs import NestedKey, Spec, Unbounded
from swath.states import Stateful

Keys = Sequence[NestedKey] | NestedKey | None
Apply = Callable[[torch.Tensor], torch.Tensor]


class Transform(Stateful):
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
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
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
        if self._needs_keys and not self.in_keys and not self.in_keys_inv:
            raise ValueError(f"{type(self).__name__}: give in_keys or in_keys_inv")

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
    #: Whether it cannot be made without keys, of observations or of actions.
    _needs_keys = False
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

    @property
    def _pairs(self) -> Iterator[tuple[NestedKey, NestedKey]]:
        """What is read, and what is written of it."""
        return zip(self.in_keys, self.out_keys, strict=True)

    @property
    def _inverse_pairs(self) -> Iterator[tuple[NestedKey, NestedKey]]:
        """What the env is given, and what who acts writes."""
        return zip(self.in_keys_inv, self.out_keys_inv, strict=True)

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
        for in_key, out_key in self._pairs:
            spec = specs.find(as_key(in_key), self)
            kind = specs.kind_of(as_key(in_key)) or "observation"
            specs.put(as_key(out_key), self._made_spec(spec), kind)
        for in_key, out_key in self._inverse_pairs:
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
        functions = [self._bound(rows, read, write, self._apply_transform) for read, write in self._pairs]
        return Stateless(*functions) if functions else NOTHING

    def bind_inverse(self, rows: Rows) -> Callable[[], Any] | None:
        """On the way to the env, as ``bind``: what is in ``rows`` are the actions. None where nothing is to be done."""
        functions = [self._bound(rows, read, write, self._inv_apply_transform) for write, read in self._inverse_pairs]
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


def key_list(keys: Keys) -> list[NestedKey]:
    if keys is None:
        return []
    if isinstance(keys, (str, tuple)):  # a tuple is one nested key
        return [as_key(keys) if isinstance(keys, tuple) else keys]
    return list(keys)

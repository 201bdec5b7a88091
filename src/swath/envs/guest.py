"""GuestEnv: an env that is written for TorchRL, as one of ours. It is known by what it can do, not by its type.

The guest keeps its own TensorDicts: it is given the root that it gave, with the action, and steps, resets and counts by
itself. What it gives is copied into the rows of a strip, key by key.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from tensordict import TensorDictBase

from swath.envs.base import EnvBase
from swath.envs.known import import_extra
from swath.errors import EnvDataError, EnvError
from swath.keys import Key, as_key, show
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import CPU, Field, Layout
from swath.rollout.strip import Column, Strip
from swath.rollout.structure import Objects, Structure
from swath.specs import Categorical, Composite, OneHot, Spec, Unbounded

#: The methods and properties that make a guest of an env's class.
PROTOCOL = (
    "reset",
    "step_and_maybe_reset",
    "fake_tensordict",
    "full_action_spec",
    "action_keys",
    "done_keys",
    "reset_keys",
    "set_seed",
    "close",
)


def is_guest(env: Any) -> bool:
    """Whether this is an env of TorchRL, or of a library that follows it."""
    return not isinstance(env, (EnvBase, type)) and all(hasattr(type(env), name) for name in PROTOCOL)


class GuestSpec(Spec):
    """A leaf of the guest's action spec, which draws by itself."""

    def __init__(self, whole: Any, field: Field, structure: Structure, batch_size: torch.Size) -> None:
        super().__init__((*batch_size, *field.shape), field.dtype, field.device)
        self._whole = whole
        self._key = field.key
        self._structure = structure
        self._lead = len(batch_size)
        self._own_shape = self.shape

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        added = self.shape[: len(self.shape) - len(self._own_shape)]
        size = torch.Size([*shape, *added])
        drawn = self._whole.rand(size)
        return self._structure.flatten(drawn, Objects(), len(size) + self._lead)[self._key]


@dataclass(frozen=True)
class _Keys:
    """What a guest reads and gives, as fields."""

    structure: Structure
    carried: tuple[Field, ...]
    actions: tuple[Field, ...]
    outcomes: tuple[Field, ...]
    #: Those of the carried keys that say that something is over.
    flags: frozenset[Key]
    #: Those that end an episode, as the guest calls them: its own where it has such, else those of any group of agents.
    ends: tuple[Key, ...]
    #: Carried keys that a step does not give.
    root_only: frozenset[Key]

    @classmethod
    def of(cls, guest: Any) -> _Keys:
        lead = len(guest.batch_size)
        fake = guest.fake_tensordict()
        structure = Structure.of(fake, _ragged_keys(guest))
        root = structure.flatten(fake.exclude("next"), Objects(), lead)
        after = structure.flatten(fake.get("next"), Objects(), lead)
        action_keys, done_keys = (set(map(as_key, keys)) for keys in (guest.action_keys, guest.done_keys))

        def is_one_of(key: Key, keys: set[Key]) -> bool:
            return _without_numbers(key, structure) in keys

        def fields(leaves: Mapping[Key, torch.Tensor], wanted: Callable[[Key], bool]) -> tuple[Field, ...]:
            device = guest.device or CPU
            return tuple(
                Field(key, leaf.shape[lead:], leaf.dtype, device) for key, leaf in leaves.items() if wanted(key)
            )

        carried = fields(root, lambda key: not is_one_of(key, action_keys))
        own_flags = [key for key in done_keys if len(key) == 1]
        return cls(
            structure=structure,
            carried=carried,
            actions=fields(root, lambda key: is_one_of(key, action_keys)),
            outcomes=fields(after, lambda key: key not in root),
            flags=frozenset(field.key for field in carried if is_one_of(field.key, done_keys)),
            ends=tuple(sorted(own_flags or done_keys)),
            root_only=frozenset(field.key for field in carried if field.key not in after),
        )


def _action_spec(whole: Any, field: Field, structure: Structure, batch_size: torch.Size) -> Spec:
    """One of ours where there is one like it, which knows masks; else the guest's own."""
    leaf = None if structure.stacks else whole[field.key]
    kind = {"OneHot": OneHot, "Categorical": Categorical}.get(type(leaf).__name__)
    if leaf is not None and kind is not None and getattr(leaf, "n", 0) > 0:
        return kind(int(leaf.n), leaf.shape, leaf.dtype)
    return GuestSpec(whole, field, structure, batch_size)


class GuestEnv(EnvBase):
    """A guest with the specs and rows of an env of ours; ``guest`` is the env itself.

    Attributes that are not its own are the guest's: ``env.transform``, say. Collectors make one of any env of TorchRL;
    to make it yourself is for ``lower=False``: step it as it is, whatever is known of it (docs/torchrl.md).
    """

    awaiting_reset = ()
    has_fillers = False
    #: Whether TorchRL's own ``step_and_maybe_reset`` may be gone without (``envs/quick_guest.py``).
    steps_quickly = True

    def __init__(self, guest: Any, lower: bool = True) -> None:
        self.guest = guest
        self._may_lower = lower
        self._plan = "not stepped yet"
        super().__init__(batch_size=guest.batch_size, device=guest.device)
        self.objects = Objects()
        #: What the guest was last given or gave: the root of its next step.
        self.root: TensorDictBase | None = None
        self.read_specs()

    def read_specs(self) -> None:
        """Learn the guest's keys; again, after it got another transform."""
        self.keys = keys = _Keys.of(self.guest)
        #: The env on rows, and what tells whether it still is what the guest says.
        self._lowered: Any = None
        self._watch: Any = None
        self._was_reset = False
        #: Inputs of the guest that a reset does not give: a transform may write them in a step, where nobody else does.
        self.written_by_steps: set[Key] = set()
        action_spec = self.guest.full_action_spec

        def composite(leaves: Iterable[tuple[Any, Spec]]) -> Composite:
            return Composite(dict(leaves), shape=self.batch_size, device=self.device)

        def any_value(fields: Iterable[Field]) -> Composite:
            sizes = [(field, (*self.batch_size, *field.shape)) for field in fields]
            return composite((field.key, Unbounded(size, field.dtype, field.device)) for field, size in sizes)

        self.full_specs = {
            "observation": any_value(keys.carried),
            "state": composite(()),
            "action": composite(
                (f.key, _action_spec(action_spec, f, keys.structure, self.batch_size)) for f in keys.actions
            ),
            "reward": any_value(keys.outcomes),
            "done": composite(()),  # flags are data like any other
        }

    def row_layout(self) -> Layout:
        keys = self.keys
        return Layout(
            batch_size=self.batch_size,
            carried=keys.carried,
            outputs=keys.actions,
            outcomes=keys.outcomes,
            has_flags=False,
            root_only=keys.root_only,
            always_next=keys.flags,
            primable=frozenset(field.key for field in keys.carried) - keys.flags,
            structure=None if keys.structure.is_plain else keys.structure,
        )

    def bind(self, strip: Strip) -> Stepper:
        """Its own envs on rows, where that gives the same; ``plan()`` says what was done."""
        stepper = self._bind_lowered(strip)
        return GuestStepper(self, strip) if stepper is None else LoweredStepper(self, strip, stepper)

    def _bind_lowered(self, strip: Strip) -> Any:
        from swath.envs.lowering import bind_lowered, lowered
        from swath.envs.recognising import NotLowered

        try:
            if not self._may_lower:
                raise NotLowered("lower=False")
            is_new = self._lowered is None or self._watch.has_changed()
            if is_new:
                self._lowered, self._watch = lowered(self.guest)
            own: Any = self._lowered
            stepper = bind_lowered(own, strip)
            if is_new:
                self._watch, self._was_reset = self._watch.again(), False
        except NotLowered as reason:
            self._plan = f"stepped as it is: {reason}"
            return None
        self._plan = f"lowered: {own.plan()}"
        return stepper

    def plan(self) -> str:
        return self._plan

    def append_transform(self, transform: Any) -> Any:
        """One of ours works on what the guest gives; others are the guest's own business."""
        from swath.envs.transforms.base import Transform

        if isinstance(transform, Transform):
            return super().append_transform(transform)
        changed = self.guest.append_transform(transform)
        if changed is not self.guest:
            return GuestEnv(changed, self._may_lower)
        self.read_specs()
        return self

    def transformed(self, transform: Any) -> GuestEnv:
        """The guest with a transform of its own library around it; the guest itself stays as it is."""
        envs = import_extra("torchrl.envs", "torchrl", f"a transform of TorchRL around {self}")
        return GuestEnv(envs.TransformedEnv(self.guest, transform), self._may_lower)

    def complete_policy(self, policy: Any) -> None:
        """Exploration modules that were made without a spec get the action's."""
        for module in getattr(policy, "modules", list)():
            if module.__dict__.get("_spec", ()) is None:
                module._spec = self.guest.full_action_spec

    def register_collector(self, collector: Any) -> None:
        """Transforms may want to know."""
        if callable(getattr(type(self.guest), "register_collector", None)):
            self.guest.register_collector(collector)

    def limit_episodes(self, max_steps: int) -> bool:
        """As its own library does it: with a transform, which counts the steps of each group of agents."""
        envs = import_extra("torchrl.envs", "torchrl", f"max_frames_per_traj for {self}")
        self.guest = envs.TransformedEnv(self.guest, envs.StepCounter(max_steps=max_steps))
        self.read_specs()
        return True

    # -- the guest's own API -------------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.guest.reset(tensordict, **kwargs)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.guest.step(tensordict)

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.guest.step_mdp(tensordict)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        return self.guest.step_and_maybe_reset(tensordict)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.guest.maybe_reset(tensordict)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        return self.guest.rand_action(tensordict)

    def rollout(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self.guest.rollout(*args, **kwargs)

    def fake_tensordict(self) -> Any:
        return self.guest.fake_tensordict()

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        with torch.random.fork_rng(devices=[]):  # it may seed torch as a whole, which is the user's
            return self.guest.set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.guest.state_dict()))  # statistics go on changing

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.guest.load_state_dict(copy.deepcopy(dict(state_dict)), strict=strict)

    def to(self, device: torch.device | str) -> Self:
        self.guest = self.guest.to(device)
        self.device = torch.device(device)
        self.root = None
        self.read_specs()
        return self

    def add_truncated_keys(self) -> Self:
        add = getattr(self.guest, "add_truncated_keys", None)
        if add is None:
            raise EnvError(f"{self}: it has no truncated key, and no way to get one")
        self.guest = add()
        self.read_specs()
        return self

    def _close(self) -> None:
        if not getattr(self.guest, "is_closed", False):
            self.guest.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "guest" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.guest, name)

    def __repr__(self) -> str:
        return f"GuestEnv({type(self.guest).__name__}, batch_size={tuple(self.batch_size)}, device={self.device})"


class LoweredStepper:
    """A guest's own envs on rows, for as long as its objects stay what they were when that was decided."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: GuestEnv, strip: Strip, stepper: Any) -> None:
        self._env = env
        self._strip = strip
        self._stepper = stepper
        self._watch = env._watch
        self._has_changed = False
        self._in_batch = False
        self._expects_resets = False

    def expect_resets(self) -> None:
        """Whoever steps will always reset the envs that are done."""
        self._expects_resets = True
        if hasattr(self._stepper, "expect_resets"):
            self._stepper.expect_resets()

    def prepare(self) -> None:
        """Before a batch: its user may have changed something."""
        if self._watch is not None:
            self._has_changed = self._watch.has_changed()
        self._stepper.prepare()
        self._in_batch = True

    def settle(self) -> None:
        """After a batch: its user may use it."""
        self._in_batch = False
        if hasattr(self._stepper, "settle"):
            self._stepper.settle()

    def _change(self, row: int) -> None:
        """Lower it as it is now, or step it as it is; from where it stands, which ``row`` says."""
        env = self._env
        self._has_changed = False
        if hasattr(self._stepper, "settle"):
            self._stepper.settle()
        self._stepper = env._bind_lowered(self._strip)
        self._watch = env._watch
        if self._stepper is None:
            self._watch = None
            self._stepper = GuestStepper(env, self._strip)
        if self._in_batch or self._watch is None:
            self._stepper.prepare()
        if self._expects_resets:
            self.expect_resets()
        self._stepper.resume(row)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        if self._has_changed:
            self._change(t)
        return self._stepper.step(t, env_ids)

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        if self._has_changed:
            self._change(row)
        self._stepper.reset(row, env_ids, **kwargs)
        if self._watch is not None and not self._env._was_reset:
            self._env._was_reset = True
            self._watch = self._env._watch = self._watch.again()


class GuestStepper:
    """A guest on the rows of a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: GuestEnv, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._num_envs = strip.num_envs
        own = {field.key for field in env.keys.carried}
        self._carried = [(key, column) for key, column in strip.carried.items() if key in own]
        # All that the policy writes: transforms may read more than the action.
        self._outputs = list(strip.outputs.items())
        self._overridden = [(key, strip.carried[key]) for key in strip.layout.overridden if key in own]
        self._written = [*self._outputs, *self._overridden]
        self._primed = [(("next", *key), strip.carried[key]) for key in strip.layout.primed if key in own]
        self._root_only = env.keys.root_only
        self._structure = env.keys.structure
        self._is_plain = not (self._structure.stacks or self._structure.classes or self._structure.has_objects)
        self._says_terminated = ("terminated",) in env.keys.ends
        self._is_flat = self._is_plain and all(len(key) == 1 for key in (*own, *strip.outputs, *strip.outcomes))
        self._quick_steps: Any = None
        self._quick: Any = None
        #: Envs that the guest has reset by itself, after its last step.
        self._reset_already: list[int] = []

    def prepare(self) -> None:
        """Before a batch: its user may have changed something."""
        if self._is_flat and self._env.steps_quickly:
            if self._quick_steps is None:
                from swath.envs.quick_guest import QuickSteps

                self._quick_steps = QuickSteps(self._env.guest, self._strip)
            self._quick = self._quick_steps.find()

    def resume(self, row: int) -> None:
        """Go on from a row that was written without the guest."""
        env = self._env
        leaves = {key: column.rows[row].clone() for key, column in self._carried}
        env.root = self._structure.build(leaves, env.batch_size, device=env.device)

    def _values(self, data: TensorDictBase) -> Any:
        """Key by key, what a TensorDict of the guest has."""
        if self._is_plain:
            plain: Any = data
            return lambda key: plain.get(key, None)
        leaves = self._structure.flatten(data, self._env.objects, len(self._env.batch_size))
        return leaves.get

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        env = self._env
        due = env_ids if kwargs else [env_id for env_id in env_ids if env_id not in self._reset_already]
        if due:
            if env.root is None and len(due) < self._num_envs:
                self.resume(row)
            env.root = self._reset(due, kwargs)
        self._reset_already = []
        root: Any = env.root
        value_of = self._values(root)
        for key, column in self._carried:
            value = value_of(key)
            if value is None and key in self._root_only:
                env.written_by_steps.add(key)
                column.tensor[row, env_ids] = 0
                continue
            if value is None or column.rows[row].shape != value.shape or column.field.dtype != value.dtype:
                self._refuse(key, value, column, "a reset")
            if len(env_ids) == self._num_envs:
                column.rows[row].copy_(value)
            else:
                column.tensor[row, env_ids] = value.reshape(column.tensor.shape[1:])[env_ids]

    def _reset(self, env_ids: list[int], kwargs: dict[str, Any]) -> TensorDictBase:
        env = self._env
        if env.root is None or len(env_ids) == self._num_envs:
            return env.guest.reset(**kwargs)
        request = env.root.copy()
        chosen = torch.zeros(self._num_envs, dtype=torch.bool, device=env.device)
        chosen[env_ids] = True
        for group, reset_key in zip(env.guest.done_keys_groups, env.guest.reset_keys, strict=True):
            like = request.get(group[0])
            mask = chosen.view(*env.batch_size, *[1] * (like.ndim - len(env.batch_size)))
            request.set(reset_key, mask.expand_as(like).clone())
        return env.guest.reset(request, **kwargs)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        env, strip = self._env, self._strip
        if env_ids is not None and len(env_ids) < self._num_envs:
            raise EnvError(f"{env} is stepped as a whole; {len(env_ids)} of its {self._num_envs} envs were to step")
        if env.root is None:  # the first reset was made on rows
            self.resume(t)
        root: Any = env.root
        self._write_outputs(root, t)
        for key, column in self._primed:
            root.set(key, column.rows[t + 1].clone())
        quick = None if self._quick is None else self._quick(root)
        if quick is not None:
            values, env.root = quick
            return self._take_flat(t, values)
        stepped, env.root = env.guest.step_and_maybe_reset(root)
        after = stepped.get("next")
        value_of = self._values(after)
        following = self._values(env.root) if self._root_only else None
        for key, column in self._carried:
            if key in env.written_by_steps:
                self._take_written(t, key, stepped.get(key, None), column)
                continue
            value = value_of(key) if following is None or key not in self._root_only else following(key)
            if value is None or column.rows[t + 1].shape != value.shape or column.field.dtype != value.dtype:
                self._refuse(key, value, column, f"step {t}")
            column.rows[t + 1].copy_(value)
        for key, column in strip.outcomes.items():
            column.rows[t].copy_(value_of(key))
        flags = [after.get(key) for key in env.keys.ends]
        return self._ended(flags, after.get("terminated") if self._says_terminated else None, t)

    def _take_written(self, t: int, key: Key, value: Any, column: Column) -> None:
        """What a step has put beside the action; zeros, as in TorchRL, where it has not."""
        column.rows[t + 1].zero_()
        if value is None:
            return
        if self._strip.num_steps == 1:  # others have read this row already
            raise EnvError(
                f"{type(self._env.guest).__name__}: a step writes {show(key)} beside the action; it is delivered only "
                "where TorchRL's env is given to a Collector or MultiCollector as it is, with two steps or more in a "
                "batch; put the transform that writes it into a torchrl.envs.Compose, to do without"
            )
        column.rows[t].copy_(value)

    def _take_flat(self, t: int, values: dict[str, Any]) -> list[int] | None:
        """Write what a quick step gave."""
        for key, column in self._carried:
            value = values.get(key[0])
            row = column.rows[t + 1]
            if value is None or row.shape != value.shape or row.dtype != value.dtype:
                self._refuse(key, value, column, f"step {t}")
            row.copy_(value)
        for key, column in self._strip.outcomes.items():
            column.rows[t].copy_(values[key[0]])
        flags = [values[key[0]] for key in self._env.keys.ends]
        if self._num_envs == 1 and not any(map(bool, flags)):
            return None
        return self._ended(flags, values["terminated"] if self._says_terminated else None, t)

    def _write_outputs(self, root: TensorDictBase, t: int) -> None:
        # Copies: an env may keep what it is given, or change it.
        written = self._written
        if self._is_flat:
            for key, column in written:
                root._set_str(key[0], column.rows[t].clone(), validated=True, inplace=False, non_blocking=False)
            return
        if self._is_plain:
            for key, column in written:
                root.set(key, column.rows[t].clone())
            return
        env = self._env
        leaves = {key: column.rows[t].clone() for key, column in written}
        root.update(self._structure.build(leaves, env.batch_size, device=env.device))

    def _ended(self, flags: Sequence[torch.Tensor], terminated: torch.Tensor | None, t: int) -> list[int] | None:
        """The envs of which any flag is set, which the guest has reset."""
        over = None
        for flag in flags:
            flag = flag.reshape(self._num_envs, -1)
            flag = flag[:, 0] if flag.shape[1] == 1 else flag.any(1)
            over = flag if over is None else over | flag
        assert over is not None
        if not bool(over.any()):
            return None
        self._reset_already = over.nonzero().reshape(-1).tolist()
        # For those who look there for episodes that are over; not delivered.
        strip, ended = self._strip, over.cpu().numpy()
        strip.terminated[t] = ended if terminated is None else terminated.cpu().numpy().reshape(-1)
        strip.truncated[t] = ended & ~strip.terminated[t]
        return self._reset_already

    def _refuse(self, key: Key, value: torch.Tensor | None, column: Column, where: str) -> NoReturn:
        if value is None:
            raise EnvDataError(
                f"{type(self._env.guest).__name__}: {where} gives no {show(key)}, which was in its specs when the "
                "collector was made"
            )
        raise EnvDataError(
            f"{type(self._env.guest).__name__}: {show(key)} after {where} has shape {tuple(value.shape)} and dtype "
            f"{value.dtype}; its specs say {(*self._env.batch_size, *column.field.shape)} and {column.field.dtype}"
        )


def _ragged_keys(guest: Any) -> frozenset[Key]:
    """Keys whose spec leaves a dimension open."""
    if not getattr(guest, "_has_dynamic_specs", False):
        return frozenset()
    specs = [guest.full_observation_spec, guest.full_state_spec]
    return frozenset(as_key(key) for spec in specs for key, leaf in spec.items(True, True) if -1 in leaf.shape)


def _without_numbers(key: Key, structure: Structure) -> Key:
    """A flat key as the guest writes it: without the numbers of a stack's members."""
    name: list[str] = []
    path: list[str] = []
    for part in key:
        if tuple(path) not in structure.stacks:
            name.append(part)
        path.append(part)
    return tuple(name)

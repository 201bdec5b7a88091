"""EnvBase: what an env is, with the TensorDict API that users call.

An env is written in one of two ways, and each gives the other:

- ``_reset(tensordict)`` and ``_step(tensordict)`` on TensorDicts, the short way; ``bind`` then runs them on rows;
- ``RowEnv.bind_rows(strip)``, the fast way, on rows of memory (``envs/rows.py``); the two methods then come for free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.playing import play
from swath.envs.step import check_step_input, complete_flags, hold_others, next_root, require_as_specified, stack_steps
from swath.errors import EnvClosed, EnvDataError
from swath.hints import ExplainsGuesses
from swath.keys import Key, as_key
from swath.rollout.layout import CPU, Field, Layout
from swath.specs import Categorical, Composite, NestedKey, OneHot, Spec, Unbounded, masked_rand
from swath.states import Stateful

if TYPE_CHECKING:
    from swath.envs.transforms.env import TransformedEnv
    from swath.rollout.boundaries import Stepper
    from swath.rollout.strip import Strip
    from swath.workers.pool import WorkerPool

FLAGS = ("done", "terminated", "truncated")


def next_seed(seed: int) -> int:
    """The seed for the env after the one that got ``seed``.

    >>> next_seed(0)
    795726461
    """
    return int.from_bytes(np.random.default_rng(seed).bytes(8), byteorder="big") % (2**32 - 1)


def _full_spec(kind: str) -> Any:
    """A property: all that an env has of a kind."""
    return property(lambda self: self.full_specs[kind], lambda self, spec: self._set_spec(kind, spec))


def _spec_of_one(kind: str) -> Any:
    """The same where there are several; else that one."""
    return property(lambda self: self._get_spec(kind), lambda self, spec: self._set_spec(kind, spec))


class EnvBase(Stateful, ExplainsGuesses):
    """An environment with TensorDicts in and out.

    A subclass sets ``observation_spec`` and ``action_spec`` (and, where they differ from one float and three flags,
    ``reward_spec`` and ``done_spec``) and writes ``_reset`` and ``_step``. All shapes start with ``batch_size``.

    >>> class Count(EnvBase):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.observation_spec = Composite(observation=Unbounded((1,)))
    ...         self.action_spec = Unbounded((1,))
    ...     def _reset(self, tensordict):
    ...         self.count = torch.zeros(1)
    ...         return TensorDict(observation=self.count.clone())
    ...     def _step(self, tensordict):
    ...         self.count += 1
    ...         return TensorDict(observation=self.count.clone(), reward=torch.ones(1), terminated=self.count >= 3)
    >>> Count().rollout(10)["next", "observation"].squeeze(-1)
    tensor([1., 2., 3.])
    """

    _inner = (
        *("at_each", "layout_around", "action_leaves", "casts_are_settled", "complete_policy", "crew"),
        *("declared_casts", "env_before", "first_index", "first_rows_told", "full_specs", "gym_envs"),
        *("has_fillers", "has_steps_of_its_own", "info_leaves", "is_given_actions_only", "limit_episodes", "plan"),
        *("num_busy_processes", "objects", "observation_leaves", "pending_seeds", "pipeline", "steps_stay_in_episodes"),
        *("reads_roots", "refresh", "remind", "row_layout", "shows_first_rows", "single_step", "stepped_by"),
        *("worker_pools",),
    )

    batch_locked = True
    #: What error messages call the first env of this batch; a worker's envs are counted over all workers.
    first_index = 0
    #: Whether some envs of a batch can be reset while the others go on.
    resets_single_envs = True
    #: Whether a step after an episode's end, before a reset, is one of the same episode, or an error; else of another.
    steps_stay_in_episodes = True
    #: Whether transforms over all envs see, beside those that were reset, what the others' episodes began with.
    shows_first_rows = True
    #: Memory by key, ``[num_envs, *shape]``, in which somebody else wants to find that.
    first_rows_told: Mapping[Key, Any] = {}
    #: Whether a step is given the row that it starts from; Gymnasium's envs know where they are.
    reads_roots = True
    #: Whether nothing else that a policy writes reaches it.
    is_given_actions_only = False
    #: Whether some of its steps are none (``envs/vector.py``).
    has_fillers: Any = False
    #: How many processes step it, beside this one; and, if they are its workers, those.
    num_busy_processes = 0
    worker_pools: Sequence[WorkerPool] = ()
    #: Who stepped it last, as a mark of a collector's own; None for whoever calls ``reset`` or ``step``.
    stepped_by: object | None = None
    #: What its steps give that is no tensor of a fixed shape, by number (``rollout/structure.py``).
    objects: Any = None
    _has_dynamic_specs = False

    def __init__(self, *, batch_size: Sequence[int] | int = (), device: torch.device | str | None = None) -> None:
        self.batch_size = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
        self.device = None if device is None else torch.device(device)
        self.is_closed = False
        self.full_specs = {
            "observation": Composite(shape=self.batch_size, device=self.device),
            "action": Composite(shape=self.batch_size, device=self.device),
            "state": Composite(shape=self.batch_size, device=self.device),
        }
        self.reward_spec = Unbounded((*self.batch_size, 1), device=self.device)
        self.done_spec = Composite(
            {flag: self._flag_spec() for flag in FLAGS}, shape=self.batch_size, device=self.device
        )

    # -- to be written by a subclass ---------------------------------------------------------------------------

    # (With *args, which nobody gives, a type checker lets a subclass leave out **kwargs, as most do.)
    def _reset(self, tensordict: TensorDictBase | None, *args: Any, **kwargs: Any) -> TensorDictBase:
        """First observations; ``tensordict["_reset"]``, where there, says which envs of a batch to reset."""
        raise NotImplementedError(f"{type(self).__name__} does not define _reset")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What follows ``tensordict["action"]``: observations, reward, and flags."""
        raise NotImplementedError(f"{type(self).__name__} does not define _step")

    def _set_seed(self, seed: int) -> None:
        """Seed this env's randomness; called by ``set_seed``."""

    def bind(self, strip: Strip) -> Stepper:
        """This env as a stepper on a strip's rows (the fast way; see ``envs/rows.py``)."""
        from swath.envs.rows import TensorDictStepper

        return TensorDictStepper(self, strip)

    def plan(self) -> str:
        """How it is stepped, in words."""
        return f"{type(self).__name__}, stepped as it is written"

    def append_transform(self, transform: Any) -> TransformedEnv:
        """This env with its data changed by ``transform``.

        >>> from swath.envs import GymEnv, StepCounter
        >>> env = GymEnv("CartPole-v1").append_transform(StepCounter(max_steps=3))
        >>> env.rollout(10)["step_count"].squeeze(-1)
        tensor([0, 1, 2])
        """
        from swath.envs.transforms.env import TransformedEnv

        return TransformedEnv(self, transform)

    # -- specs ---------------------------------------------------------------------------------------------------

    def _flag_spec(self) -> Categorical:
        return Categorical(2, (*self.batch_size, 1), torch.bool, self.device)

    def _get_spec(self, kind: str) -> Any:
        full = self.full_specs[kind]
        leaves = full.keys(True, True)
        return full[leaves[0]] if len(leaves) == 1 else full

    def _set_spec(self, kind: str, spec: Any) -> None:
        if not isinstance(spec, Composite):
            spec = Composite({kind: spec}, shape=self.batch_size, device=self.device)
        for key, leaf in spec.items(True, True):
            if leaf.shape[: len(self.batch_size)] != self.batch_size:
                raise ValueError(
                    f"{type(self).__name__}: the {kind} spec of {key!r} has shape {tuple(leaf.shape)}, which does not "
                    f"start with the env's batch size {tuple(self.batch_size)}"
                )
        spec.shape = self.batch_size
        self.full_specs[kind] = spec

    full_observation_spec = observation_spec = _full_spec("observation")
    full_state_spec = state_spec = _full_spec("state")
    full_action_spec, action_spec = _full_spec("action"), _spec_of_one("action")
    full_reward_spec, reward_spec = _full_spec("reward"), _spec_of_one("reward")

    @property
    def done_spec(self) -> Any:
        return self.full_specs["done"]

    @done_spec.setter
    def done_spec(self, spec: Any) -> None:
        if not isinstance(spec, Composite):
            spec = Composite(done=spec, shape=self.batch_size, device=self.device)
        if unknown := [key for key in spec.keys(True, True) if key not in FLAGS]:
            raise ValueError(
                f"{type(self).__name__}: done_spec has {unknown[0]!r}; an env has one episode per row, with the "
                f"flags {', '.join(FLAGS)}"
            )
        for flag in ("done", "terminated"):
            if flag not in spec:
                spec[flag] = self._flag_spec()
        self._set_spec("done", spec)

    full_done_spec = done_spec

    def complete_policy(self, policy: Any) -> None:
        """Give a policy what it left to be learned from the env."""

    def limit_episodes(self, max_steps: int) -> bool:
        """Truncate episodes after so many steps; False: not by itself, whoever steps it has to."""
        return False

    def add_truncated_keys(self) -> Self:
        """Give this env a ``truncated`` flag, which collectors may set."""
        self.done_spec["truncated"] = self._flag_spec()
        return self

    @property
    def input_spec(self) -> Composite:
        state, action = self.full_state_spec, self.full_action_spec
        return Composite(full_state_spec=state, full_action_spec=action, shape=self.batch_size)

    @property
    def output_spec(self) -> Composite:
        return Composite(
            full_observation_spec=self.full_observation_spec,
            full_reward_spec=self.full_reward_spec,
            full_done_spec=self.full_done_spec,
            shape=self.batch_size,
        )

    @property
    def specs(self) -> Composite:
        return Composite(output_spec=self.output_spec, input_spec=self.input_spec, shape=self.batch_size)

    # -- sizes ---------------------------------------------------------------------------------------------------

    shape = property(lambda self: self.batch_size)
    ndim = batch_dims = property(lambda self: len(self.batch_size))

    def ndimension(self) -> int:
        return len(self.batch_size)

    def numel(self) -> int:
        """How many envs it is: 1 of one without a batch size."""
        return self.batch_size.numel()

    # -- key lists -----------------------------------------------------------------------------------------------

    def _leaves(self, kind: str) -> list[NestedKey]:
        return self.full_specs[kind].keys(True, True)

    observation_keys = property(lambda self: self._leaves("observation"))
    action_keys = property(lambda self: self._leaves("action"))
    reward_keys = property(lambda self: self._leaves("reward"))
    state_keys = property(lambda self: self._leaves("state"))
    done_keys = property(lambda self: self._leaves("done"))
    done_keys_groups = property(lambda self: [self.done_keys])
    reset_keys = property(lambda self: ["_reset"])

    def _only(self, kind: str) -> NestedKey:
        keys = self._leaves(kind)
        if len(keys) != 1:
            raise KeyError(f"{type(self).__name__} has {len(keys)} {kind} keys, {keys}; use {kind}_keys")
        return keys[0]

    action_key = property(lambda self: self._only("action"))
    reward_key = property(lambda self: self._only("reward"))
    done_key = property(lambda self: "done")

    # -- the layout that the rollout works with ------------------------------------------------------------------

    def row_layout(self) -> Layout:
        """Keys, shapes and dtypes of one env's entries."""

        def fields(kind: str) -> tuple[Field, ...]:
            lead = len(self.batch_size)
            leaves: list[tuple[NestedKey, Spec]] = self.full_specs[kind].items(True, True)
            return tuple(
                Field(as_key(key), leaf.shape[lead:], leaf.dtype, leaf.device or self.device or CPU)
                for key, leaf in leaves
            )

        return Layout(
            batch_size=self.batch_size,
            carried=(*fields("observation"), *fields("state")),
            outputs=fields("action"),
            outcomes=fields("reward"),
            has_truncated="truncated" in self.done_spec,
        )

    # -- the TensorDict API --------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Start new episodes: all, or those that a bool ``_reset`` entry (shaped like ``done``) marks."""
        self._assert_open()
        self.stepped_by = None
        mask = None if tensordict is None else tensordict.get("_reset", None)
        fresh = self._reset(tensordict, **kwargs)
        if not isinstance(fresh, TensorDictBase):
            raise EnvDataError(f"{type(self).__name__}._reset returned {type(fresh).__name__}, not a TensorDict")
        out = TensorDict({}, batch_size=self.batch_size, device=self.device)
        out.update(fresh)
        complete_flags(out, self.done_spec, fresh=True, who=type(self).__name__)
        self._check(out, ("observation", "done"), "_reset")
        if mask is None or tensordict is None:
            return out
        merged = tensordict.exclude("_reset", "next")
        rows = mask.reshape(self.batch_size)
        for key in out.keys(True, True):
            old = merged.get(key, None)
            value = out.get(key)
            if old is not None and old.shape == value.shape:
                where = rows.reshape((*rows.shape, *[1] * (value.ndim - rows.ndim)))
                value = torch.where(where, value, old)
            merged.set(key, value)
        return merged

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take ``tensordict``'s action; the same TensorDict comes back with ``next``.

        A bool entry ``_step`` says which envs of a batch to step; the others stay where they are.
        """
        self._assert_open()
        self.stepped_by = None
        check_step_input(self, tensordict)
        outcome = self._step(tensordict)
        if not isinstance(outcome, TensorDictBase):
            raise EnvDataError(f"{type(self).__name__}._step returned {type(outcome).__name__}, not a TensorDict")
        out = TensorDict({}, batch_size=tensordict.batch_size, device=self.device)
        earlier = tensordict.get("next", None)
        if earlier is not None:
            out.update(earlier)
        out.update(outcome)
        for key, spec in self.full_reward_spec.items(True, True):
            reward = out.get(key, None)
            if reward is not None and reward.shape != spec.shape and reward.numel() == spec.shape.numel():
                out.set(key, reward.reshape(spec.shape))
        complete_flags(out, self.done_spec, fresh=False, who=type(self).__name__)
        self._check(out, ("observation", "reward", "done"), "_step")
        only = tensordict.get("_step", None)
        if only is not None:
            hold_others(out, tensordict, only.reshape(tensordict.batch_size))
        tensordict.set("next", out)
        return tensordict

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The root of the following step."""
        return next_root(tensordict, self.reward_keys, self.done_keys)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step; then the root of the following step, in which the envs that are done have been reset."""
        tensordict = self.step(tensordict)
        return tensordict, self.maybe_reset(self.step_mdp(tensordict))

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset those envs of a root whose ``done`` is set."""
        done = tensordict.get("done")
        if not bool(done.any()):
            return tensordict
        return self.reset(tensordict.set("_reset", done.clone()))

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a random action; where ``tensordict`` has an ``action_mask``, one that it allows."""
        if tensordict is None:
            tensordict = TensorDict({}, batch_size=self.batch_size, device=self.device)
        drawn = self.full_action_spec.rand()
        mask = tensordict.get("action_mask", None)
        if mask is not None and isinstance(self.action_spec, (OneHot, Categorical)):
            drawn = drawn.set(self.action_key, masked_rand(self.action_spec, mask))
        return tensordict.update(drawn)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with a random action."""
        return self.step(self.rand_action(tensordict))

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        """Seed this env from its next reset on; returns the seed for the next env (or the same, if static)."""
        if seed is None:
            return None
        self._set_seed(int(seed))
        return seed if static_seed else next_seed(int(seed))

    def fake_tensordict(self) -> TensorDict:
        """Zeros with every key, shape and dtype of a step."""
        fake = TensorDict({}, batch_size=self.batch_size, device=self.device)
        outcome = fake.clone()
        for kind in ("observation", "state", "action", "done"):
            fake.update(self.full_specs[kind].zero())
        for kind in ("observation", "state", "reward", "done"):
            outcome.update(self.full_specs[kind].zero())
        return fake.set("next", outcome)

    def rollout(
        self,
        max_steps: int,
        policy: Callable | None = None,
        callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
        *,
        auto_reset: bool = True,
        auto_cast_to_device: bool = False,
        break_when_any_done: bool = True,
        break_when_all_done: bool = False,
        return_contiguous: bool = True,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        trust_policy: bool = False,
        storing_device: torch.device | str | None = None,
    ) -> TensorDictBase:
        """Up to ``max_steps`` steps as one TensorDict ``[*batch_size, steps]``.

        Convenient rather than fast: to collect data, use a ``Collector``.
        """
        if break_when_any_done and break_when_all_done:
            raise TypeError("rollout: break_when_any_done and break_when_all_done cannot both be True")
        if not auto_reset and tensordict is None:
            raise RuntimeError("rollout: auto_reset=False needs a tensordict to start from")
        if set_truncated and "truncated" not in self.done_spec:
            raise RuntimeError("rollout: set_truncated needs a truncated key; call env.add_truncated_keys()")
        from swath.rollout.policies import tensordict_callable

        act = self.rand_action if policy is None else tensordict_callable(policy, self, trust_policy)
        policy_device = next((p.device for p in getattr(policy, "parameters", lambda: ())()), None)
        root = self.reset(tensordict) if auto_reset else tensordict
        assert root is not None
        until = "any done" if break_when_any_done else "all done" if break_when_all_done else None
        steps = play(self, act, root, max_steps, until, callback, policy_device if auto_cast_to_device else None)
        result = stack_steps(steps, self.batch_size, storing_device, dense=return_contiguous)
        if set_truncated:
            last = result.get("next")[..., -1]
            last.set_("truncated", torch.ones_like(last.get("truncated")))
            last.set_("done", last.get("truncated") | last.get("terminated"))
        return result if out is None else out.update_(result)

    # -- TorchRL's own containers, which step TorchRL's envs only --------------------------------------------------

    @property
    def _inplace_update(self) -> bool:
        return False

    @_inplace_update.setter
    def _inplace_update(self, value: bool) -> None:  # the first thing that TorchRL's TransformedEnv does to an env
        raise TypeError(
            f"torchrl.envs.TransformedEnv is for TorchRL's envs, and {type(self).__name__} is of swath: write "
            "swath.envs.TransformedEnv(env, transform), or env.append_transform(transform), with the transforms of "
            "swath.envs. For a transform that only TorchRL has, let TorchRL make the env: "
            "torchrl.envs.TransformedEnv(torchrl.envs.GymEnv(...), transform), which swath's collectors take as it is"
        )

    @property
    def _supports_set_state(self) -> bool:  # what TorchRL's SerialEnv and ParallelEnv ask of an env that was made
        raise TypeError(
            f"torchrl.envs.SerialEnv and ParallelEnv are for TorchRL's envs, and {type(self).__name__} is of swath: "
            "write swath.envs.SerialEnv(num_workers, create_env_fn) or swath.envs.ParallelEnv(num_workers, "
            "create_env_fn)"
        )

    # -- life cycle ----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Self:
        """Move this env's specs and outputs."""
        self.device = torch.device(device)
        self.full_specs = {kind: spec.to(self.device) for kind, spec in self.full_specs.items()}
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Free what the env holds."""
        if self.is_closed:
            if raise_if_closed:
                raise EnvClosed(f"{type(self).__name__} is closed already")
            return
        self.is_closed = True
        self._close()

    def _close(self) -> None:
        """Free what the env holds; called once."""

    def _assert_open(self) -> None:
        if self.is_closed:
            raise EnvClosed(f"{type(self).__name__} was closed; make a new one")
        for pool in self.worker_pools:
            pool.require_owner()

    def _check(self, data: TensorDictBase, kinds: Sequence[str], where: str) -> None:
        for kind in kinds:
            require_as_specified(
                data, self.full_specs[kind], len(self.batch_size), f"{type(self).__name__}.{where}: {kind}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={tuple(self.batch_size)}, device={self.device})"

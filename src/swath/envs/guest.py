"""GuestEnv: an env that is written for TorchRL, as one of ours. It is known by what it can do, not by its type.

The guest keeps its own TensorDicts: it is given the root that it gave, with the action, and steps, resets and counts by
itself. What it gives is copied into the rows of a strip, key by key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from swath.envs.base import EnvBase
from swath.envs.guest_keys import GuestKeys, action_spec_of
from swath.envs.guest_lowering import LoweredStepper, Lowering
from swath.envs.guest_stepper import GuestStepper
from swath.envs.known import import_extra
from swath.envs.torchrl_internals import give_spec
from swath.errors import EnvError
from swath.hints import wrapped
from swath.keys import Key
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Field, Layout
from swath.rollout.strip import Strip
from swath.rollout.structure import Objects
from swath.specs import Composite, Spec, Unbounded

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
        #: Its own envs on rows, where that gives the same.
        self.lowering = Lowering(lower)
        super().__init__(batch_size=guest.batch_size, device=guest.device)
        self.objects = Objects()
        #: What the guest was last given or gave: the root of its next step.
        self.root: TensorDictBase | None = None
        self.read_specs()

    def read_specs(self) -> None:
        """Learn the guest's keys; again, after it got another transform."""
        self.keys = keys = GuestKeys.of(self.guest)
        self.lowering.forget()
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
                (f.key, action_spec_of(action_spec, f, keys.structure, self.batch_size)) for f in keys.actions
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
        stepper = self.lowering.bind(self.guest, strip)
        return GuestStepper(self, strip) if stepper is None else LoweredStepper(self, strip, stepper)

    def plan(self) -> str:
        return self.lowering.plan

    def append_transform(self, transform: Any) -> Any:
        """One of ours works on what the guest gives; others are the guest's own business."""
        from swath.envs.transforms.base import Transform

        if isinstance(transform, Transform):
            return super().append_transform(transform)
        changed = self.guest.append_transform(transform)
        if changed is not self.guest:
            return GuestEnv(changed, self.lowering.is_allowed)
        self.read_specs()
        return self

    def transformed(self, transform: Any) -> GuestEnv:
        """The guest with a transform of its own library around it; the guest itself stays as it is."""
        envs = import_extra("torchrl.envs", "torchrl", f"a transform of TorchRL around {self}")
        return GuestEnv(envs.TransformedEnv(self.guest, transform), self.lowering.is_allowed)

    def complete_policy(self, policy: Any) -> None:
        """Exploration modules that were made without a spec get the action's."""
        for module in getattr(policy, "modules", list)():
            give_spec(module, self.guest.full_action_spec)

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
        return getattr(wrapped(self, "guest", name), name)

    def __repr__(self) -> str:
        return f"GuestEnv({type(self.guest).__name__}, batch_size={tuple(self.batch_size)}, device={self.device})"

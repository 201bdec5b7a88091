"""Layout: which keys there are, and what one env's entry of each looks like.

Three kinds of keys differ in where they stand in a delivered transition:

=========  =====================================  =======================  =================
kind       examples                               root                     next
=========  =====================================  =======================  =================
carried    observations, recurrent state          before the step          after the step
output     action, log-probability, value         written by the policy    -
outcome    reward                                 -                        written by the env
=========  =====================================  =======================  =================

Episode flags (done, terminated, truncated) are not fields: every layout has them, unless its env has others, which
are carried keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from swath.keys import Key

if TYPE_CHECKING:
    from swath.rollout.structure import Structure

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Field:
    """One key: the shape and dtype of a single env's entry."""

    key: Key
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device = CPU

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """All keys of a rollout; ``batch_size`` is the env's, ``num_envs`` its product."""

    batch_size: torch.Size
    carried: tuple[Field, ...]
    outputs: tuple[Field, ...]
    outcomes: tuple[Field, ...]
    has_truncated: bool = True
    #: The carried keys that the policy writes (under "next"); zero at an episode's start.
    policy_state: frozenset[Key] = field(default_factory=frozenset)
    #: Whether done, terminated and truncated are delivered.
    has_flags: bool = True
    #: Carried keys of which only the root is delivered.
    root_only: frozenset[Key] = field(default_factory=frozenset)
    #: Carried keys that are delivered under "next" also where observations are not (``compact_obs``).
    always_next: frozenset[Key] = field(default_factory=frozenset)
    #: Carried keys of the env that a policy may write under "next", before the env steps; and those that it writes.
    primable: frozenset[Key] = field(default_factory=frozenset)
    primed: frozenset[Key] = field(default_factory=frozenset)
    #: Carried keys of the env that the policy writes at the root, for the env to read.
    overridden: frozenset[Key] = field(default_factory=frozenset)
    #: What the keys are besides leaves of nested TensorDicts; None for no more than that.
    structure: Structure | None = None

    @property
    def written_by_policy(self) -> frozenset[Key]:
        """The carried keys that the policy writes under "next"."""
        return self.policy_state | self.primed

    @property
    def flags(self) -> tuple[str, ...]:
        """Those that are delivered."""
        if not self.has_flags:
            return ()
        return ("done", "terminated", "truncated") if self.has_truncated else ("done", "terminated")

    def has_next(self, key: Key, compact_obs: bool) -> bool:
        """Whether a carried key is delivered under "next"."""
        if key in self.root_only:
            return False
        return not compact_obs or key in self.policy_state or key in self.always_next

    @property
    def num_envs(self) -> int:
        return self.batch_size.numel()

    @property
    def bytes_per_step(self) -> int:
        fields = (*self.carried, *self.outputs, *self.outcomes)
        return self.num_envs * sum(f.num_bytes for f in fields)

    def in_main_memory(self) -> Layout:
        """The same as rows are written, and as other processes can see them."""

        def moved(fields: tuple[Field, ...]) -> tuple[Field, ...]:
            return tuple(replace(field, device=CPU) for field in fields)

        return replace(self, carried=moved(self.carried), outputs=moved(self.outputs), outcomes=moved(self.outcomes))

    def with_policy(
        self,
        outputs: Iterable[Field],
        state: Iterable[Field],
        primed: Iterable[Key] = (),
        overridden: Iterable[Key] = (),
    ) -> Layout:
        """This env layout with what a policy writes added."""
        state = tuple(state)
        return replace(
            self,
            outputs=tuple(outputs),
            carried=(*self.carried, *state),
            policy_state=frozenset(f.key for f in state),
            primed=frozenset(primed),
            overridden=frozenset(overridden),
        )

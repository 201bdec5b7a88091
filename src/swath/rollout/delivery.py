"""Delivery: a time-major strip turned into the env-major batch ``[*batch_size, T]`` that consumers own.

The copy that turns it is the only one a frame makes. It goes into memory that nobody else has, so what is delivered
never changes later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from swath.keys import Key, nested
from swath.rollout.boundaries import Boundaries
from swath.rollout.layout import CPU, Field, Layout
from swath.rollout.recycling import MIN_BYTES, RecycledMemory
from swath.rollout.strip import Column, Strip

TRAJ_IDS: Key = ("collector", "traj_ids")
FLAG = torch.Size([1])


@dataclass(frozen=True)
class Stamps:
    """What is written besides the layout's own keys."""

    traj_ids: bool = True
    step_count: bool = False
    policy_version: bool = False
    compact_obs: bool = False


def batch_fields(layout: Layout, stamps: Stamps, device: torch.device | None) -> list[Field]:
    """Every leaf of a delivered batch, with the device that it is delivered on."""

    def at(prefix: Key, fields: tuple[Field, ...]) -> list[Field]:
        return [Field((*prefix, *f.key), f.shape, f.dtype, device or f.device) for f in fields]

    after = tuple(f for f in layout.carried if layout.has_next(f.key, stamps.compact_obs))
    flags = tuple(Field((name,), FLAG, torch.bool, CPU) for name in layout.flags)
    extra: list[Field] = []
    if stamps.step_count:
        extra.append(Field(("step_count",), FLAG, torch.int64, CPU))
    if stamps.policy_version:
        extra.append(Field(("policy_version",), torch.Size(), torch.int64, CPU))
    fields = at((), (*layout.carried, *layout.outputs, *flags, *extra))
    fields += at(("next",), (*after, *layout.outcomes, *flags, *extra))
    if stamps.traj_ids:
        fields += at((), (Field(TRAJ_IDS, torch.Size(), torch.int64, CPU),))
    return fields


class Batch:
    """Env-major memory for a batch, filled strip by strip."""

    #: See ``RaggedBatch``: here no frame is ever dropped.
    cuts: Sequence[tuple[int, int]] = ()

    def __init__(self, layout: Layout, stamps: Stamps, device: torch.device | None) -> None:
        self.layout = layout
        self.stamps = stamps
        self.device = device
        self.fields = batch_fields(layout, stamps, device)
        self.leaves: Mapping[Key, torch.Tensor] = {}
        self.num_steps = -1
        self.filled = 0
        self._memory = RecycledMemory()
        self._reuses_memory = False
        #: With reused memory: the TensorDict that is delivered again and again.
        self._delivered: TensorDict | None = None

    def open(self, num_steps: int, reuse_memory: bool = False, into: Mapping[Key, torch.Tensor] | None = None) -> None:
        """Begin a batch, in memory that no consumer of an earlier one has. Or in given memory."""
        self.filled = 0
        if into is not None:
            self.leaves = into
        elif not (reuse_memory and num_steps == self.num_steps):
            self.leaves = {}
            self._delivered = None
        self.num_steps = num_steps
        self._reuses_memory = reuse_memory or into is not None

    def allocate(self) -> None:
        size = (self.layout.num_envs, self.num_steps)
        self.leaves = {f.key: self._memory.empty(size, f) for f in self.fields}

    def steps_missing(self) -> int:
        return self.num_steps - self.filled

    @property
    def is_empty(self) -> bool:
        return self.filled == 0

    @property
    def num_taken(self) -> int:
        """Steps that were taken for this batch so far."""
        return self.filled

    @property
    def num_committed(self) -> int:
        """Steps that are where they will be delivered from."""
        return self.filled

    def finish(self) -> int:
        """Complete a batch in given memory; how many steps it has."""
        return self.filled

    def write(self, strip: Strip, boundaries: Boundaries, num_steps: int, version: int) -> None:
        """Add the first ``num_steps`` steps of a strip."""
        parts = strip_parts(strip, boundaries, self.layout, self.stamps, num_steps, version)
        if num_steps == self.num_steps and not self._reuses_memory:
            # The whole batch is one strip.
            size = (self.layout.num_envs, num_steps)
            self.leaves = {f.key: parts[f.key].own(size, f, self._memory) for f in self.fields}
            self.filled = num_steps
            return
        if not self.leaves:
            self.allocate()
        at, self.filled = self.filled, self.filled + num_steps
        for key, part in parts.items():
            part.copy_into(self.leaves[key][:, at : self.filled])

    def close(self, num_envs: int | None = None) -> TensorDict:
        """What was written, as a TensorDict ``[*batch_size, steps]``; of the first ``num_envs`` only, where asked."""
        lead = self.layout.batch_size if num_envs is None else torch.Size([num_envs])
        steps = self.filled
        if not self.leaves:  # nothing was written
            self.allocate()
        if self._delivered is not None and steps == self.num_steps and num_envs is None:
            return self._delivered
        leaves = self.leaves
        if steps != self.num_steps or num_envs is not None:
            leaves = {key: leaf[: lead.numel(), :steps].contiguous() for key, leaf in leaves.items()}
        tree = nested({key: leaf.view(*lead, steps, *leaf.shape[2:]) for key, leaf in leaves.items()})
        names: Any = [None] * len(lead) + ["time"]
        batch = TensorDict(tree, batch_size=(*lead, steps), names=names, device=self.device)
        if self._reuses_memory and leaves is self.leaves:
            self._delivered = batch
        return batch


class Part(NamedTuple):
    """A leaf of a strip, ``[num_envs, num_steps, *shape]`` or, where all frames have the same value, a scalar."""

    values: torch.Tensor
    #: Whether the values lie in memory of their own already.
    is_new: bool = False
    #: Writes what belongs elsewhere than in the strip over a copy of the values.
    correct: Callable[[torch.Tensor], None] | None = None

    def copy_into(self, target: torch.Tensor) -> None:
        target.copy_(self.values)
        if self.correct is not None:
            self.correct(target)

    def own(self, size: tuple[int, int], field: Field, memory: RecycledMemory) -> torch.Tensor:
        """As contiguous memory ``[*size, *shape]`` that nothing else uses."""
        values = self.values
        if values.dim() == 0:
            return torch.full((*size, *field.shape), values.item(), dtype=field.dtype, device=field.device)
        if self.is_new and values.is_contiguous() and values.device == field.device:
            return values
        if values.nbytes < MIN_BYTES and values.device == field.device:
            return self._copy()  # in one call: what small batches live from
        target = memory.empty(size, field)
        self.copy_into(target)
        return target

    def _copy(self) -> torch.Tensor:
        values = self.values.clone(memory_format=torch.contiguous_format)
        if self.correct is not None:
            self.correct(values)
        return values

    def corrected(self) -> torch.Tensor:
        """The values, where they can be read as they are."""
        return self.values if self.correct is None else self._copy()


NO_FLAG = torch.zeros((), dtype=torch.bool)


def strip_parts(
    strip: Strip, boundaries: Boundaries, layout: Layout, stamps: Stamps, num_steps: int, version: int
) -> dict[Key, Part]:
    """Every leaf of the first ``num_steps`` steps."""
    parts: dict[Key, Part] = {}
    crossings = _Crossings(boundaries)
    for index, (key, column) in enumerate(strip.carried.items()):
        parts[key] = Part(column.tensor[:num_steps].transpose(0, 1))
        if layout.has_next(key, stamps.compact_obs):
            parts["next", *key] = crossings.next_of(column, index, num_steps)
    for key, column in strip.outputs.items():
        parts[key] = Part(column.tensor[:num_steps].transpose(0, 1))
    for key, column in strip.outcomes.items():
        parts["next", *key] = Part(column.tensor[:num_steps].transpose(0, 1))
    ends = {"terminated": strip.terminated[:num_steps].T, "truncated": strip.truncated[:num_steps].T}
    ends["done"] = ends["terminated"] | ends["truncated"]
    for name in layout.flags:
        # A root is never at an episode's end: an env that ended was reset.
        parts[name,] = Part(NO_FLAG)
        parts["next", name] = Part(torch.from_numpy(ends[name]).unsqueeze(-1), is_new=name == "done")
    if stamps.traj_ids or stamps.step_count:
        ids, first_rows = boundaries.ids_and_counts(num_steps)
        if stamps.traj_ids:
            parts[TRAJ_IDS] = Part(torch.from_numpy(ids), is_new=True)
        if stamps.step_count:
            count = torch.from_numpy(np.arange(num_steps) - first_rows).unsqueeze(-1)
            parts["step_count",] = Part(count, is_new=True)
            parts["next", "step_count"] = Part(count + 1, is_new=True)
    if stamps.policy_version:
        parts["policy_version",] = parts["next", "policy_version"] = Part(torch.tensor(version))
    return parts


class _Crossings:
    """The episode ends of a strip: where "next" is not what stands in the following root."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._entries = boundaries.last_entries
        self._steps = [t for t, env_ids, _ in boundaries.starts for _ in env_ids]
        self._envs = [env for _, env_ids, _ in boundaries.starts for env in env_ids]

    def next_of(self, column: Column, index: int, num_steps: int) -> Part:
        shifted = column.tensor[1 : num_steps + 1].transpose(0, 1)
        return Part(shifted, correct=partial(self._write_last, column, index) if self._steps else None)

    def _write_last(self, column: Column, index: int, after: torch.Tensor) -> None:
        """Where an episode ended, the last observation is next; in the strip stands the first of another one."""
        last: Any = [entry[index] for entry in self._entries]
        if column.array is None:
            after[self._envs, self._steps] = torch.cat(last).to(after.device)
        elif after.device.type == "cpu":
            after.numpy()[self._envs, self._steps] = np.concatenate(last)
        else:
            after[self._envs, self._steps] = torch.from_numpy(np.concatenate(last)).to(after.device)

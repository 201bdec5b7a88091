"""Delivery: a time-major strip turned into the env-major batch ``[*batch_size, T]`` that consumers own.

The copy that turns it is the only one a frame makes. It goes into new memory, so what is delivered never changes
later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from swath.rollout.boundaries import Boundaries
from swath.rollout.layout import CPU, Field, Key, Layout
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

    after = tuple(f for f in layout.carried if f.key in layout.policy_state or not stamps.compact_obs)
    flags = tuple(
        Field((name,), FLAG, torch.bool, CPU)
        for name in (("done", "terminated", "truncated") if layout.has_truncated else ("done", "terminated"))
    )
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

    def __init__(self, layout: Layout, stamps: Stamps, device: torch.device | None) -> None:
        self.layout = layout
        self.stamps = stamps
        self.device = device
        self.fields = batch_fields(layout, stamps, device)
        self.leaves: dict[Key, torch.Tensor] = {}
        self.num_steps = -1
        self.filled = 0

    def open(self, num_steps: int, reuse_memory: bool = False) -> None:
        """Begin a batch, in new memory: what was delivered before belongs to its consumer."""
        self.filled = 0
        if reuse_memory and num_steps == self.num_steps:
            return
        self.num_steps = num_steps
        num_envs = self.layout.num_envs
        self.leaves = {
            f.key: torch.empty((num_envs, num_steps, *f.shape), dtype=f.dtype, device=f.device) for f in self.fields
        }

    def steps_missing(self) -> int:
        return self.num_steps - self.filled

    def write(self, strip: Strip, boundaries: Boundaries, num_steps: int, version: int) -> None:
        """Add the first ``num_steps`` steps of a strip."""
        at, end = self.filled, self.filled + num_steps
        for key, value in strip_parts(strip, boundaries, self.layout, self.stamps, num_steps, version):
            self.leaves[key][:, at:end].copy_(value)
        self.filled = end

    def close(self, num_envs: int | None = None) -> TensorDict:
        """What was written, as a TensorDict ``[*batch_size, steps]``; of the first ``num_envs`` only, where asked."""
        lead = self.layout.batch_size if num_envs is None else torch.Size([num_envs])
        steps = self.filled
        tree: dict[str, Any] = {}
        for key, leaf in self.leaves.items():
            if steps != self.num_steps or num_envs is not None:
                leaf = leaf[: lead.numel(), :steps].contiguous()
            node = tree
            for part in key[:-1]:
                node = node.setdefault(part, {})
            node[key[-1]] = leaf.view(*lead, steps, *leaf.shape[2:])
        return as_batch(tree, torch.Size([*lead, steps]), self.device)


def as_batch(tree: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    """A tree of leaves as a TensorDict whose last dimension is named "time"."""
    names: Any = [None] * (len(batch_size) - 1) + ["time"]
    return TensorDict(tree, batch_size=batch_size, names=names, device=device)


def strip_parts(
    strip: Strip, boundaries: Boundaries, layout: Layout, stamps: Stamps, num_steps: int, version: int
) -> list[tuple[Key, torch.Tensor]]:
    """Every leaf of the first ``num_steps`` steps, as ``[num_envs, num_steps, *shape]`` (views where possible)."""
    parts: list[tuple[Key, torch.Tensor]] = []
    crossings = _Crossings(boundaries)
    for index, (key, column) in enumerate(strip.carried.items()):
        parts.append((key, column.tensor[:num_steps].transpose(0, 1)))
        if key in layout.policy_state or not stamps.compact_obs:
            parts.append((("next", *key), crossings.next_of(column, index, num_steps)))
    parts += [(key, c.tensor[:num_steps].transpose(0, 1)) for key, c in strip.outputs.items()]
    parts += [(("next", *key), c.tensor[:num_steps].transpose(0, 1)) for key, c in strip.outcomes.items()]
    terminated = torch.from_numpy(strip.terminated[:num_steps].T).unsqueeze(-1)
    truncated = torch.from_numpy(strip.truncated[:num_steps].T).unsqueeze(-1)
    flags = {"terminated": terminated, "done": terminated | truncated}
    if layout.has_truncated:
        flags["truncated"] = truncated
    no_flag = torch.zeros((), dtype=torch.bool)
    for name, flag in flags.items():
        # A root is never at an episode's end: an env that ended was reset.
        parts += [((name,), no_flag), (("next", name), flag)]
    if stamps.traj_ids or stamps.step_count:
        ids, first_rows = boundaries.ids_and_counts(num_steps)
        if stamps.traj_ids:
            parts.append((TRAJ_IDS, torch.from_numpy(ids)))
        if stamps.step_count:
            count = torch.from_numpy(np.arange(num_steps) - first_rows).unsqueeze(-1)
            parts += [(("step_count",), count), (("next", "step_count"), count + 1)]
    if stamps.policy_version:
        made_by = torch.tensor(version)
        parts += [(("policy_version",), made_by), (("next", "policy_version"), made_by)]
    return parts


class _Crossings:
    """The episode ends of a strip: where "next" is not what stands in the following root."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._entries = boundaries.last_entries
        self._steps = [t for t, env_ids, _ in boundaries.starts for _ in env_ids]
        self._envs = [env for _, env_ids, _ in boundaries.starts for env in env_ids]

    def next_of(self, column: Column, index: int, num_steps: int) -> torch.Tensor:
        shifted = column.tensor[1 : num_steps + 1].transpose(0, 1)
        if not self._steps:
            return shifted
        after = shifted.clone(memory_format=torch.contiguous_format)
        last = [entry[index] for entry in self._entries]
        if column.array is None:
            after[self._envs, self._steps] = torch.cat(last)  # type: ignore[arg-type]
        else:
            after.numpy()[self._envs, self._steps] = np.concatenate(last)  # type: ignore[arg-type]
        return after

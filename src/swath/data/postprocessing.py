"""What is made of what was collected, before anybody gets it: checks, ``postproc``, whole episodes.

``Postprocessing`` is what a collector was asked to do to its batches. Whoever writes frames to a replay buffer away
from the collector (a worker, a node) is sent a ``Processing`` and does it with a ``Processor`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.finite import require_finite
from swath.data.frames import as_rows
from swath.data.sequences import MASK
from swath.data.trajectories import TrajectoryAssembler, split_trajectories
from swath.keys import Key, leaves_of
from swath.rollout.layout import Field


def _truncated_keys(keys: Iterable[Key]) -> list[Key]:
    """The flags, of whichever groups there are, that say that an episode was cut."""
    return [key for key in keys if key[0] == "next" and key[-1] == "truncated"]


def _last_steps(batch: TensorDictBase) -> torch.Tensor:
    """Which frames are the last of their row."""
    mask = batch.get(MASK, None)  # of a batch that some workers did not complete
    if mask is not None:
        return mask & ~torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], -1)
    is_last = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
    is_last[..., -1] = True
    return is_last


def _last_frames(batch: TensorDictBase, env_of_frames: np.ndarray) -> torch.Tensor:
    """Which frames are the last of their env: its frames come in order, others may be between them."""
    is_last = np.zeros(len(env_of_frames), bool)
    _, from_the_end = np.unique(env_of_frames[::-1], return_index=True)
    is_last[len(env_of_frames) - 1 - from_the_end] = True
    return torch.from_numpy(is_last).reshape(batch.batch_size).to(batch.device)


@dataclass(frozen=True)
class Postprocessing:
    """What happens to a batch between the rollout and the consumer."""

    postproc: Callable[[TensorDictBase], Any] | None = None
    split_trajs: bool = False
    set_truncated: bool = False
    check_finite: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None

    def require_flags(self, fields: Iterable[Field]) -> None:
        """Of what will come: that there is something to mark."""
        if self.set_truncated and not _truncated_keys(field.key for field in fields):
            raise RuntimeError("set_truncated needs an env with a truncated key; call env.add_truncated_keys()")

    def move(self, device: torch.device | None) -> None:
        """A ``postproc`` with tensors of its own goes where batches are."""
        if device is not None and hasattr(self.postproc, "to"):
            self.postproc.to(device)  # type: ignore[union-attr]

    def check(self, batch: TensorDictBase, env_of_frames: np.ndarray | None = None) -> TensorDictBase:
        """Of a batch as it was collected: that its numbers are finite; and its last steps are marked, where asked.

        ``env_of_frames``: whose each frame is, where those of several envs lie behind one another.
        """
        if self.check_finite:
            require_finite(batch)
        if self.set_truncated and batch.batch_size.numel():
            is_last = _last_steps(batch) if env_of_frames is None else _last_frames(batch, env_of_frames)
            for key in _truncated_keys(key for key, _ in leaves_of(batch)):
                for flag in (key, (*key[:-1], "done")):
                    batch.get(flag)[is_last] = True
        return batch

    def apply(
        self, batch: TensorDictBase, restore: Callable[[TensorDictBase], TensorDictBase] = lambda batch: batch
    ) -> Any:
        if self.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        batch = restore(batch)
        if self.postproc is None:
            return batch
        processed = self.postproc(batch)
        if processed is None:
            raise TypeError("postproc returned None; it must return the batch, also if it changed it in place")
        return processed


@dataclass(frozen=True)
class Stored:
    """What a batch becomes: keys, and whether it keeps its shape, so that every env can have a track of its own."""

    fields: tuple[Field, ...]
    by_env: bool


@dataclass(frozen=True)
class Processing:
    """What is done to a batch before it is stored, by whoever collected it."""

    post: Postprocessing
    #: Only whole episodes are stored, up to so many at a time; 0: frames as they come.
    episodes_per_write: int

    @property
    def by_episode(self) -> bool:
        return self.episodes_per_write > 0

    @property
    def is_nothing(self) -> bool:
        post = self.post
        return not (self.by_episode or post.postproc or post.split_trajs or post.set_truncated or post.check_finite)

    def try_out(self, batch: TensorDictBase) -> Stored:
        """What comes of it, found out with a real batch, ``[*env_size, T]``."""
        example = batch.reshape(-1, batch.shape[-1])[0] if self.by_episode else batch
        made = self.post.apply(self.post.check(example))
        if not is_tensor_collection(made):
            raise TypeError(f"with a replay buffer, postproc must return a TensorDict; got {type(made).__name__}")
        by_env = made.shape == example.shape and not self.by_episode
        rows = as_rows(as_one_row(made))
        return Stored(tuple(Field(key, leaf.shape[2:], leaf.dtype) for key, leaf in rows.items()), by_env)


class Processor:
    """Does that to one batch after the other; an episode that is under way waits in here for its end."""

    def __init__(self, processing: Processing) -> None:
        self._post = processing.post
        self._assembler = (
            TrajectoryAssembler(1, "cat", processing.episodes_per_write) if processing.by_episode else None
        )

    def process(self, raw: TensorDictBase, fragments: Iterable[int] = ()) -> Iterator[Any]:
        """What is to be stored, now that this was collected: what it becomes, or the episodes that ended in it.

        ``fragments``: ids of trajectories that are not whole episodes.
        """
        raw = self._post.check(raw)
        if self._assembler is None:
            yield self._post.apply(raw)
            return
        self._assembler.fragments.update(fragments)
        self._assembler.add(raw)
        while (episode := self._assembler.pop()) is not None:
            yield self._post.apply(episode)

    def drop(self, traj_ids: Iterable[int] | None = None) -> None:
        """Episodes under way (all by default) will not go on."""
        if self._assembler is None:
            return
        if traj_ids is None:
            self._assembler.drop_all()
        else:
            self._assembler.drop(traj_ids)


def as_one_row(batch: TensorDictBase) -> TensorDictBase:
    """``[1, frames]``, without what only fills up."""
    mask: Any = batch.get(MASK, None)
    frames = batch.reshape(batch.batch_size.numel())  # not -1: of nothing, TensorDict makes one
    return (frames if mask is None else frames[mask.reshape(-1)]).unsqueeze(0)

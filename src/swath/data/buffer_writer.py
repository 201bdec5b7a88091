"""How batches get into a replay buffer, whoever collected them: a collector in its own process, or a node elsewhere.

(Worker processes write to the memory of a buffer's tracks by themselves: ``shared_track_writer.py``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDictBase

from swath.data.postprocessing import Processing, Processor, as_one_row
from swath.data.replay_buffer import ReplayBuffer
from swath.data.sequences import MASK, unnamed


class BufferWriter(Protocol):
    """Writes batches to a buffer."""

    @property
    def stores_frames(self) -> bool:
        """Whether it stores frames, as flat leaves of a fixed shape; else, whatever it is given."""
        ...

    def write(self, batch: Any, raw: TensorDictBase, first_env: int, parts: Sequence[TensorDictBase]) -> None:
        """Write a batch.

        ``raw`` is what was collected, ``[*envs, time]``, and ``batch`` what was made of it; ``first_env`` the number of
        its first env. ``parts``: the batch as each env, or batch of envs, made it.
        """
        ...

    def write_mixed(self, batch: TensorDictBase, env_index: np.ndarray) -> None:
        """Frames ``[n]`` of many envs, of each in order; ``env_index`` says whose."""
        ...

    def may_write(self) -> bool:
        """False: the learner is behind, and the collector has to wait."""
        ...

    def attach(self, source: Any) -> None:
        """Say who writes from now on."""
        ...


def buffer_writer(buffer: Any, num_envs: int, extend: bool = True, by_episode: bool = False) -> BufferWriter:
    """For batches of so many envs. ``extend=False``: a buffer that is not swath's gets step by step.

    ``by_episode``: batches are whole episodes, one behind the other, of whichever envs.
    """
    if isinstance(buffer, ReplayBuffer) or callable(getattr(buffer, "write_rows", None)):  # one in Ray
        return FrameWriter(buffer, num_envs, by_episode)
    if not callable(getattr(buffer, "extend", None)):
        raise TypeError(f"replay_buffer must have extend(), like those of swath.data; got {type(buffer).__name__}")
    return ExtendWriter(buffer, extend)


class FrameWriter:
    """Into a buffer of swath: frames, each env's behind its earlier ones."""

    stores_frames = True

    def __init__(self, buffer: ReplayBuffer, num_envs: int, by_episode: bool = False) -> None:
        self.buffer = buffer
        self._num_envs = num_envs
        #: What is collected and what is written have one shape then, and yet no env's frames.
        self._by_episode = by_episode
        #: Whether envs have tracks of their own; known when there is a batch.
        self._by_env: bool | None = None

    def write(self, batch: Any, raw: TensorDictBase, first_env: int, parts: Sequence[TensorDictBase]) -> None:
        if not isinstance(batch, TensorDictBase):
            self.buffer.extend(batch)
            return
        if not batch.batch_size.numel():
            return
        has_mask = batch.get(MASK, None) is not None
        by_env = batch.shape == raw.shape and not has_mask and not self._by_episode
        if self._prepare(by_env) and by_env:
            self.buffer.write_rows(unnamed(batch).reshape(-1, batch.shape[-1]), first_env)
            return
        row = as_one_row(unnamed(batch))
        is_of_one = raw.batch_size.numel() == raw.shape[-1]
        if not has_mask and not is_of_one and isinstance(self.buffer, ReplayBuffer):
            self.buffer.require_ids(row[0])
        is_of_one = self._by_env and is_of_one
        self.buffer.write_rows(row, first_env if is_of_one else None)

    def write_mixed(self, batch: TensorDictBase, env_index: np.ndarray) -> None:
        self._prepare(True)
        self.buffer.write_mixed(unnamed(batch), env_index)

    def _prepare(self, by_env: bool) -> bool:
        if self._by_env is None:
            self._by_env = by_env
            self.buffer.prepare_tracks(self._num_envs if by_env else 1)
        return self._by_env

    def may_write(self) -> bool:
        return self.buffer.may_write()

    def attach(self, source: Any) -> None:
        self.buffer.attach(source)


class ExtendWriter:
    """Into anything that has ``extend``, such as a buffer of TorchRL: batches as its own collectors would give them."""

    stores_frames = False

    def __init__(self, buffer: Any, extend: bool = True) -> None:
        self._buffer = buffer
        self._extend = extend

    def write(self, batch: Any, raw: TensorDictBase, first_env: int, parts: Sequence[TensorDictBase]) -> None:
        for part in parts:
            if isinstance(part, TensorDictBase) and not part.batch_size.numel():
                continue
            if self._extend:
                self._buffer.extend(part)
            else:
                for step in part.unbind(-1):
                    self._buffer.add(step)

    def write_mixed(self, batch: TensorDictBase, env_index: np.ndarray) -> None:
        if batch.batch_size.numel():
            self.write(batch, batch, 0, [batch])

    def may_write(self) -> bool:
        return True

    def attach(self, source: Any) -> None: ...


@dataclass(frozen=True)
class BufferPlan:
    """How somebody away from the collector, a node, writes to a replay buffer by itself."""

    buffer: Any
    first_env: int
    #: Of all that write to this buffer.
    num_envs: int
    processing: Processing


class OwnWriter:
    """Makes of batches what is to be stored, and writes it, where they are collected."""

    def __init__(self, plan: BufferPlan) -> None:
        self._first_env = plan.first_env
        self._processor = Processor(plan.processing)
        self._writer = buffer_writer(plan.buffer, plan.num_envs, by_episode=plan.processing.by_episode)

    def write(self, raw: TensorDictBase, first_env: int, fragments: Sequence[int]) -> None:
        """A batch whose first env is the ``first_env``-th of here; ``fragments``: see ``Processor.process``."""
        for made in self._processor.process(raw, fragments):
            self._writer.write(made, raw, self._first_env + first_env, [made])

    def drop(self) -> None:
        """Episodes under way will not go on."""
        self._processor.drop()

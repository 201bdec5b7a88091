"""Sinks: how batches get into a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDictBase

from swath.data.replay_buffer import ReplayBuffer

_MASK = ("collector", "mask")


class Sink(Protocol):
    """Where batches go."""

    def put(self, batch: Any, raw: TensorDictBase, first_env: int, parts: Sequence[TensorDictBase]) -> None:
        """Write a batch.

        ``raw`` is what was collected, ``[*envs, time]``, and ``batch`` what was made of it; ``first_env`` the number of
        its first env. ``parts``: the batch as each env, or batch of envs, made it.
        """
        ...

    def may_write(self) -> bool:
        """False: the learner is behind, and the collector has to wait."""
        ...

    def attach(self, source: Any) -> None:
        """Say who writes from now on."""
        ...


class BufferSink:
    """Into a buffer of swath: frames, each env's behind its earlier ones."""

    def __init__(self, buffer: ReplayBuffer, num_envs: int) -> None:
        self.buffer = buffer
        self._num_envs = num_envs
        #: Whether envs have tracks of their own; known when there is a batch.
        self._by_env: bool | None = None

    def put(self, batch: Any, raw: TensorDictBase, first_env: int, parts: Sequence[TensorDictBase]) -> None:
        if not isinstance(batch, TensorDictBase):
            self.buffer.extend(batch)
            return
        if not batch.batch_size.numel():
            return
        mask = batch.get(_MASK, None)
        by_env = batch.shape == raw.shape and mask is None
        if self._prepare(by_env) and by_env:
            self.buffer.write_rows(_unnamed(batch).reshape(-1, batch.shape[-1]), first_env)
            return
        flat = _unnamed(batch).reshape(-1)
        if mask is not None:
            flat = flat[mask.reshape(-1)]
        is_of_one = raw.batch_size.numel() == raw.shape[-1]
        if mask is None and not is_of_one and isinstance(self.buffer, ReplayBuffer):
            self.buffer.require_ids(flat)
        is_of_one = self._by_env and is_of_one
        self.buffer.write_rows(flat.unsqueeze(0), first_env if is_of_one else None)

    def put_mixed(self, batch: TensorDictBase, env_index: np.ndarray) -> None:
        """Frames ``[n]`` of many envs, of each in order; ``env_index`` says whose."""
        self._prepare(True)
        self.buffer.write_mixed(_unnamed(batch), env_index)

    def _prepare(self, by_env: bool) -> bool:
        if self._by_env is None:
            self._by_env = by_env
            self.buffer.prepare_tracks(self._num_envs if by_env else 1)
        return self._by_env

    def may_write(self) -> bool:
        return self.buffer.may_write()

    def attach(self, source: Any) -> None:
        self.buffer.attach(source)


class ExtendSink:
    """Into anything that has ``extend``, such as a buffer of TorchRL: batches as its own collectors would give them."""

    def __init__(self, buffer: Any, extend: bool = True) -> None:
        self._buffer = buffer
        self._extend = extend

    def put(self, batch: Any, raw: TensorDictBase, first_env: int, parts: Sequence[TensorDictBase]) -> None:
        for part in parts:
            if isinstance(part, TensorDictBase) and not part.batch_size.numel():
                continue
            if self._extend:
                self._buffer.extend(part)
            else:
                for step in part.unbind(-1):
                    self._buffer.add(step)

    def put_mixed(self, batch: TensorDictBase, env_index: np.ndarray) -> None:
        if batch.batch_size.numel():
            self.put(batch, batch, 0, [batch])

    def may_write(self) -> bool:
        return True

    def attach(self, source: Any) -> None: ...


def make_sink(buffer: Any, num_envs: int, extend: bool) -> BufferSink | ExtendSink:
    if isinstance(buffer, ReplayBuffer) or callable(getattr(buffer, "write_rows", None)):  # one in Ray
        return BufferSink(buffer, num_envs)
    if not callable(getattr(buffer, "extend", None)):
        raise TypeError(f"replay_buffer must have extend(), like those of swath.data; got {type(buffer).__name__}")
    return ExtendSink(buffer, extend)


def _unnamed(batch: TensorDictBase) -> TensorDictBase:
    """With other dimensions than it had, names are lost or in the way."""
    if batch.names is not None and any(name is not None for name in batch.names):
        batch = batch.copy()
        batch.names = None
    return batch

"""RayReplayBuffer: a replay buffer in an actor of Ray's, that collectors on nodes write to and a learner samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.payload import Bytes, pack_tensordict, unpack_tensordict
from swath.data.replay_buffer import ReplayBuffer
from swath.data.sources import Sources
from swath.errors import NodeLost
from swath.integrations.ray import import_ray, start_ray
from swath.process import pickling
from swath.process.channel import Packed, returning_errors, unpack

_WRITE, _SAMPLE = "write", "sample"
#: How long a call of ``sample(wait=True)`` stays with the actor before it is asked whether the collector still runs.
_SECONDS_BETWEEN_QUESTIONS = 0.5


class _Actor:
    """What Ray runs. Exceptions are returned, so that they come out with their own type."""

    def __init__(self, made: bytes) -> None:
        kind, kwargs = pickling.loads_with_path(made)
        self._buffer: ReplayBuffer = kind(**kwargs)
        self._writer: str | None = None

    def about(self) -> dict[str, Any]:
        return {"appends": self._buffer.writer.appends, "batch_size": self._buffer.batch_size}

    @returning_errors
    def write_rows(self, data: Bytes, first_track: int | None, writer: str, num_tracks: int) -> Any:
        self._prepare(writer, num_tracks)
        return self._buffer.write_rows(unpack_tensordict(data), first_track).numpy()

    @returning_errors
    def write_mixed(self, data: Bytes, env_index: np.ndarray, writer: str, num_tracks: int) -> None:
        self._prepare(writer, num_tracks)
        self._buffer.write_mixed(unpack_tensordict(data), env_index)

    def _prepare(self, writer: str, num_tracks: int) -> None:
        """Once for every collector, however many nodes it has."""
        if writer and writer != self._writer:
            self._writer = writer
            self._buffer.prepare_tracks(num_tracks)

    def end_tracks(self, first: int, count: int, num_envs: int) -> None:
        self._buffer.end_tracks(first, count, num_envs)

    @returning_errors
    def extend(self, data: bytes | Bytes) -> Any:
        given = unpack_tensordict(data) if isinstance(data, np.ndarray) else cloudpickle.loads(data)
        return self._buffer.extend(given).numpy()

    @returning_errors
    def sample(self, size: int | None, wait: bool, timeout: float | None) -> Any:
        data, info = self._buffer.sample(size, return_info=True, wait=wait, timeout=timeout)
        plain = {key: value for key, value in info.items() if isinstance(key, str)}
        if is_tensor_collection(data):
            return pack_tensordict(data), cloudpickle.dumps(plain)  # type: ignore[arg-type]
        return cloudpickle.dumps(data), cloudpickle.dumps(plain)

    @returning_errors
    def call(self, name: str, args: bytes) -> Any:
        positional, keywords = cloudpickle.loads(args)
        value = getattr(self._buffer, name)
        return pickling.dumps(value(*positional, **keywords) if callable(value) else value)

    def length(self) -> int:
        return len(self._buffer)


class RayReplayBuffer:
    """A ``ReplayBuffer`` that lives in Ray. It is used like one; it may be pickled, to be used by other actors.

    Args:
        replay_buffer_cls: what lives there; ``ReplayBuffer`` by default.
        remote_config: what its actor asks of Ray (``num_cpus``, ``memory``, ``resources`` …).
        ray_init_config: for ``ray.init``, where Ray does not run yet.
        kwargs: for ``replay_buffer_cls``. Give storage, sampler and writer as functions that make them
            (``lambda: LazyTensorStorage(100_000)``), or as objects that were not used yet.

    >>> rb = RayReplayBuffer(storage=lambda: LazyTensorStorage(100_000), batch_size=256)  # doctest: +SKIP
    >>> collector = RayCollector([make_env] * 4, policy, frames_per_batch=1000, replay_buffer=rb)  # doctest: +SKIP
    >>> collector.start()  # doctest: +SKIP
    >>> batch = rb.sample(wait=True)  # doctest: +SKIP
    """

    rate_limiter = None

    def __init__(
        self,
        *,
        replay_buffer_cls: type[ReplayBuffer] = ReplayBuffer,
        remote_config: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("rate_limiter") is not None:
            raise TypeError("RayReplayBuffer has no rate_limiter: writers of other machines would have to ask it")
        ray = import_ray()
        self._started_ray = start_ray(ray_init_config)

        class SwathReplayBuffer(_Actor):
            write_rows = ray.method(concurrency_group=_WRITE)(_Actor.write_rows)
            write_mixed = ray.method(concurrency_group=_WRITE)(_Actor.write_mixed)
            extend = ray.method(concurrency_group=_WRITE)(_Actor.extend)
            end_tracks = ray.method(concurrency_group=_WRITE)(_Actor.end_tracks)
            sample = ray.method(concurrency_group=_SAMPLE)(_Actor.sample)

        options = {"num_cpus": 0, **(remote_config or {})}
        groups = {_WRITE: 1, _SAMPLE: 1}
        made = pickling.dumps_with_path((replay_buffer_cls, kwargs))
        self._actor: Any = ray.remote(**options, concurrency_groups=groups)(SwathReplayBuffer).remote(made)
        self._set_up(None, 0)
        about = self._get(self._actor.about.remote())
        self.writer = SimpleNamespace(appends=about["appends"])
        self._batch_size = about["batch_size"]

    def _set_up(self, writer: str | None, num_tracks: int) -> None:
        self._ray = import_ray()
        self._writer_name = writer
        self._num_tracks = num_tracks
        self._sources = Sources()

    def _get(self, reference: Any) -> Any:
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            first = str(error).splitlines()[0]
            raise NodeLost(f"the actor of this RayReplayBuffer, and all that was in it, is lost: {first}") from None
        if isinstance(value, Packed):
            raise unpack(value, -1, "the actor of a RayReplayBuffer")
        return value

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return cloudpickle.loads(self._get(self._actor.call.remote(name, pickling.dumps((args, kwargs)))))

    def for_writer(self, name: str) -> RayReplayBuffer:
        """This buffer for a collector's nodes: all that have the same name share its tracks."""
        other = object.__new__(type(self))
        other.__setstate__({**self.__getstate__(), "writer_name": name})
        return other

    # -- writing ---------------------------------------------------------------------------------------------------

    def prepare_tracks(self, num_tracks: int) -> None:
        """With the first frames that are written."""
        self._num_tracks = num_tracks
        if self._writer_name is None:
            self._writer_name = f"{id(self)}-{time.monotonic_ns()}"

    def write_rows(self, rows: TensorDictBase, first_track: int | None = None) -> torch.Tensor:
        """Add frames ``[envs, steps]``; returns when they are there."""
        data = pack_tensordict(rows)
        writer = self._writer_name or ""
        slots = self._get(self._actor.write_rows.remote(data, first_track, writer, self._num_tracks))
        return torch.from_numpy(np.array(slots))

    def write_mixed(self, frames: TensorDictBase, env_index: np.ndarray) -> None:
        """Add frames ``[n]`` of many envs."""
        data = pack_tensordict(frames)
        self._get(self._actor.write_mixed.remote(data, env_index, self._writer_name or "", self._num_tracks))

    def end_tracks(self, first: int, count: int, num_envs: int) -> None:
        self._get(self._actor.end_tracks.remote(first, count, num_envs))

    def extend(self, data: Any) -> torch.Tensor:
        sent = pack_tensordict(data) if isinstance(data, TensorDictBase) else pickling.dumps(data)
        return torch.from_numpy(np.array(self._get(self._actor.extend.remote(sent))))

    def add(self, data: Any) -> Any:
        return self._call("add", data)

    def next_traj_id(self, writer: str) -> int:
        return self._call("next_traj_id", writer)

    def may_write(self) -> bool:
        return True

    def attach(self, source: Any) -> None:
        """A collector writes to this buffer from now on."""
        self._sources.attach(source)

    # -- reading ---------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """As ``ReplayBuffer.sample``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if wait:
            self._sources.raise_failure()
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            patience = _SECONDS_BETWEEN_QUESTIONS if left is None else max(0.0, min(left, _SECONDS_BETWEEN_QUESTIONS))
            running = self._sources.is_running
            try:
                data, info = self._get(self._actor.sample.remote(batch_size, wait, patience if wait else None))
            except TimeoutError:
                self._sources.raise_failure()
                if self._sources and not running:
                    raise RuntimeError("there are not enough frames to sample, and no collector is writing") from None
                if left is not None and left <= 0:
                    raise
                continue
            read = unpack_tensordict(data) if isinstance(data, np.ndarray) else cloudpickle.loads(data)
            return (read, cloudpickle.loads(info)) if return_info else read

    def update_priority(self, index: Any, priority: Any) -> None:
        self._call("update_priority", index, priority)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        self._call("update_tensordict_priority", data)

    def __getitem__(self, index: Any) -> Any:
        return self._call("__getitem__", index)

    def __setitem__(self, index: Any, data: Any) -> None:
        self._call("__setitem__", index, data)

    def __len__(self) -> int:
        return self._get(self._actor.length.remote())

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.sample()

    @property
    def write_count(self) -> int:
        return self._call("write_count")

    def stats(self) -> dict[str, Any]:
        """As ``ReplayBuffer.stats``."""
        return self._call("stats")

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def empty(self, empty_write_count: bool = True) -> None:
        self._call("empty", empty_write_count)

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._call("load_state_dict", state_dict)

    def dumps(self, path: Any) -> None:
        """Save to a folder of the machine that the actor is on."""
        self._call("dumps", path)

    def loads(self, path: Any, *, allow_pickle: bool = False) -> None:
        self._call("loads", path, allow_pickle=allow_pickle)

    # -- the rest --------------------------------------------------------------------------------------------------

    dump = save = dumps
    load = loads

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether there is enough for a batch."""
        return self._call("can_sample", batch_size)

    def close(self) -> None:
        """End the actor; what was in it is gone."""
        if self._ray.is_initialized() and self._actor is not None:
            self._ray.kill(self._actor)
            if self._started_ray:
                self._ray.shutdown()
        self._actor = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "actor": self._actor,
            "appends": self.writer.appends,
            "batch_size": self._batch_size,
            "writer_name": self._writer_name,
            "num_tracks": self._num_tracks,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._actor = state["actor"]
        self.writer = SimpleNamespace(appends=state["appends"])
        self._batch_size = state["batch_size"]
        self._started_ray = False
        self._set_up(state["writer_name"], state["num_tracks"])

    def __repr__(self) -> str:
        return f"RayReplayBuffer({self._actor})"

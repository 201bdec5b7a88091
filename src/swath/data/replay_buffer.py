"""ReplayBuffer: what collectors write to and learners sample from."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.prioritized import PrioritizedSampler
from swath.data.rate import SamplesPerInsert
from swath.data.samplers import POSITIONS, RandomSampler, Sampler
from swath.data.saving import load_folder, restore_storage, save_folder, storage_state
from swath.data.storages import ListStorage, Storage, TensorStorage, check_fields, marked_cuts
from swath.data.tracks import Window
from swath.data.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field
from swath.rollout.structure import maybe_dense_stack

#: How often whoever waits for data looks for it: workers commit without telling anybody.
_SECONDS_BETWEEN_LOOKS = 0.002
_MOST_TRIES = 1000


class ReplayBuffer:
    """Keeps frames, and gives some of them.

    Collectors that get it as ``replay_buffer=`` write frames to it, each env's behind one another; workers write by
    themselves while the learner samples. Nobody waits for a lock, and a sample never has a frame that was being
    written.

    Args:
        storage: where frames are; ``ListStorage(1000)`` by default. Like sampler and writer, an object or what makes
            one.
        sampler: which are drawn; uniformly by default.
        writer: where new ones go; over the oldest by default.
        collate_fn: puts together what a ``ListStorage`` gives.
        pin_memory: copy samples into memory that a GPU reads faster.
        prefetch: how many samples to prepare ahead, in a thread; needs ``batch_size``.
        transform, transform_factory: called with every sample, and returns what is given out; has ``inv``, that is
            called with what is written.
        batch_size: of ``sample()`` without one.
        dim_extend: the dimension of ``extend``'s data that is time; the last by default.
        generator: what random numbers come from.
        rate_limiter: ``SamplesPerInsert``, holds back whichever of collector and learner is ahead.

    >>> from tensordict import TensorDict
    >>> from swath.data import LazyTensorStorage
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rb.extend(TensorDict(x=torch.arange(10), batch_size=10)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> len(rb), rb.sample().shape, rb[:3]["x"]
    (10, torch.Size([4]), tensor([0, 1, 2]))
    """

    #: Whether samples say where they are from.
    _adds_index = False

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        rate_limiter: SamplesPerInsert | None = None,
    ) -> None:
        if transform is not None and transform_factory is not None:
            raise TypeError("give either transform or transform_factory, not both")
        if prefetch and batch_size is None:
            raise ValueError("prefetch needs batch_size: samples are prepared before they are asked for")
        if prefetch and shared:
            raise ValueError("prefetch does not go with shared=True")
        if dim_extend is not None and dim_extend < 0:
            raise ValueError(f"dim_extend must not be negative, got {dim_extend}")
        self._storage = _made(storage, Storage, lambda: ListStorage(1000))
        self._sampler = _made(sampler, Sampler, RandomSampler)
        self._writer = _made(writer, Writer, self._default_writer)
        if self._sampler.drop_last and batch_size is None:
            raise ValueError("a sampler with drop_last needs the buffer's batch_size")
        if shared and isinstance(self._storage, TensorStorage):
            self._storage.share(f"{type(self).__name__}(shared=True)")
        self._collate = collate_fn
        self._pin_memory = pin_memory
        self._transforms: list[Any] = []
        if transform is not None or transform_factory is not None:
            self._transforms.append(transform if transform_factory is None else transform_factory())
        self._batch_size = batch_size
        self._prefetch = int(prefetch or 0)
        self._prepared: deque[Future[Any]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self.dim_extend = dim_extend
        self.rate_limiter = rate_limiter
        self.set_rng(generator)
        #: One writer a track: threads of this process take turns.
        self._writing = threading.Lock()
        #: A sampler has a state, and the threads that prefetch use it, too.
        self._sampling = threading.Lock()
        self._num_sampled = 0
        #: Frames that were written and are counted by no track: see ``loads``.
        self._written_before = 0
        self._sources: list[Any] = []
        #: How many tracks to make; see ``prepare_tracks``.
        self._planned_tracks = 1

    def _default_writer(self) -> Writer:
        return RoundRobinWriter()

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def sampler(self) -> Sampler:
        return self._sampler

    @property
    def writer(self) -> Writer:
        return self._writer

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def set_sampler(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def set_writer(self, writer: Writer) -> None:
        self._writer = writer

    def set_storage(self, storage: Storage) -> None:
        if len(self):
            raise RuntimeError("this buffer has data; make another one for another storage")
        self._storage = storage

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Random numbers follow from this generator's next one, or from torch's own."""
        seed = int(torch.randint(2**62, (), generator=generator))
        self._rng = np.random.default_rng(seed)

    def append_transform(self, transform: Callable[[Any], Any], *, invert: bool = False) -> ReplayBuffer:
        """Also call this with every sample."""
        if invert:
            raise ValueError("invert=True is not supported; give a function that does the opposite")
        self._transforms.append(transform)
        return self

    def __len__(self) -> int:
        return len(self._storage)

    @property
    def write_count(self) -> int:
        """Frames that were ever written."""
        return self._written_before + (self._storage.tracks.write_count if self._storage.is_laid_out else 0)

    @property
    def num_sampled(self) -> int:
        """Frames that were ever sampled."""
        return self._num_sampled

    def __repr__(self) -> str:
        parts = ", ".join(type(part).__name__ for part in (self._storage, self._sampler, self._writer))
        return f"{type(self).__name__}({parts}, {len(self):,} of {self._storage.max_size:,} frames)"

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """One frame; its index."""
        if is_tensor_collection(data) or isinstance(data, torch.Tensor):
            return self.extend(data.unsqueeze(0))[0]
        return self.extend([data])[0]

    def extend(self, data: Any) -> torch.Tensor:
        """Many: the first dimension of a TensorDict or tensor, or a list. Their indices."""
        for transform in reversed(self._transforms):
            if callable(getattr(transform, "inv", None)):
                data = transform.inv(data)
        if isinstance(data, (list, tuple)):
            if len(data) and isinstance(self._storage, TensorStorage):
                data = torch.stack([_as_tensors(entry) for entry in data])  # type: ignore[arg-type]
            elif isinstance(data, tuple):
                data = list(zip(*data, strict=True))
        if not len(data):
            raise RuntimeError("extend was given nothing: 0 frames")
        if isinstance(data, list):
            return self.write_rows([data]).reshape(-1)
        if self._storage.ndim > 1:
            return self.write_rows(self._by_env(data))
        return self.write_rows(data.unsqueeze(0)).reshape(-1)

    def _by_env(self, data: Any) -> Any:
        """``[envs, time]`` of data with as many dimensions as the storage."""
        ndim = self._storage.ndim
        shape = data.batch_size if is_tensor_collection(data) else data.shape
        if len(shape) < ndim:
            raise ValueError(f"a storage with ndim={ndim} takes data with {ndim} dimensions, got {tuple(shape)}")
        time_dim = ndim - 1 if self.dim_extend is None else self.dim_extend
        if time_dim != ndim - 1:
            data = data.transpose(time_dim, ndim - 1)
        return data.reshape(-1, *data.shape[ndim - 1 :])

    def write_rows(self, rows: Any, first_track: int | None = None) -> torch.Tensor:
        """Add frames ``[envs, steps]``, each env's behind its earlier ones. How collectors write.

        ``first_track``: which of the buffer's envs the first row is.
        """
        if self._sources and first_track is None and any(source.writes_elsewhere for source in self._sources):
            raise RuntimeError(
                "workers are writing to this buffer; extend it before start(), or within collector.pause()"
            )
        with self._writing:
            first = 0 if first_track is None else first_track
            if not self._storage.is_laid_out:
                self._storage.lay_out(rows, len(rows) if first_track is None else self._planned_tracks)
            if first_track is None and self._storage.tracks.num_tracks != len(rows):
                if len(rows) != 1:
                    raise ValueError(
                        f"this buffer has tracks for {self._storage.tracks.num_tracks} envs, and was given data of "
                        f"{len(rows)}"
                    )
                first = int(self._storage.tracks.committed.argmin())
            if first_track is not None and isinstance(rows, TensorDictBase):
                ids = rows.get(TRAJ_IDS, None)
                if ids is not None:
                    self._storage.end_others(range(first, first + len(rows)), ids[:, 0].tolist())
            slots = self._writer.write(self._storage, rows, first)
        return torch.from_numpy(slots)

    def write_mixed(self, frames: TensorDictBase, env_index: np.ndarray) -> None:
        """Add frames ``[n]`` of many envs, of each in order; ``env_index`` says whose."""
        if not len(env_index):  # a batch that was stopped before its first frame
            return
        with self._writing:
            if not self._storage.is_laid_out:
                self._storage.lay_out(frames.unsqueeze(0), self._planned_tracks)
            ids = frames.get(TRAJ_IDS, None)
            if ids is not None:
                tracks, first = np.unique(env_index, return_index=True)
                self._storage.end_others(tracks.tolist(), ids[torch.from_numpy(first)].tolist())
            self._storage.write_mixed(marked_cuts(frames, env_index), env_index)

    def prepare_tracks(self, num_tracks: int) -> None:
        """For a collector of so many envs: give each a track of its own, and end what was under way in them."""
        self._planned_tracks = num_tracks
        if self._storage.is_laid_out and self._writer.appends:
            if self._storage.tracks.num_tracks != num_tracks:
                written = self.write_count
                self._storage.change_tracks(num_tracks)
                self._written_before = written - self._storage.tracks.write_count
                self._sampler.empty()
            self._storage.end(range(num_tracks))

    def end_tracks(self, first_track: int, count: int) -> None:
        """Whoever wrote to these will not go on with the trajectories that it was in."""
        storage = self._storage
        if storage.is_laid_out:
            num_tracks = storage.tracks.num_tracks
            with self._writing:
                storage.end(range(min(first_track, num_tracks - 1), min(first_track + count, num_tracks)))

    def share_tracks(self, fields: Sequence[Field], num_tracks: int) -> None:
        """As ``prepare_tracks``, in memory that a collector's workers can write to."""
        storage = self._storage
        assert isinstance(storage, TensorStorage)
        if storage.memory is None:
            storage.lay_out_fields(fields, num_tracks, shared=True)
            storage.keep()
            return
        check_fields(storage.memory.layout.fields, fields)
        self._planned_tracks = num_tracks
        if storage.memory.descriptor is None or storage.tracks.num_tracks != num_tracks:
            written = self.write_count
            storage.change_tracks(num_tracks, shared=True)
            self._written_before = written - storage.tracks.write_count
            self._sampler.empty()
        storage.end(range(num_tracks))

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all frames."""
        with self._writing, self._sampling:
            written = 0 if empty_write_count else self.write_count
            self._storage.clear()
            self._written_before = written
            self._sampler.empty()
            self._writer.empty()

    # -- reading ---------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Frames, as the sampler draws them; with ``return_info``, also where from.

        Args:
            wait: wait until there is enough for a batch, up to ``timeout`` seconds (``TimeoutError``). If the collector
                that fills the buffer fails meanwhile, its exception is raised.
        """
        size = self._batch_size if batch_size is None else int(batch_size)
        if size is None:
            raise RuntimeError("sample needs a batch_size: here, or when the buffer is made")
        if wait or self.rate_limiter is not None:
            self._await(size, wait, timeout)
        if self._prefetch and batch_size is None and not return_info:
            data, info = self._next_prepared(size)
        else:
            data, info = self._draw(size)
        self._num_sampled += size
        return (data, info) if return_info else data

    def _await(self, size: int, wait: bool, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._may_sample(size, wait):
            self._raise_failures()
            is_filled = any(source.is_running() for source in self._sources)
            if not is_filled and (self._sources or not wait) and not self._may_sample(size, wait):
                self._raise_failures()
                limit = "" if self.rate_limiter is None else f" ({self.rate_limiter})"
                raise RuntimeError(
                    f"{size} frames cannot be sampled{limit}: {self.write_count:,} were written and "
                    f"{self._num_sampled:,} sampled, and no collector is writing any more"
                )
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"after {timeout} s there were not enough frames to sample {size}: {len(self):,} are in the buffer"
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _may_sample(self, size: int, wait: bool) -> bool:
        if wait:
            if not self._storage.is_laid_out:
                return False
            with self._sampling:
                if not self._sampler.can_sample(self._storage, self._storage.tracks.window(), size):
                    return False
        return self.rate_limiter is None or self.rate_limiter.may_sample(size, self.write_count, self._num_sampled)

    def may_write(self) -> bool:
        """Whether the rate limiter lets collectors go on."""
        return self.rate_limiter is None or self.rate_limiter.may_write(self.write_count, self._num_sampled)

    def _next_prepared(self, size: int) -> tuple[Any, dict[str, Any]]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._prefetch, thread_name_prefix="swath-prefetch")
        while len(self._prepared) < self._prefetch:
            self._prepared.append(self._executor.submit(self._draw, size))
        first = self._prepared.popleft()
        self._prepared.append(self._executor.submit(self._draw, size))
        return first.result()

    def _draw(self, size: int) -> tuple[Any, dict[str, Any]]:
        storage = self._storage
        if not storage.is_laid_out or not (window := storage.tracks.window()).total:
            self._raise_failures()
            raise RuntimeError(
                "the buffer is empty; sample(wait=True) waits for a collector that was started to fill it"
            )
        for _ in range(_MOST_TRIES):
            with self._sampling:
                slots, info = self._sampler.sample(storage, window, size, self._rng)
            data = storage.get(slots)
            intact = storage.tracks.intact(window, slots)
            if intact.all():
                break
            window = storage.tracks.window()
            if self._sampler.is_rowwise and isinstance(storage, TensorStorage):
                slots, info, data = self._replace(window, slots, info, data, intact)
                break
        else:
            raise RuntimeError("frames are overwritten faster than they can be read; use a larger storage")
        return self._finish(slots, info, data)

    def _replace(
        self, window: Window, slots: np.ndarray, info: dict[Any, Any], data: Any, intact: np.ndarray
    ) -> tuple[np.ndarray, dict[Any, Any], Any]:
        """Draw others for frames that were overwritten while they were copied."""
        for _ in range(_MOST_TRIES):
            bad = (~intact).nonzero()[0]
            with self._sampling:
                others, their_info = self._sampler.sample(self._storage, window, len(bad), self._rng)
            taken = self._storage.get(others)
            good = self._storage.tracks.intact(window, others)
            where, bad = bad[: len(others)][good], torch.from_numpy(bad[: len(others)][good])
            slots[where] = others[good]
            data[bad] = taken[torch.from_numpy(good)]
            for key, values in info.items():
                values[bad if isinstance(values, torch.Tensor) else where] = their_info[key][good]
            intact[where] = True
            if intact.all():
                return slots, info, data
            window = self._storage.tracks.window()
        raise RuntimeError("frames are overwritten faster than they can be read; use a larger storage")

    def _finish(self, slots: np.ndarray, info: dict[Any, Any], data: Any) -> tuple[Any, dict[str, Any]]:
        index = torch.from_numpy(slots)
        if POSITIONS in info:
            self._sampler.remember(index, info.pop(POSITIONS))
        if isinstance(data, list):
            data = (_collate if self._collate is None else self._collate)(data)
        elif self._collate is not None:
            data = self._collate(data)
        marks = [entry for entry in info.values() if hasattr(entry, "apply") and not isinstance(entry, torch.Tensor)]
        info = {key: entry for key, entry in info.items() if isinstance(key, str)}
        for mark in marks:
            mark.apply(data)
        if self._adds_index and isinstance(data, TensorDictBase):
            data.set("index", index)
            for key, entry in info.items():
                data.set(key, entry)
        if self._pin_memory and isinstance(data, (TensorDictBase, torch.Tensor)):
            data = data.pin_memory()
        for transform in self._transforms:
            data = transform(data)
        return data, {"index": index, **info}

    def __getitem__(self, index: Any) -> Any:
        """Frames by their index, as ``sample`` and ``extend`` give it; or a slice of all, env by env."""
        if not self._storage.is_laid_out:
            raise IndexError("the buffer is empty")
        window = self._storage.tracks.window()
        if isinstance(index, (slice, int)):
            numbers = np.arange(window.total)[index]  # also what is out of range
            slots = window.slots(np.atleast_1d(numbers))
        else:
            array = np.asarray(index)
            array = array.nonzero()[0] if array.dtype == bool else array.astype(np.int64)
            slots = array.reshape(-1)
            if len(slots) and (slots.min() < 0 or slots.max() >= self._storage.tracks.capacity):
                raise IndexError(f"there is no frame {slots.max()}")
        data = self._storage.get(slots)
        if isinstance(data, list):
            return data[0] if isinstance(index, int) else (_collate if self._collate is None else self._collate)(data)
        return data[0] if isinstance(index, int) else data

    def __iter__(self) -> Iterator[Any]:
        """Samples, until the sampler has given all (without replacement), or for ever."""
        if self._batch_size is None:
            raise RuntimeError("iterating needs the buffer's batch_size")
        self._sampler.ran_out = False
        while not self._sampler.ran_out:
            if self._sampler.drop_last and len(self) < self._batch_size:
                return
            yield self.sample()
        self._sampler.ran_out = False

    def next(self) -> Any:
        """A sample; None once, when the sampler has given all."""
        if self._sampler.ran_out:
            self._sampler.ran_out = False
            return None
        return self.sample()

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of frames; without a prioritised sampler, nothing."""
        if isinstance(self._sampler, PrioritizedSampler) and self._storage.is_laid_out:
            with self._sampling:
                self._sampler.update_priority(self._storage.tracks.window(), index, priority)

    # -- collectors ------------------------------------------------------------------------------------------------

    def attach(self, source: Any) -> None:
        """A collector writes to this buffer from now on. ``source`` has ``is_running``, ``failure``,
        ``writes_elsewhere``."""
        if any(known.is_running() for known in self._sources):
            raise RuntimeError("another collector is writing to this buffer; give each its own")
        self._sources = [source]

    def _raise_failures(self) -> None:
        for source in self._sources:
            source.raise_failure()

    # -- saving ----------------------------------------------------------------------------------------------------

    def dumps(self, path: Any) -> None:
        """Save to a folder: beside what is there, which is replaced at the end, at once.

        Workers may go on writing: what was committed when it began is in it, but for what they overwrite meanwhile.
        """
        with self._sampling:
            save_folder(path, self._storage, self._about())

    dump = dumps

    def loads(self, path: Any) -> None:
        """Load what ``dumps`` saved, instead of what is there."""
        self._restore(lambda: load_folder(path, self._storage))

    load = loads

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors, arrays and numbers."""
        with self._sampling:
            return {"storage": storage_state(self._storage), "about": self._about()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what ``state_dict`` gave, instead of what is there."""

        def restored() -> Any:
            restore_storage(self._storage, state_dict["storage"])
            return state_dict["about"]

        self._restore(restored)

    def _about(self) -> dict[str, Any]:
        window = self._storage.tracks.window() if self._storage.is_laid_out else None
        return {
            "num_sampled": self._num_sampled,
            "write_count": self.write_count,
            "rng": self._rng.bit_generator.state,
            "sampler": None if window is None else self._sampler.state_dict(window),
        }

    def _restore(self, restore: Callable[[], Mapping[str, Any]]) -> None:
        if any(source.is_running() for source in self._sources):
            raise RuntimeError("a collector is writing to this buffer; load before start()")
        with self._writing, self._sampling:
            self._sampler.empty()
            self._writer.empty()
            about = restore()
            if about["sampler"] is not None:
                self._sampler.load_state_dict(about["sampler"], self._storage.tracks.window())
        self._num_sampled = int(about["num_sampled"])
        self._written_before = 0
        self._written_before = int(about["write_count"]) - self.write_count
        self._rng.bit_generator.state = about["rng"]

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Nothing to do: a collector's workers get what they need when they start."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ReplayBuffer stays in its process: give it to a collector as replay_buffer=, whose workers then write "
            "to it; or send what it has: rb.state_dict()"
        )


class TensorDictReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer`` of TensorDicts, whose samples have their ``index`` and what the sampler knows of them.

    Args:
        priority_key: where ``update_tensordict_priority`` finds priorities.

    >>> from tensordict import TensorDict
    >>> from swath.data import LazyTensorStorage, PrioritizedSampler
    >>> rb = TensorDictReplayBuffer(
    ...     storage=LazyTensorStorage(100), sampler=PrioritizedSampler(100, alpha=0.7, beta=0.5), batch_size=4
    ... )
    >>> _ = rb.extend(TensorDict(x=torch.arange(10), batch_size=10))
    >>> sample = rb.sample()
    >>> sample["td_error"] = torch.rand(4)
    >>> rb.update_tensordict_priority(sample)
    """

    _adds_index = True

    def __init__(self, *, priority_key: Any = "td_error", **kwargs: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**kwargs)

    def _default_writer(self) -> Writer:
        return TensorDictRoundRobinWriter()

    def extend(self, data: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)) and len(data) and all(is_tensor_collection(entry) for entry in data):
            data = torch.stack(list(data))  # type: ignore[arg-type]
        if not is_tensor_collection(data):
            raise ValueError(f"TensorDictReplayBuffer stores TensorDicts, got {type(data).__name__}")
        return super().extend(data)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a sample that has them under ``priority_key``."""
        priority = data.get(self.priority_key, None)
        if priority is None:
            raise KeyError(f"there is no {self.priority_key!r} in this sample to take priorities from")
        self.update_priority(data.get("index"), priority)


def _made(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    if given is None:
        return default()
    made = given if isinstance(given, kind) else given() if callable(given) else given
    if not isinstance(made, kind):
        raise TypeError(f"expected a {kind.__name__} of swath.data, or what makes one; got {type(made).__name__}")
    return made


def _as_tensors(entry: Any) -> Any:
    return entry if is_tensor_collection(entry) or isinstance(entry, torch.Tensor) else torch.as_tensor(entry)


def _collate(entries: list[Any]) -> Any:
    if is_tensor_collection(entries[0]):
        return maybe_dense_stack(entries)
    if isinstance(entries[0], torch.Tensor):
        return torch.stack(entries)
    if isinstance(entries[0], (tuple, list)):
        return type(entries[0])(_collate(list(part)) for part in zip(*entries, strict=True))
    if isinstance(entries[0], (int, float, np.ndarray, np.generic)):
        return torch.as_tensor(np.asarray(entries))
    return entries

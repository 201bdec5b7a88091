"""ReplayBuffer: what collectors write to and learners sample from."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection

from swath.copying import NotCopied
from swath.data.episode_ends import marked_cuts
from swath.data.frames import check_fields, check_sizes
from swath.data.inverses import checked_transform, claimed, inverts, require_by_env
from swath.data.list_storage import ListStorage
from swath.data.multi_step import MultiStepTransform
from swath.data.prefetch import Drawn, Prefetcher
from swath.data.prioritized import PrioritizedSampler
from swath.data.rate import SamplesPerInsert
from swath.data.samplers import POSITIONS, RandomSampler, Sampler
from swath.data.saving import read_folder, restore_storage, save_folder, storage_state
from swath.data.sequences import BatchTransform, looks_ahead, require_ids
from swath.data.storages import Storage, TensorStorage
from swath.data.tracks import Tracks, Window
from swath.data.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer
from swath.rollout.delivery import TRAJ_IDS
from swath.rollout.layout import Field
from swath.rollout.structure import maybe_dense_stack
from swath.states import mismatch
from swath.warn import warn_user

#: How often whoever waits for data looks for it: workers commit without telling anybody.
_SECONDS_BETWEEN_LOOKS = 0.002
_MOST_TRIES = 1000


class ReplayBuffer(NotCopied):
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
        prefetch: how many samples to prepare ahead, in a thread; needs ``batch_size``. One that has a frame that was
            overwritten since is drawn again; passes without replacement are what they are without prefetch.
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

    _owns = "memory that collectors write to, and threads that take turns"
    _instead_of_a_copy = (
        "give it to a collector as replay_buffer=, whose workers then write to it; or make another one with the same "
        "arguments, and give it this one's state_dict()"
    )
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
            made = transform if transform_factory is None else transform_factory()
            self._transforms.append(claimed(checked_transform(made), self))
        self._batch_size = batch_size
        self._prefetcher = Prefetcher(int(prefetch)) if prefetch else None
        self.dim_extend = dim_extend
        self.rate_limiter = rate_limiter
        self.set_rng(generator)
        #: One writer a track: threads of this process take turns. What a transform holds back and what is stored of the
        #: same frames are changed within one turn.
        self._writing = threading.RLock()
        #: A sampler has a state, and the threads that prefetch use it, too.
        self._sampling = threading.Lock()
        self._num_sampled = 0
        #: Whether the last sample was the end of a pass.
        self._ran_out = False
        #: Frames that were written and are counted by no track: see ``loads``.
        self._written_before = 0
        self._sources: list[Any] = []
        #: The collector that wrote last, by a name of its own.
        self._last_writer: str | None = None
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
        self._drop_prepared()
        self._sampler = sampler

    def set_writer(self, writer: Writer) -> None:
        self._writer = writer

    def set_storage(self, storage: Storage) -> None:
        if len(self):
            raise RuntimeError("this buffer has data; make another one for another storage")
        self._drop_prepared()
        self._storage = storage

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Random numbers follow from this generator's next one, or from torch's own."""
        self._drop_prepared()
        seed = int(torch.randint(2**62, (), generator=generator))
        self._rng = np.random.default_rng(seed)

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """Also call this with every sample, and its ``inv``, if it has one, with what is written."""
        if invert:
            raise ValueError("invert=True is not supported; give a function that does the opposite")
        checked_transform(transform)
        if inverts(transform) and any(each.writes_elsewhere and each.is_running() for each in self._sources):
            raise RuntimeError(
                f"workers are writing to this buffer, and would not call the inv of {type(transform).__name__}: append "
                "it before collector.start()"
            )
        claimed(transform, self)
        self._drop_prepared()
        self._transforms.append(transform)
        return self

    @property
    def changes_what_is_written(self) -> bool:
        """Whether a transform does something to frames before they are stored."""
        return any(map(inverts, self._transforms))

    def require_ids(self, frames: TensorDictBase) -> None:
        """Of frames ``[n]`` of several envs: that transforms which look ahead can tell these apart."""
        for transform in self._transforms:
            if looks_ahead(transform) and inverts(transform):
                require_ids(frames, type(transform).__name__)

    @property
    def _holding(self) -> list[MultiStepTransform]:
        """Transforms that keep frames for later."""
        return [transform for transform in self._transforms if isinstance(transform, MultiStepTransform)]

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
        """One frame; its index, or None while a transform holds it back."""
        as_one = is_tensor_collection(data) or isinstance(data, torch.Tensor)
        index = self.extend(data.unsqueeze(0) if as_one else [data])
        return index[0] if len(index) else None  # a transform may hold it back

    def extend(self, data: Any) -> torch.Tensor:
        """Many: the first dimension of a TensorDict or tensor, or a list. Their indices."""
        self._last_writer = None
        with self._writing:
            data = self._inverted(data)
            return torch.zeros(0, dtype=torch.int64) if data is None else self._extend(data)

    def _extend(self, data: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            if len(data) and isinstance(self._storage, TensorStorage):
                data = torch.stack([_as_tensors(entry) for entry in data])  # type: ignore[arg-type]
            elif isinstance(data, tuple):
                data = list(zip(*data, strict=True))
        if not len(data):
            raise RuntimeError("extend was given nothing: 0 frames")
        if isinstance(data, list):
            return self._store([data]).reshape(-1)
        if self._storage.ndim > 1:
            return self._store(self._by_env(data))
        self._require_equal_rows(data)
        return self._store(data.unsqueeze(0)).reshape(-1)

    def _require_equal_rows(self, data: Any) -> None:
        """Where rows are stored as they are, a transform may not change how long they are."""
        if not self._holding or not isinstance(self._storage, TensorStorage) or not self._storage.is_laid_out:
            return
        known = dict(self._storage.laid_out().layout.sizes).get((), torch.Size())
        if known != data.batch_size[1:]:
            raise ValueError(
                f"MultiStepTransform holds back the end of each row, so that the first rows are {tuple(known)} and "
                f"these {tuple(data.batch_size[1:])}. Store frames: {type(self._storage).__name__}(max_size, ndim=2)"
            )

    def _inverted(self, data: Any) -> Any:
        """What is to be stored of data; None if that is nothing."""
        for transform in filter(inverts, reversed(self._transforms)):
            if data is None:
                break
            is_in_time = isinstance(transform, BatchTransform)
            data = self._in_time(transform.inv, data) if is_in_time else transform.inv(data)
        return data

    def _in_time(self, inv: Callable[[Any], Any], data: Any) -> Any:
        """Call what takes time as the last dimension."""
        if self._storage.ndim == 1 or not is_tensor_collection(data):
            return inv(data)
        time_dim = self._time_dim(data)
        if time_dim == len(data.shape) - 1:
            return inv(data)
        made = inv(data.transpose(time_dim, -1))
        return None if made is None else made.transpose(time_dim, -1)

    def _time_dim(self, data: Any) -> int:
        ndim = self._storage.ndim
        shape = data.batch_size if is_tensor_collection(data) else data.shape
        if len(shape) < ndim:
            raise ValueError(f"a storage with ndim={ndim} takes data with {ndim} dimensions, got {tuple(shape)}")
        return ndim - 1 if self.dim_extend is None else self.dim_extend

    def _by_env(self, data: Any) -> Any:
        """``[envs, time]`` of data with as many dimensions as the storage."""
        ndim = self._storage.ndim
        time_dim = self._time_dim(data)
        if time_dim != ndim - 1:
            data = data.transpose(time_dim, ndim - 1)
        return data.reshape(-1, *data.shape[ndim - 1 :])

    def write_rows(self, rows: Any, first_track: int | None = None) -> torch.Tensor:
        """Add frames ``[envs, steps]``, each env's behind its earlier ones. How collectors write.

        ``first_track``: which of the buffer's envs the first row is.
        """
        if not self.changes_what_is_written:
            return self._store(rows, first_track)
        with self._writing:
            parts = self._inverted_rows(rows, first_track)
            slots = [self._store(part, first) for first, part in parts if part.batch_size.numel()]
        if len(slots) == 1:
            return slots[0]
        return torch.cat([each.reshape(-1) for each in slots]) if slots else torch.zeros(0, dtype=torch.int64)

    def _inverted_rows(self, rows: Any, first_track: int | None) -> list[tuple[int | None, Any]]:
        """What is to be stored of a collector's frames: rows, and the track of the first."""
        parts: list[tuple[int | None, Any]] = [(first_track, rows)]
        for transform in filter(inverts, reversed(self._transforms)):
            if isinstance(transform, BatchTransform):
                parts = [made for first, part in parts for made in transform.inv_rows(part, first)]
                continue
            require_by_env(transform)
            made = [(first, transform.inv(part.copy())) for first, part in parts]  # a hook may have what was collected
            parts = [(first, part) for first, part in made if part is not None]
        return parts

    def _store(self, rows: Any, first_track: int | None = None) -> torch.Tensor:
        if self._sources and first_track is None and any(source.writes_elsewhere for source in self._sources):
            raise RuntimeError(
                "workers are writing to this buffer; extend it before start(), or within collector.pause()"
            )
        with self._writing:
            if not self._writer.appends:  # it chooses places by itself: nothing there follows on anything
                return self._place(rows)
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

    def _place(self, rows: Any) -> torch.Tensor:
        """Frames ``[envs, steps]``, where the writer wants them."""
        self._planned_tracks = 1
        if not self._storage.is_laid_out:
            self._storage.lay_out(rows, 1)
        return torch.from_numpy(self._writer.write(self._storage, rows, 0))

    def write_mixed(self, frames: TensorDictBase, env_index: np.ndarray) -> None:
        """Add frames ``[n]`` of many envs, of each in order; ``env_index`` says whose."""
        if not len(env_index):  # a batch that was stopped before its first frame
            return
        if self.changes_what_is_written:  # what looks ahead needs each env's by themselves
            for env in np.unique(env_index).tolist():
                self.write_rows(frames[torch.from_numpy((env_index == env).nonzero()[0])].unsqueeze(0), env)
            return
        if not self._writer.appends:
            self._store(frames.unsqueeze(0))
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
        is_kept_by_env = self._storage.is_laid_out and self._writer.appends
        if is_kept_by_env and self._storage.tracks.num_tracks != num_tracks:
            written = self.write_count
            self._storage.change_tracks(num_tracks)
            self._written_before = written - self._storage.tracks.write_count
            self._sampler.empty()
            self._storage.end(range(num_tracks))  # what is held back follows on other frames then
        self._end(range(num_tracks))

    def _end(self, tracks: range) -> None:
        """Episodes under way in these tracks do not go on; where the last frames are held back, with those."""
        holding = self._holding
        for transform in holding:
            transform.end(tracks)
        if self._storage.is_laid_out and self._writer.appends:
            self._storage.end([track for track in tracks if not any(transform.holds(track) for transform in holding)])

    def end_tracks(self, first_track: int, count: int, num_envs: int) -> None:
        """Whoever wrote to these will not go on with the trajectories that it was in.

        Not where ``num_envs`` envs share tracks: the last frame may be of another one, which goes on.
        """
        storage = self._storage
        has_tracks = not storage.is_laid_out or not self._writer.appends or storage.tracks.num_tracks >= num_envs
        if has_tracks:  # or none yet, but what is held back is kept by env
            with self._writing:
                self._end(range(first_track, first_track + count))

    def next_traj_id(self, writer: str) -> int:
        """From where on trajectory ids are free for a collector; 0 if it was the last that asked and nobody else wrote.

        An earlier program, or another collector, may have numbered its own from 0, too.
        """
        if writer == self._last_writer:
            return 0
        self._last_writer = writer
        first = max((transform.next_traj_id for transform in self._holding), default=0)
        if not self._storage.is_laid_out:
            return first
        window = self._storage.tracks.window()
        ids = self._storage.column(TRAJ_IDS, window.slots(np.arange(window.total)))
        return max(first, int(ids.max()) + 1) if len(ids) else first

    def share_tracks(self, fields: Sequence[Field], num_tracks: int) -> None:
        """As ``prepare_tracks``, in memory that a collector's workers can write to."""
        storage = self._storage
        assert isinstance(storage, TensorStorage)
        if storage.memory is None:
            storage.lay_out_fields(fields, num_tracks, shared=True)
            storage.keep()
            return
        check_fields(storage.memory.layout.fields, fields)
        check_sizes(storage.memory.layout.sizes, ())
        self._planned_tracks = num_tracks
        if storage.memory.descriptor is None or storage.tracks.num_tracks != num_tracks:
            written = self.write_count
            storage.change_tracks(num_tracks, shared=True)
            self._written_before = written - storage.tracks.write_count
            self._sampler.empty()
        storage.end(range(num_tracks))

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all frames."""
        self._drop_prepared()
        with self._writing, self._sampling:
            written = 0 if empty_write_count else self.write_count
            self._storage.clear()
            self._written_before = written
            self._sampler.empty()
            self._writer.empty()
            self._forget_held()

    def _forget_held(self) -> None:
        for transform in self._holding:
            transform.clear()

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
            wait: wait until there is enough for a batch, up to ``timeout`` seconds (``TimeoutError``). Once the
                collector that fills the buffer has failed, every such call raises ``BackgroundFailed``.
        """
        size = self._batch_size if batch_size is None else int(batch_size)
        if size is None:
            raise RuntimeError("sample needs a batch_size: here, or when the buffer is made")
        if wait or self.rate_limiter is not None:
            self._await(size, wait, timeout)
        if self._prefetcher is not None and size == self._batch_size:
            drawn = self._prefetcher.take(lambda: self._draw(size), self._is_current, self._undo)
        else:
            if self._sampler.in_passes:
                self._drop_prepared()
            drawn = self._draw(size)
        self._ran_out = drawn.ends_pass
        self._num_sampled += len(drawn.slots)
        return (drawn.data, drawn.info) if return_info else drawn.data

    def _await(self, size: int, wait: bool, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._raise_failures()  # also where there is enough: who waits for new frames must know that there are none
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

    def _is_current(self, drawn: Drawn) -> bool:
        """Whether a sample that was prepared is one that could be drawn now."""
        storage = self._storage
        if not storage.is_laid_out or storage.tracks is not drawn.tracks:
            return False
        if drawn.tracks.unchanged(drawn.window):
            return True
        return not self._sampler.in_passes and bool(drawn.tracks.intact(drawn.window, drawn.slots).all())

    def _mark(self) -> Any:
        return (self._sampler.mark(), self._rng.bit_generator.state) if self._sampler.in_passes else None

    def _go_back(self, mark: Any) -> None:
        if mark is not None:
            with self._sampling:
                of_sampler, self._rng.bit_generator.state = mark
                self._sampler.go_back(of_sampler)

    def _undo(self, drawn: Drawn) -> None:
        self._go_back(drawn.before)

    def _drop_prepared(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.drop(self._undo)

    def _draw(self, size: int) -> Drawn:
        storage, sampler = self._storage, self._sampler
        if not storage.is_laid_out:
            raise self._is_empty()
        tracks = storage.tracks
        window = self._readable(tracks)
        for _ in range(_MOST_TRIES):
            with self._sampling:
                before = self._mark()
                sampler.ran_out = False
                slots, info = sampler.sample(storage, window, size, self._rng)
                ends_pass = sampler.ran_out
            data = storage.get(slots)
            intact = tracks.intact(window, slots)
            if intact.all():
                break
            window = self._readable(tracks)
            if sampler.is_rowwise and isinstance(storage, TensorStorage):
                window, slots, info, data = self._replace(window, slots, info, data, intact)
                break
            self._go_back(before)
        else:
            raise RuntimeError("frames are overwritten faster than they can be read; use a larger storage")
        try:
            data, info = self._finish(slots, info, data)
        except BaseException:
            self._go_back(before)  # what nobody got is still to come in this pass
            raise
        return Drawn(data, info, slots, tracks, window, ends_pass, before)

    def _is_empty(self) -> RuntimeError:
        self._raise_failures()
        return RuntimeError("the buffer is empty; sample(wait=True) waits for a collector that was started to fill it")

    def _readable(self, tracks: Tracks) -> Window:
        """What can be read; for a moment, while all of it is written over, there may be nothing."""
        for _ in range(_MOST_TRIES):
            window = tracks.window()
            if window.total:
                return window
            if not tracks.committed.any():
                raise self._is_empty()
            time.sleep(_SECONDS_BETWEEN_LOOKS / 10)
        raise RuntimeError("all frames of the buffer are being overwritten, and nobody finishes it; write it anew")

    def _replace(
        self, window: Window, slots: np.ndarray, info: dict[Any, Any], data: Any, intact: np.ndarray
    ) -> tuple[Window, np.ndarray, dict[Any, Any], Any]:
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
                return window, slots, info, data
            window = self._readable(self._storage.tracks)
        raise RuntimeError("frames are overwritten faster than they can be read; use a larger storage")

    def _finish(self, slots: np.ndarray, info: dict[Any, Any], data: Any) -> tuple[Any, dict[str, Any]]:
        index = torch.from_numpy(slots)
        positions = info.pop(POSITIONS, None)
        if positions is not None:
            self._sampler.remember(index, positions)
        if isinstance(data, list):
            data = (_collate if self._collate is None else self._collate)(data)
        elif self._collate is not None:
            data = self._collate(data)
        marks = [entry for entry in info.values() if hasattr(entry, "apply") and not isinstance(entry, torch.Tensor)]
        info = {key: entry for key, entry in info.items() if isinstance(key, str)}
        for mark in marks:
            mark.apply(data)
        if self._adds_index and isinstance(data, TensorDictBase):
            for key, entry in {"index": index, **info}.items():
                _set_by_row(data, key, entry)
            if positions is not None:
                self._sampler.remember(data.get("index"), positions)
        if self._pin_memory and isinstance(data, (TensorDictBase, torch.Tensor)):
            data = data.pin_memory()
        for transform in self._transforms:
            if getattr(transform, "changes_samples", True):
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
            if isinstance(index, int):
                return data[0].clone() if hasattr(data[0], "clone") else data[0]
            return (_collate if self._collate is None else self._collate)(data)
        return data[0] if isinstance(index, int) else data

    def __iter__(self) -> Iterator[Any]:
        """Samples, until the sampler has given all (without replacement), or for ever."""
        if self._batch_size is None:
            raise RuntimeError("iterating needs the buffer's batch_size")
        self._ran_out = False
        while not self._ran_out:
            if self._sampler.drop_last and len(self) < self._batch_size:
                return
            yield self.sample()
        self._ran_out = False

    def next(self) -> Any:
        """A sample; None once, when the sampler has given all."""
        if self._ran_out:
            self._ran_out = False
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
        self._drop_prepared()
        with self._unchanged(), self._sampling:
            save_folder(path, self._storage, self._about(), self._held())

    dump = dumps

    def loads(self, path: Any, *, allow_pickle: bool = False) -> None:
        """Load what ``dumps`` saved, instead of what is there.

        Args:
            allow_pickle: a ``ListStorage`` is saved as a pickle, which runs whatever it says: only if you know who
                wrote it.
        """
        about, restore, held = read_folder(path, self._storage, allow_pickle)
        self._restore(about, restore, held)

    load = loads

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors, arrays and numbers."""
        self._drop_prepared()
        with self._unchanged(), self._sampling:
            state = {"storage": storage_state(self._storage), "about": self._about()}
            held = self._held()
        return {**state, "held": held} if held else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what ``state_dict`` gave, instead of what is there."""
        if not isinstance(state_dict, Mapping) or not {"about", "storage"} <= state_dict.keys():
            raise mismatch(type(self).__name__, state_dict, "the state of a replay buffer")
        restore = functools.partial(restore_storage, self._storage, state_dict["storage"])
        self._restore(state_dict["about"], restore, state_dict.get("held", {}))

    def _unchanged(self) -> AbstractContextManager[Any]:
        """While frames are held back: what is stored and what is not yet must be of the same moment."""
        return self._writing if self._holding else nullcontext()

    def _held(self) -> dict[int, dict[str, Any]]:
        """What each transform holds back, by its place."""
        return {i: each.state_dict() for i, each in enumerate(self._transforms) if isinstance(each, MultiStepTransform)}

    def _about(self) -> dict[str, Any]:
        window = self._storage.tracks.window() if self._storage.is_laid_out else None
        return {
            "num_sampled": self._num_sampled,
            "write_count": self.write_count,
            "rng": self._rng.bit_generator.state,
            "sampler": None if window is None else self._sampler.state_dict(window),
        }

    def _restore(
        self, about: Mapping[str, Any], restore: Callable[[], None], held: Mapping[int, Mapping[str, Any]]
    ) -> None:
        if any(source.is_running() for source in self._sources):
            raise RuntimeError("a collector is writing to this buffer; load before start()")
        self._drop_prepared()
        self._last_writer = None
        num_sampled, write_count = int(about["num_sampled"]), int(about["write_count"])
        with self._writing, self._sampling:
            self._rng.bit_generator.state = about["rng"]
            self._sampler.empty()
            self._writer.empty()
            restore()
            self._forget_held()
            self._hold(held)
            if about["sampler"] is not None and self._storage.is_laid_out:
                self._sampler.load_state_dict(about["sampler"], self._storage.tracks.window())
        self._num_sampled = num_sampled
        self._written_before = 0
        self._written_before = write_count - self.write_count

    def _hold(self, held: Mapping[int, Mapping[str, Any]]) -> None:
        for number, state in held.items():
            transform = self._transforms[number] if number < len(self._transforms) else None
            if isinstance(transform, MultiStepTransform):
                transform.load_state_dict(state)
            elif state["held"]:
                count = sum(len(frames) for frames in state["held"].values())
                warn_user(
                    f"{count} frames that a MultiStepTransform held back when this was saved are left out: transform "
                    f"{number} of this buffer is none. Append the same transforms before loading"
                )

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Nothing to do: a collector's workers get what they need when they start."""
        return self


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


def _set_by_row(data: TensorDictBase, key: str, values: torch.Tensor) -> None:
    """Set what there is one of for each row; all steps of a row have the same."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        for row, value in zip(data.tensordicts, values, strict=True):
            row.set(key, value.expand(row.batch_size))
    elif data.batch_dims > values.ndim:
        data.set(key, values.reshape(-1, *[1] * (data.batch_dims - 1)).expand(data.batch_size))
    else:
        data.set(key, values)


def _collate(entries: list[Any]) -> Any:
    if is_tensor_collection(entries[0]):
        stacked = maybe_dense_stack(entries)
        # The members of a lazy stack are those that are stored.
        return stacked.clone() if isinstance(stacked, LazyStackedTensorDict) else stacked
    if isinstance(entries[0], torch.Tensor):
        return torch.stack(entries)
    if isinstance(entries[0], (tuple, list)):
        return type(entries[0])(_collate(list(part)) for part in zip(*entries, strict=True))
    if isinstance(entries[0], (int, float, np.ndarray, np.generic)):
        return torch.as_tensor(np.asarray(entries))
    return entries

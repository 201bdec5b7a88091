"""ReplayBuffer: what collectors write to and learners sample from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.copying import NotCopied
from swath.data.drawing import Drawing
from swath.data.editing import Editing
from swath.data.frames import as_many_frames, stacked
from swath.data.indexing import is_key
from swath.data.intake import Intake
from swath.data.inverses import Inverted, checked_transform, inverts
from swath.data.list_storage import ListStorage
from swath.data.parts import FOR_WRITERS, BufferParts, check_dim_extend, check_prefetch, made_of
from swath.data.prioritized import PrioritizedSampler
from swath.data.rate import SamplesPerInsert
from swath.data.samplers import RandomSampler, Sampler
from swath.data.saving import read_folder, restore_storage, save_folder, storage_state
from swath.data.sources import Source, Sources
from swath.data.storage_base import Storage
from swath.data.storages import TensorStorage
from swath.data.transform_chain import TransformChain
from swath.data.writers import RoundRobinWriter, Writer
from swath.hints import ExplainsGuesses, explains_unknown
from swath.rollout.layout import Field
from swath.states import mismatch

#: How often whoever waits for data looks for it: workers commit without telling anybody.
_SECONDS_BETWEEN_LOOKS = 0.002


class ReplayBuffer(NotCopied, ExplainsGuesses):
    """Keeps frames, and gives some of them.

    Collectors that get it as ``replay_buffer=`` write frames to it, each env's behind one another; workers write while
    the learner samples. Nobody waits for a lock, and a sample never has a frame that was being written.

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

    _inner = FOR_WRITERS
    _owns = "memory that collectors write to, and threads that take turns"
    _instead_of_a_copy = (
        "give it to a collector as replay_buffer=, whose workers then write to it; or make another one with the same "
        "arguments, and give it this one's state_dict()"
    )
    #: Whether samples say where they are from.
    _adds_index = False

    @explains_unknown
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
        if checkpointer is not None:
            raise TypeError("checkpointer= is not there: rb.dumps(path) saves a buffer as a whole, in one format")
        check_prefetch(prefetch, batch_size, shared)
        check_dim_extend(dim_extend)
        self._parts = BufferParts(
            made_of(storage, Storage, lambda: ListStorage(1000)),
            made_of(sampler, Sampler, RandomSampler),
            made_of(writer, Writer, self._default_writer),
            TransformChain(),
        )
        if self.sampler.drop_last and batch_size is None:
            raise ValueError("a sampler with drop_last needs the buffer's batch_size")
        if shared and isinstance(self.storage, TensorStorage):
            self.storage.share(f"{type(self).__name__}(shared=True)")
        if transform is not None or transform_factory is not None:
            made = transform if transform_factory is None else transform_factory()
            self._parts.transforms.insert(0, made, self)
        self._batch_size = batch_size
        self.dim_extend = dim_extend
        self.rate_limiter = rate_limiter
        self._sources = Sources()
        self._intake = Intake(self._parts, self._sources)
        self._drawing = Drawing(
            self._parts,
            self._sources,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            adds_index=self._adds_index,
            prefetch=prefetch,
        )
        self._editing = Editing(self._parts, self._sources, self._intake, self._drawing)
        self.set_rng(generator)
        self._num_sampled = 0
        #: Whether the last sample was the end of a pass.
        self._ran_out = False

    def _default_writer(self) -> Writer:
        return RoundRobinWriter()

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        return self._parts.storage

    @property
    def sampler(self) -> Sampler:
        return self._parts.sampler

    @property
    def writer(self) -> Writer:
        return self._parts.writer

    @property
    def transform(self) -> TransformChain:
        """Those that are called with samples, and with what is written."""
        return self._parts.transforms

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def set_sampler(self, sampler: Sampler) -> None:
        self._drawing.drop_prepared()
        self._parts.sampler = sampler

    def set_writer(self, writer: Writer) -> None:
        self._parts.writer = writer

    def set_storage(self, storage: Storage) -> None:
        if len(self):
            raise RuntimeError("this buffer has data; make another one for another storage")
        self._drawing.drop_prepared()
        self._parts.storage = storage
        self._editing.begin()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Random numbers follow from this generator's next one, or from torch's own."""
        self._drawing.set_rng(generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """Also call this with every sample, and its ``inv``, if it has one, with what is written.

        ``invert``: the other way round; a function is then called with what is written alone.
        """
        return self.insert_transform(len(self.transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> ReplayBuffer:
        """As ``append_transform``, before the ``index``-th. What was written before is not changed by it."""
        transform = Inverted(transform) if invert else checked_transform(transform)
        if inverts(transform) and self._sources.is_writing_elsewhere:
            raise RuntimeError(
                f"workers are writing to this buffer, and would not call the inv of {type(transform).__name__}: append "
                "it before collector.start()"
            )
        self.transform.insert(index, transform, self)
        self._drawing.drop_prepared()
        return self

    @property
    def changes_what_is_written(self) -> bool:
        """Whether a transform does something to frames before they are stored."""
        return self._parts.transforms.changes_what_is_written

    def require_ids(self, frames: TensorDictBase) -> None:
        """Of frames ``[n]`` of several envs: that transforms which look ahead can tell these apart."""
        self._parts.transforms.require_ids(frames)

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def write_count(self) -> int:
        """Frames that were ever written."""
        return self._intake.write_count

    @property
    def num_sampled(self) -> int:
        """Frames that were ever sampled."""
        return self._num_sampled

    def stats(self) -> dict[str, Any]:
        """Counts; see "Monitoring" in the docs."""
        written, sampled = self.write_count, self._num_sampled
        counts = {"size": len(self), "capacity": self.storage.max_size, "write_count": written, "num_sampled": sampled}
        return {**counts, "samples_per_insert": sampled / written if written else 0.0}

    def __repr__(self) -> str:
        parts = ", ".join(type(part).__name__ for part in (self.storage, self.sampler, self.writer))
        return f"{type(self).__name__}({parts}, {len(self):,} of {self.storage.max_size:,} frames)"

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """One frame, or one step of several envs (``ndim=2``); its index, or None while a transform holds it back."""
        if isinstance(self.storage, TensorStorage):
            data = as_many_frames(data, self.storage.ndim - 1)
        index = self.extend(self.storage.one_step(data, self.dim_extend)).reshape(-1)
        return (index if self.storage.ndim > 1 else index[0]) if len(index) else None

    def extend(self, data: Any) -> torch.Tensor:
        """Many: the first dimension of a TensorDict, a tensor, or tensors in a dict; or a list. Their indices."""
        data = as_many_frames(data, self.storage.ndim)
        self._intake.is_nobodys()
        with self._intake.lock:
            data = self._parts.transforms.inverted(data, self.storage, self.dim_extend)
            return torch.zeros(0, dtype=torch.int64) if data is None else self._extend(data)

    def _extend(self, data: Any) -> torch.Tensor:
        if isinstance(data, (list, tuple)):
            if len(data) and isinstance(self.storage, TensorStorage):
                data = stacked(data)
            elif isinstance(data, tuple):
                data = list(zip(*data, strict=True))
        if not len(data):
            raise RuntimeError("extend was given nothing: 0 frames")
        if isinstance(data, list):
            return self._intake.store([data]).reshape(-1)
        rows = self.storage.by_env(data, self.dim_extend)
        if self.storage.ndim > 1:
            return self._intake.store(rows)
        self.transform.require_equal_rows(self.storage, rows[0])
        return self._intake.store(rows).reshape(-1)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Other frames instead of these, or other values of some of their keys. ``index`` is what ``rb[index]`` takes.

        They count as new: a prioritised sampler gives them the highest priority. Keys alone are changed with
        ``set_at_``, which leaves priorities as they are.
        """
        if is_key(index):
            self.set_(index, data)
        else:
            self._editing.replace(index, data, self._adds_index)

    def set_(self, key: Any, value: Any) -> ReplayBuffer:
        """Other values of a key, for all frames, in the order of ``rb[:]``."""
        return self.set_at_(key, value, slice(None))

    def set_at_(self, key: Any, value: Any, index: Any) -> ReplayBuffer:
        """Other values of a key, for these frames."""
        self._editing.set_key(key, value, index)
        return self

    def update_(self, data: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None) -> ReplayBuffer:
        """Other values of the keys that ``data`` has (or ``keys_to_update``), for all frames."""
        self._editing.update(data, keys_to_update)
        return self

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all frames."""
        self._drawing.drop_prepared()
        with self._intake.lock, self._drawing.lock:
            written = 0 if empty_write_count else self.write_count
            self.storage.clear()
            self._intake.count_from(written)
            self.sampler.empty()
            self.writer.empty()
            self._parts.transforms.clear()

    # -- collectors ------------------------------------------------------------------------------------------------

    def attach(self, source: Source) -> None:
        """A collector writes to this buffer from now on."""
        self._sources.attach(source)

    def may_write(self) -> bool:
        """Whether the rate limiter lets collectors go on."""
        return self.rate_limiter is None or self.rate_limiter.may_write(self.write_count, self._num_sampled)

    def write_rows(self, rows: Any, first_track: int | None = None) -> torch.Tensor:
        """Add frames ``[envs, steps]``, each env's behind its earlier ones. How collectors write.

        ``first_track``: which of the buffer's envs the first row is.
        """
        return self._intake.write_rows(rows, first_track)

    def write_mixed(self, frames: TensorDictBase, env_index: np.ndarray) -> None:
        """Add frames ``[n]`` of many envs, of each in order; ``env_index`` says whose."""
        self._intake.write_mixed(frames, env_index)

    def prepare_tracks(self, num_tracks: int) -> None:
        """For a collector of so many envs: give each a track of its own, and end what was under way in them."""
        self._intake.prepare_tracks(num_tracks)

    def share_tracks(self, fields: Sequence[Field], num_tracks: int) -> None:
        """As ``prepare_tracks``, in memory that a collector's workers can write to."""
        self._intake.share_tracks(fields, num_tracks)

    def end_tracks(self, first_track: int, count: int, num_envs: int) -> None:
        """Whoever wrote to these, of ``num_envs`` envs, will not go on with the trajectories that it was in."""
        self._intake.end_tracks(first_track, count, num_envs)

    def next_traj_id(self, writer: str) -> int:
        """From where on trajectory ids are free for a collector; 0 if it was the last that asked and wrote."""
        return self._intake.next_traj_id(writer)

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
        drawn = self._drawing.take(size, size == self._batch_size)
        self._ran_out = drawn.ends_pass
        self._num_sampled += len(drawn.slots)
        return (drawn.data, drawn.info) if return_info else drawn.data

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether there is enough for a batch."""
        size = self._batch_size if batch_size is None else batch_size
        return size is not None and self._may_sample(size, wait=True)

    def _await(self, size: int, wait: bool, timeout: float | None) -> None:
        began = time.monotonic()
        self._sources.raise_failure()  # also where there is enough: who waits for new frames must know that none come
        while not self._may_sample(size, wait):
            self._sources.raise_failure()
            if not self._sources.is_running and (self._sources or not wait) and not self._may_sample(size, wait):
                self._sources.raise_failure()
                limit = "" if self.rate_limiter is None else f" ({self.rate_limiter})"
                raise RuntimeError(
                    f"{size} frames cannot be sampled{limit}: {self.write_count:,} were written, {len(self):,} are "
                    f"there, {self._num_sampled:,} were sampled, and no collector is writing any more"
                )
            waited = time.monotonic() - began
            self._sources.warn_who_waits(waited)
            if timeout is not None and waited > timeout:
                raise TimeoutError(
                    f"after {timeout} s there were not enough frames to sample {size}: {len(self):,} are in the buffer"
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _may_sample(self, size: int, wait: bool) -> bool:
        if wait and not self._drawing.can_draw(size):
            return False
        return self.rate_limiter is None or self.rate_limiter.may_sample(size, self.write_count, self._num_sampled)

    def __getitem__(self, index: Any) -> Any:
        """Frames by their index, as ``sample`` and ``extend`` give it; a slice of all, env by env; or a key of all."""
        return self[:][index] if is_key(index) else self._drawing.look_up(index)

    def __iter__(self) -> Iterator[Any]:
        """Samples, until the sampler has given all (without replacement), or for ever."""
        if self._batch_size is None:
            raise RuntimeError("iterating needs the buffer's batch_size")
        self._ran_out = False
        while not self._ran_out:
            if self.sampler.drop_last and len(self) < self._batch_size:
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
        if isinstance(self.sampler, PrioritizedSampler) and self.storage.is_laid_out:
            with self._drawing.lock:
                self.sampler.update_priority(self.storage.tracks.window(), index, priority)

    # -- saving ----------------------------------------------------------------------------------------------------

    def dumps(self, path: Any) -> None:
        """Save to a folder: beside what is there, which is replaced at the end, at once.

        Workers may go on writing: what was committed when it began is in it, but for what they overwrite meanwhile.
        """
        self._drawing.drop_prepared()
        with self._unchanged(), self._drawing.lock:
            save_folder(path, self.storage, self._about(), self._parts.transforms.held())

    dump = save = dumps

    def loads(self, path: Any, *, allow_pickle: bool = False) -> None:
        """Load what ``dumps`` saved, instead of what is there.

        Args:
            allow_pickle: a ``ListStorage`` is saved as a pickle, which runs whatever it says: only if you know who
                wrote it.
        """
        about, restore, held = read_folder(path, self.storage, allow_pickle)
        self._restore(about, restore, held)

    load = loads

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors, arrays and numbers."""
        self._drawing.drop_prepared()
        with self._unchanged(), self._drawing.lock:
            state = {"storage": storage_state(self.storage), "about": self._about()}
            held = self._parts.transforms.held()
        return {**state, "held": held} if held else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what ``state_dict`` gave, instead of what is there."""
        if not isinstance(state_dict, Mapping) or not {"about", "storage"} <= state_dict.keys():
            raise mismatch(type(self).__name__, state_dict, "the state of a replay buffer")
        restore = functools.partial(restore_storage, self.storage, state_dict["storage"])
        self._restore(state_dict["about"], restore, state_dict.get("held", {}))

    def _unchanged(self) -> AbstractContextManager[Any]:
        """While frames are held back: what is stored and what is not yet must be of the same moment."""
        return self._intake.lock if self._parts.transforms.can_hold else nullcontext()

    def _about(self) -> dict[str, Any]:
        window = self.storage.tracks.window() if self.storage.is_laid_out else None
        return {
            "num_sampled": self._num_sampled,
            "write_count": self.write_count,
            "rng": self._drawing.rng.bit_generator.state,
            "sampler": None if window is None else self.sampler.state_dict(window),
        }

    def _restore(
        self, about: Mapping[str, Any], restore: Callable[[], None], held: Mapping[int, Mapping[str, Any]]
    ) -> None:
        if self._sources.is_running:
            raise RuntimeError("a collector is writing to this buffer; load before start()")
        self._drawing.drop_prepared()
        self._intake.is_nobodys()
        num_sampled, write_count = int(about["num_sampled"]), int(about["write_count"])
        with self._intake.lock, self._drawing.lock:
            self._drawing.rng.bit_generator.state = about["rng"]
            self.sampler.empty()
            self.writer.empty()
            restore()
            self._parts.transforms.clear()
            self._parts.transforms.hold(held)
            if about["sampler"] is not None and self.storage.is_laid_out:
                self.sampler.load_state_dict(about["sampler"], self.storage.tracks.window())
        self._num_sampled = num_sampled
        self._intake.count_from(write_count)

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Nothing to do: a collector's workers get what they need when they start."""
        return self

"""BaseCollector: what every collector is, whatever it runs on.

A subclass says how to get the next batch (``_collect``), how to close what it holds (``_close``), and what it can save.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from swath.collectors.background import Batches, InBackground
from swath.collectors.budget import Budget, Progress
from swath.collectors.changeable import ChangeableArguments
from swath.collectors.episodes import TellsOfEpisodes
from swath.collectors.front_door import show_arguments
from swath.collectors.one_thread import OneThread
from swath.collectors.outside_state import OutsideState
from swath.collectors.reporting import Reportable
from swath.collectors.standing import TellsWhereItStands
from swath.copying import NotCopied
from swath.data.buffer_writer import BufferWriter, buffer_writer
from swath.data.postprocessing import Postprocessing
from swath.data.sequences import looks_ahead, require_ids
from swath.data.trajectories import TrajectoryAssembler, pieces_of_envs
from swath.errors import CollectorClosed, EnvClosed, EnvError, NoLength, WorkerError, add_note, told
from swath.insight.publishing import publish, withdraw
from swath.keys import show
from swath.rollout.structure import Structure
from swath.timeline.recorder import Gauge, Kind

#: Held for a moment by who closes a collector: of two threads, one does. (Also in ``__del__``, wherever that comes.)
_closing = threading.RLock()
_SECONDS_BETWEEN_LOOKS = 0.002


class BaseCollector(
    InBackground, TellsOfEpisodes, TellsWhereItStands, Reportable, ChangeableArguments, NotCopied, IterableDataset
):
    """An iterable over batches of experience. Use one of its subclasses."""

    _inner = ("collect_one",)
    _owns = "envs, and workers or memory, that it uses alone"
    _instead_of_a_copy = "make another one where it is to be; to go on from here, give it this one's state_dict()"

    def __init__(
        self,
        budget: Budget,
        postprocessing: Postprocessing,
        assembler: TrajectoryAssembler | None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
    ) -> None:
        self._begin_episodes()
        self._budget = budget
        self._writes_steps = replay_buffer is not None and not extend_buffer
        self._postprocessing = self._checked(postprocessing)
        self._assembler = assembler
        self._gathered: TensorDictBase | None = None  # the batch that is being delivered
        self.replay_buffer = replay_buffer
        #: By which a buffer knows whose frames it has.
        self._writer_name = uuid.uuid4().hex
        self._buffer_writer: BufferWriter | None = None
        if replay_buffer is not None:
            self._buffer_writer = buffer_writer(replay_buffer, self._num_envs, extend_buffer, assembler is not None)
        if self._structure is not None and self._structure.has_objects:
            self._refuse_for_objects(self._structure)
        self._progress = Progress()
        self._closed = False
        self._closer: int | None = None  # the thread that is closing it
        self._iterator: Iterator[Any] | None = None
        self._one_thread = OneThread(type(self).__name__)
        #: What was complete of the batch that an error ended, or None.
        self.partial_batch: TensorDictBase | None = None

    def _refuse_for_objects(self, structure: Structure) -> None:
        what = f"{show(min(structure.things))} is no tensor of a fixed shape, which"
        if self._assembler is not None:
            raise EnvError(f"{what} trajs_per_batch cannot put together; collect without it")
        if self._stores_frames:
            raise EnvError(f"{what} a replay buffer of swath cannot store; leave it out of the env's specs")

    @property
    def init_random_frames(self) -> int:
        """How many of the first frames get random actions."""
        return self._init_random_frames

    # -- for subclasses --------------------------------------------------------------------------------------------

    _init_random_frames = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls._config_class is not None:
            show_arguments(cls, documented_by=[*cls.__mro__[1:], *cls._config_class.__mro__])

    def _is_made(self) -> None:
        """Called last by constructors: from now on others see it (``swath top``), until it is closed."""
        publish(self)

    @property
    def _num_envs(self) -> int:
        """All of them."""
        return self._budget.num_envs

    #: Of the batch that ``_collect`` gave: the number of its first env.
    _first_env = 0

    #: What the env's keys are besides leaves of nested TensorDicts, if anything.
    _structure: Structure | None = None

    def _collect(self) -> TensorDictBase:
        """The next batch, as the rollout makes it."""
        raise NotImplementedError

    def _objects(self, batch: TensorDictBase) -> Mapping[int, Any]:
        """What is in the last batch by number: whatever is no tensor of a fixed shape."""
        return {}

    def _restore(self, batch: TensorDictBase, objects: Mapping[int, Any]) -> TensorDictBase:
        """A batch in the form that the env's own TensorDicts have."""
        if self._structure is None or self._stores_frames:  # flat leaves
            return batch
        return self._structure.restore(batch, objects)

    def _parts(self, batch: Any, raw: TensorDictBase) -> Sequence[Any]:
        """A batch as each env, or batch of envs, made it; for buffers that are not swath's."""
        return [batch]

    @property
    def _stores_frames(self) -> bool:
        """Whether batches go into a buffer of swath."""
        return self._buffer_writer is not None and self._buffer_writer.stores_frames

    def _put(self, batch: Any, raw: TensorDictBase) -> None:
        """Write a batch to the replay buffer."""
        assert self._buffer_writer is not None
        self._buffer_writer.write(batch, raw, self._first_env, self._parts(batch, raw))

    def _keep_ids_apart(self) -> None:
        """Trajectories that others have written to the buffer keep their ids to themselves."""
        next_traj_id: Any = getattr(self.replay_buffer, "next_traj_id", None)
        if next_traj_id is not None and (first := next_traj_id(self._writer_name)):
            self._begin_ids_at(first)

    def _begin_ids_at(self, first: int) -> None:
        """Draw no trajectory id below this any more."""
        raise NotImplementedError

    def _work(self) -> Any:
        """What ``start`` does in the background."""
        assert self._buffer_writer is not None
        return Batches(self, self._buffer_writer.may_write)

    def _close(self, close_env: bool) -> None:
        """Free what the collector holds; called once."""
        raise NotImplementedError

    def _salvage(self) -> TensorDictBase | None:
        """What is left of a batch that failed."""
        return None

    def _left_over(self) -> Iterable[TensorDictBase]:
        """As ``_salvage``: batches that can be put into a buffer one by one."""
        left = self._salvage()
        return [] if left is None else [left]

    def _assemble(self, assembler: TrajectoryAssembler, batch: TensorDictBase) -> None:
        """Let episodes be put together; of the frames of each env by themselves."""
        envs = self._envs_of_mixed(batch)
        for piece in [batch] if envs is None or not len(envs) else pieces_of_envs(batch, envs):
            assembler.add(piece)

    def _give_up_episodes(self) -> None:
        """A batch was interrupted, and may be lost: episodes with a gap must not go on."""

    @property
    def _frames(self) -> int:
        return self._progress.frames

    @_frames.setter
    def _frames(self, frames: int) -> None:
        self._progress.frames = frames

    @property
    def _iter(self) -> int:
        return self._progress.batches

    @_iter.setter
    def _iter(self, batches: int) -> None:
        self._progress.batches = batches

    # -- iterating -------------------------------------------------------------------------------------------------

    @property
    def total_frames(self) -> int | float:
        return float("inf") if self._budget.total_frames is None else self._budget.total_frames

    @property
    def frames_per_batch(self) -> int:
        """Steps per batch of each env."""
        return self._budget.steps_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames per batch over all envs."""
        return self._budget.frames_per_batch

    @property
    def _complete(self) -> bool:
        return self._budget.is_spent(self._frames)

    def __iter__(self) -> Iterator[Any]:
        """Batches until ``total_frames``; then the collector closes. A ``break`` leaves it open, to go on later."""
        self._require_open_unless(self._complete)
        if self.is_running():
            raise self._is_in_background()
        return self.iterator()

    def _is_in_background(self) -> RuntimeError:
        return RuntimeError("this collector runs in the background (start()): sample its replay buffer instead")

    def _require_open_unless(self, may_be_closed: bool) -> None:
        is_closed = self._closed  # looked at first: if something has failed, that was known before it was closed
        self._raise_failure()
        if is_closed and not may_be_closed:
            raise self._is_closed()

    def _is_closed(self) -> CollectorClosed:
        return CollectorClosed(
            f"this {type(self).__name__} was shut down after {self._frames:,} frames; make a new one"
        )

    def iterator(self) -> Iterator[Any]:
        """The generator behind iteration."""
        self._keep_ids_apart()
        while self._has_more:
            batch = self._next_batch()
            if batch is not None or self.replay_buffer is not None:
                yield batch
        self.shutdown()

    def next(self) -> Any:
        """The next batch, or None after the last."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator, None)
        except RuntimeError:  # such as that it is not this thread's turn: the generator has ended with it
            self._iterator = None
            raise

    def collect_one(self) -> bool:
        """For the background: another batch; False when that was the last one."""
        if self._has_more:
            self._next_batch()
        return self._has_more

    @property
    def _has_more(self) -> bool:
        return not self._complete or (self._assembler is not None and self._assembler.has_batch)

    def _next_batch(self) -> Any:
        """A batch for the consumer; None if ``total_frames`` came before enough episodes were complete."""
        background = self._background
        in_background = background is not None and background.is_running()
        if background is not None and in_background and not background.is_this_thread():
            raise self._is_in_background()  # it was started after this iterator was
        with self._one_thread:
            self._progress.begin_batch(in_background)
            if self._trace is not None:
                self._trace.next_begins(not in_background)
            try:
                return self._make_batch()
            except BaseException:
                self._progress.end_batch(is_whole=False)
                if self._trace is not None:
                    self._trace.next_ends()
                raise

    def _batch_is_made(self) -> None:
        """The last thing of a batch; what is raised here loses it as anything before does."""
        self._progress.end_batch()
        if self._trace is not None:
            self._trace.next_ends()

    def _make_batch(self) -> Any:
        post = self._postprocessing
        self._gathered = None
        outside = OutsideState.now()
        try:
            if post.pre_collect_hook is not None:
                post.pre_collect_hook()
            with self._recorded(self._gathering):
                raw = self._gather()
            with self._recorded(Kind.HAND_OVER):
                batch = None if raw is None else self._hand_over(raw)
            self._batch_is_made()
        except BaseException as error:
            if self._closed and isinstance(error, (WorkerError, EnvClosed, CollectorClosed)):  # by another thread
                raise self._is_closed() from None
            outside.put_back()  # Ctrl-C may have come while that was being done
            self._keep_what_is_left(error, self._gathered)
            if self._background is not None and self._background.is_this_thread():
                self._background.fail(error)  # before it is closed: that is not what happened
            if not isinstance(error, Exception):
                self._give_up_episodes()
            self._iterator = None  # its generator ends with this
            if isinstance(error, Exception):  # Ctrl-C leaves the collector open, to go on with new episodes
                self.shutdown(timeout=1.0, raise_on_error=False)  # the error must not wait for long
            self._gathered = None
            raise
        self._gathered = None
        return batch

    def _gather(self) -> TensorDictBase | None:
        assembler = self._assembler
        if assembler is None:
            batch = self._count(self._collect())
        else:
            while (batch := assembler.pop()) is None and not self._complete:
                self._assemble(assembler, self._count(self._collect()))
        self._gathered = batch
        return batch

    @property
    def _mixes_envs(self) -> bool:
        """Whether frames of several envs lie behind one another in a batch."""
        return False

    def _envs_of_mixed(self, batch: TensorDictBase) -> np.ndarray | None:
        """Of each frame, where those of several envs lie behind one another."""
        envs = self._envs_in(batch) if self._mixes_envs else None
        if envs is not None and len(envs) != batch.batch_size.numel():
            return None  # what is left of a batch that failed has a row for each env
        return envs

    def _hand_over(self, raw: TensorDictBase) -> Any:
        """What the consumer gets of a batch; None where the replay buffer gets it."""
        post, objects = self._postprocessing, self._objects(raw)  # before it is split and padded
        if self._mixes_envs and self._assembler is None and looks_ahead(post.postproc):
            require_ids(raw, f"postproc {post.postproc}")
        batch = post.apply(raw, lambda whole: self._restore(whole, objects))
        if post.post_collect_hook is not None:
            post.post_collect_hook(batch)
        if self.replay_buffer is None:
            return batch
        self._put(batch, raw)
        return None

    def _count(self, batch: TensorDictBase) -> TensorDictBase:
        mask = batch.get(("collector", "mask"), None)  # of a batch that some workers did not complete
        self._frames += batch.batch_size.numel() if mask is None else int(mask.sum())
        self._iter += 1
        self._count_lags(batch)
        self._count_episodes(batch)
        marks_ends = self._postprocessing.set_truncated
        return self._postprocessing.check(batch, self._envs_of_mixed(batch) if marks_ends else None)

    def _count_lags(self, batch: TensorDictBase) -> None:
        """How old the frames of a batch are, where that is not known when they come."""

    def _keep_what_is_left(self, error: BaseException, raw: TensorDictBase | None) -> None:
        """``raw`` is the batch, if it was whole and what came after it failed."""
        if raw is None and self.replay_buffer is not None and isinstance(error, Exception):
            self._store_what_is_left(error)
            return
        try:
            left_over = self._salvage() if raw is None else raw
            self.partial_batch = None if left_over is None else self._restore(left_over, self._objects(left_over))
        except Exception:  # what failed first is what the user must see
            self.partial_batch = None
        if left := 0 if self.partial_batch is None else self.partial_batch.batch_size.numel():
            delivered = self._frames - (0 if raw is None else left)
            add_note(
                error,
                f"swath: {delivered:,} frames were delivered before this; {left:,} more, complete up to the failing "
                "step, are in collector.partial_batch",
            )

    def _store_what_is_left(self, error: Exception) -> None:
        """An env, say, has ended the collector: what was complete before goes to the buffer, as a batch would have."""
        try:
            for left in self._left_over():
                if not left.batch_size.numel():
                    continue
                counted = self._count(left)
                if self._assembler is None:
                    self._hand_over(counted)
                    continue
                self._assemble(self._assembler, counted)
                while (whole := self._assembler.pop()) is not None:
                    self._hand_over(whole)
        except Exception as another:  # what failed first is what the user must see
            add_note(error, f"swath: what was complete before this could not be stored: {told(another)}")

    def __len__(self) -> int:
        """The exact number of batches."""
        num_batches = self._budget.num_batches
        if num_batches is None:
            raise NoLength("a collector without total_frames has no length: it never ends")
        if self._assembler is not None:
            raise NoLength("with trajs_per_batch the number of batches depends on the episodes")
        return num_batches

    # -- life cycle ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where the collector stands; never blocks."""
        seconds = self._progress.seconds
        return {
            "running": self.is_running(),
            "frames": self._frames,
            "batches": self._iter,
            "total_frames": self.total_frames,
            "completed": self._complete,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "seconds_collecting": seconds,
            "fps": self._frames / seconds if seconds else 0.0,
            "failure": self._failure_text(),
            **self._episode_stats(),
        }

    def getattr_rb(self, name: str) -> Any:
        return getattr(self.replay_buffer, name)

    def gauges(self) -> dict[Gauge, float]:
        gauges = {Gauge.FRAMES: float(self._frames)}
        if self.replay_buffer is not None and hasattr(self.replay_buffer, "__len__"):
            gauges[Gauge.BUFFER_FRAMES] = len(self.replay_buffer)
        return gauges

    # -- the end ---------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close; harmless when called again. When this returns, it is closed, also if another thread has begun it."""
        seconds = 5.0 if timeout is None else timeout
        with _closing:
            is_over = self.__dict__.get("_closed", True)
            if not is_over:
                self._closed, self._closer = True, threading.get_ident()
        if is_over:
            self._wait_for_closer(seconds)
            return
        try:
            self._end(seconds, close_env)
        except Exception:
            if raise_on_error:
                raise
        finally:
            self._closer = None

    def _end(self, seconds: float, close_env: bool) -> None:
        """Nobody does it again: what it has is freed, also if Ctrl-C comes, or a warning is an error, before that."""
        try:
            withdraw(self)
            if self._background is not None:
                self._background.stop(seconds)
            if self._trace is not None:
                self._trace.collector_closes(self)
        finally:
            try:
                self._tell_the_last()
            finally:
                self._close(close_env)

    def _wait_for_closer(self, seconds: float) -> None:
        background = self.__dict__.get("_background")
        if background is not None and background.is_this_thread():  # which the closer may be waiting for
            return
        deadline = time.monotonic() + seconds
        while self.__dict__.get("_closer") not in (None, threading.get_ident()) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        self._say_that_it_is_gone()
        # An env that was handed over ready-made may be in use elsewhere.
        self.shutdown(close_env=self.__dict__.get("_made_env", False), raise_on_error=False)

    def _say_that_it_is_gone(self) -> None:
        background = self.__dict__.get("_background")
        if background is not None:
            background.owner_is_gone()

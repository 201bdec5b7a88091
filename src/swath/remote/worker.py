"""What runs in a worker process: a host of collectors whose batches go into shared memory, and the orders it follows.

Envs without a batch size of their own share a lane of the host, and so a policy call; others have one each.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

from swath.data.episode_backlog import EpisodeBacklog
from swath.data.episodes import Ended, EpisodeTally, Frames
from swath.data.memory import FrameLayout, FrameMemory
from swath.data.postprocessing import Stored
from swath.data.shared_track_writer import SharedTrackWriter
from swath.envs.base import EnvBase
from swath.envs.serial import side_by_side
from swath.errors import add_note, told
from swath.keys import Key
from swath.process.channel import Channel, pack
from swath.process.memory import map_and_close
from swath.remote.blocks import BlockLayout
from swath.remote.host import CollectorHost, Lane
from swath.remote.requests import (
    INTO_BUFFER,
    CollectRequest,
    CollectResult,
    WorkerDescription,
    WorkerSpec,
    random_in_rows,
)
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.delivery import TRAJ_IDS
from swath.timeline.recorder import Kind, Recorder
from swath.workers.spec import Incarnation
from swath.workers.status_page import Ledger, StatusPage

#: How late episodes are told of that are in the buffer, while a worker has other requests.
_SECONDS_BETWEEN_COUNTS = 0.05


class _Aborted(Exception):
    """The batch under way is not wanted any more."""


class WorkerControl:
    """``rollout.loop.Control`` over a worker's status page and channel."""

    def __init__(self, page: StatusPage, read: Callable[[], None]) -> None:
        self.waiting = page.waiting
        self.beat = page.beat
        self.stop_requested = False
        self.policy_version = 0
        self.recorder: Recorder | None = None
        self.first_step = 0
        self._page = page
        self.read = read
        #: Of the only lane; several lanes commit their batch as a whole.
        self.ids: TrajectoryIds | None = None

    def commit(self, num_steps: int) -> None:
        if self.ids is not None:
            self._page.write(next_traj_id=self.ids.next_id, committed=self.first_step + num_steps)

    #: A worker has one thread, which reads its messages between two steps.
    collecting = nullcontext

    def run(self, task: Callable[[], Any]) -> Any:
        return task()


class Worker:
    """Follows orders until it is told to leave, or its owner is gone."""

    def __init__(self, channel: Channel, page: StatusPage, spec: WorkerSpec, incarnation: Incarnation) -> None:
        self._channel = channel
        self._page = page
        self._spec = spec
        self._incarnation = incarnation
        self._control = WorkerControl(page, self._read_waiting)
        self._orders: deque[CollectRequest] = deque()
        self._current: CollectRequest | None = None
        self._unwanted = False
        self._receivers: Mapping[str, Any] = {}
        self._blocks: dict[int, tuple[torch.Tensor, BlockLayout]] = {}
        self._views: dict[tuple[int, tuple[int, ...]], dict[Key, torch.Tensor]] = {}
        self._buffer: SharedTrackWriter | None = None
        #: Of what is written to the buffer; others are counted by who gets them.
        self._tally = EpisodeTally()
        self._backlog = EpisodeBacklog(self._tally)
        self._ended: list[Ended] = []
        self.leaving = False
        self._made: list[EnvBase] = []
        self._host = CollectorHost(spec.worker, [], self._made, self._control)

    # -- making ----------------------------------------------------------------------------------------------------

    def build(self) -> WorkerDescription:
        plan = self._spec
        if plan.init_fn is not None:
            plan.init_fn()
        envs = self._made
        plan.make_envs(envs)
        self.policy = plan.policy if plan.policy_factory is None else plan.policy_factory()
        if plan.complete_env is not None:
            envs[:] = [plan.complete_env(env, self.policy) for env in envs]
        merged = len(envs) > 1 and all(not env.batch_size for env in envs)
        if merged:
            shared = side_by_side(envs)
            lanes = [(shared, plan.members)]
        else:
            lanes = [(env, range(member, member + 1)) for env, member in zip(envs, plan.members, strict=True)]
        for env, members in lanes:
            env.first_index = members.start if not envs[0].batch_size else 0
            self._host.lanes.append(self._make_lane(env, members))
        made = self._host.lanes
        self._control.ids = made[0].ids if len(made) == 1 else None
        runner = self._host.first.runner
        return WorkerDescription(
            env_size=envs[0].batch_size,
            fields=tuple(runner.fields),
            env=str(envs[0]),
            merged=merged,
            has_weights=self._host.has_weights,
            structure=runner.structure,
        )

    def _make_lane(self, env: EnvBase, members: range) -> Lane:
        plan = self._spec
        # Ids that are equal to the member's number, modulo the stride, are this lane's.
        rounds = max(0, -(-(self._incarnation.first_traj_id - members.start) // plan.id_stride))
        ids = TrajectoryIds(members.start + rounds * plan.id_stride, plan.id_stride)
        envs_per_member = max(1, env.batch_size.numel() // len(members))
        steps = -(-plan.frames // envs_per_member)
        try:
            collector = plan.collector_class(
                env,
                self.policy,
                frames_per_batch=steps * env.batch_size.numel(),
                total_frames=-1,
                worker_idx=plan.worker,
                traj_pool=ids,
                control=self._control,
                **plan.collector_kwargs,
            )
        except Exception as error:
            if len(members) > 1:
                add_note(
                    error,
                    f"swath: {len(members)} envs share this worker and a policy call, so the policy gets batches of "
                    f"{len(members)}; num_workers={plan.num_members} gives each env a worker of its own",
                )
            raise
        if env.objects is not None:
            env.objects.number_from(members.start, plan.num_members)
        return Lane(collector, members, ids)

    def connect(self, receivers: Mapping[str, Any]) -> None:
        """Take weights from these schemes, by the id of the model."""
        self._receivers = receivers
        for model_id, scheme in receivers.items():
            scheme.init_on_receiver(model_id=model_id, context=self, worker_idx=self._spec.worker)
            scheme.connect(worker_idx=self._spec.worker)

    def get_models(self, model_id: str) -> list[Any]:
        """Called by a scheme: what it puts weights into."""
        return self._host.get_models(model_id)

    def weights_applied(self, model_id: str, version: int | None) -> None:
        """Called by a scheme, before it acknowledges."""
        self._host.weights_applied(model_id, version)
        self._page.write(policy_version=self._control.policy_version)

    # -- orders ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while not self.leaving:
            if self._page.waiting[0]:
                self._drain()
            elif self._orders:
                self._collect(self._orders.popleft())
            else:
                self._handle(*self._await_message())

    def _await_message(self) -> tuple[Any, ...]:
        recorder = self._control.recorder
        if recorder is None:
            return self._channel.receive()
        with recorder.waiting(Kind.WAIT_FOR_REQUEST, recorder.last_end_s):
            return self._channel.receive()

    def _recorded(self, kind: Kind, count: float = 0) -> AbstractContextManager[None]:
        recorder = self._control.recorder
        if recorder is None:
            return nullcontext()
        # Between two batches nothing is left out.
        return recorder.during(kind, count, recorder.last_end_s if self._current is None else None)

    def _on_trace(self, num_bytes: int) -> None:
        """Record what is done, in memory of the owner's."""
        self._control.recorder = Recorder(map_and_close(self._channel.receive_descriptor(), num_bytes))
        if self._current is not None:  # in the middle of a batch
            self._begin_recorded()

    def _begin_recorded(self) -> None:
        if (recorder := self._control.recorder) is not None:
            recorder.begin(Kind.COLLECT, recorder.last_end_s)

    def _on_untrace(self) -> None:
        self._control.recorder = None

    def _drain(self) -> None:
        self._page.waiting[0] = 0  # before reading, so that nothing is missed
        # What follows a "void" is for after the batch, and waits for it.
        while not self._unwanted and self._channel.has_message():
            self._handle(*self._channel.receive())

    def _read_waiting(self) -> None:
        """Between two steps: do what is asked."""
        self._drain()
        if self._unwanted or self.leaving:
            raise _Aborted

    def _handle(self, kind: str, *arguments: Any) -> None:
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_collect(self, order: tuple[Any, ...]) -> None:
        self._orders.append(CollectRequest(*order))

    def _on_map(self, number: int, layout: BlockLayout) -> None:
        self._blocks[number] = map_and_close(self._channel.receive_descriptor(), layout.num_bytes), layout

    def _on_buffer(
        self, layout: FrameLayout, tracks: range, by_env: bool, scratch: BlockLayout, processing: bytes | None
    ) -> None:
        """Batches are collected into ``scratch``, and from there written to the replay buffer."""
        memory = FrameMemory.of_descriptor(layout, self._channel.receive_descriptor())
        todo = None if processing is None else pickle.loads(processing)
        self._buffer = SharedTrackWriter(memory, tracks, by_env, Ledger(self._page), scratch.env_size, todo)
        self._blocks[INTO_BUFFER] = torch.empty(scratch.num_bytes, dtype=torch.uint8), scratch
        self._views.clear()

    def _on_forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._blocks.pop(number, None)
        self._views.clear()

    def _on_weights(self, model_id: str) -> None:
        scheme = self._receivers[model_id]
        with self._recorded(Kind.WEIGHTS):
            scheme.receive(timeout=scheme.timeout_s)

    def _on_void(self, undelivered: bool) -> None:
        """Nothing that was ordered before is wanted. Episodes of which frames are missing then do not go on."""
        self._orders.clear()
        self._unwanted = self._current is not None
        if undelivered:
            self._host.give_up()

    def _on_stop(self, number: int) -> None:
        """End an order after the steps that were taken; one that was not begun, without any."""
        if self._current is not None and self._current.number == number:
            self._control.stop_requested = True
        for order in [order for order in self._orders if order.number == number]:
            self._orders.remove(order)
            versions = [(0, self._control.policy_version)]
            ended = self._take_ended(now=True)
            nothing = CollectResult(number, [0] * len(self._host.lanes), versions, [], episodes=ended)
            self._channel.send("ready", *nothing)

    def _on_close(self) -> None:
        self.leaving = True

    def _on_call(self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        who = self if name in self._OWN_ANSWERS else self._host
        with self._recorded(Kind.CALL):
            self._channel.answer(number, lambda: getattr(who, name)(*args, **kwargs))

    def _collect(self, order: CollectRequest) -> None:
        self._begin_recorded()
        try:
            result = self._follow(order)
        finally:
            if (recorder := self._control.recorder) is not None:
                recorder.end()  # before its owner knows
        if result is not None:
            self._channel.send("ready", *result)

    def _follow(self, order: CollectRequest) -> CollectResult | None:
        """What came of it; None if nobody wants it, or it was said why there is none."""
        page, control = self._page, self._control
        self._current = order
        control.first_step = order.first_step
        started, cpu_s, switches = time.monotonic(), time.process_time(), _voluntary_switches()
        page.write(busy_since=started, beat=0)
        page.write(committed=order.first_step)  # before it is said what of: another order's is nothing to this one
        page.write(order=order.number)
        page.add(batches=1)
        steps: list[int] = []
        try:
            if order.anew:
                self._host.give_up()
            for lane, part, num_steps, random_frames in self._parts(order):
                steps.append(lane.collector.collect_into(part, num_steps, random_frames) if num_steps else 0)
            if order.block == INTO_BUFFER:
                with self._recorded(Kind.STORE):
                    self._write(order, steps)
        except _Aborted:
            page.write(beat=0)
            return None
        except BaseException as error:  # an env may call sys.exit, a postproc may raise
            self._give_up(order, error, steps)
            return None
        finally:
            self._current, self._unwanted, control.stop_requested = None, False, False
            now = time.monotonic()
            page.write(busy_since=0.0)
            page.add(busy_s=now - started, cpu_s=time.process_time() - cpu_s, switches=_voluntary_switches() - switches)
        objects = self._objects_of(order, steps)
        versions, fragments = self._after(order, steps)
        return CollectResult(order.number, steps, versions, fragments, objects, self._take_ended())

    def _parts(self, order: CollectRequest) -> list[tuple[Lane, dict[Key, torch.Tensor], int, int]]:
        """For each lane: where to write, how many steps, how many random frames."""
        memory, layout = self._blocks[order.block]
        key = order.block, order.steps
        if key not in self._views:
            self._views[key] = layout.leaves(memory, order.steps)
        leaves = self._views[key]
        parts = []
        first_row, num_rows = 0, self._host.num_envs
        for lane in self._host.lanes:
            start = order.members.start + lane.members.start - self._spec.members.start
            members = range(start, start + len(lane.members))
            part = layout.part(leaves, members, order.steps, order.first_step)
            rows = range(first_row, first_row + lane.num_envs)
            random_frames = random_in_rows(order.random_frames, rows, num_rows)
            parts.append((lane, part, order.steps[start] - order.first_step, random_frames))
            first_row = rows.stop
        return parts

    def _objects_of(self, order: CollectRequest, steps: list[int]) -> dict[int, Any]:
        """What goes with a batch because it is no tensor of a fixed shape; it is not needed here any more."""
        structure = self._host.first.runner.structure
        found: dict[int, Any] = {}
        if structure is None or not structure.has_objects:
            return found
        for (lane, part, _, _), taken in zip(self._parts(order), steps, strict=True):
            if taken:
                found |= structure.objects_of({key: leaf[:, :taken] for key, leaf in part.items()}, lane.objects)
        return found

    def _write(self, order: CollectRequest, steps: list[int]) -> None:
        """What was collected becomes part of the replay buffer."""
        assert self._buffer is not None
        rows_left = self._host.num_envs if order.num_rows is None else order.num_rows
        row = 0
        for (lane, part, _, _), taken in zip(self._parts(order), steps, strict=True):
            rows = min(lane.num_envs, rows_left)
            if taken and rows:
                self._count_episodes({key: leaf[:rows, :taken] for key, leaf in part.items()}, lane, row)
                self._buffer.write({key: leaf[:rows, :taken] for key, leaf in part.items()}, row, lane.runner.fragments)
            row, rows_left = row + lane.num_envs, rows_left - rows

    def _count_episodes(self, leaves: Mapping[Key, torch.Tensor], lane: Lane, first_row: int) -> None:
        """Of frames ``[rows, steps]`` that are to be written, of this worker's envs from the ``first_row``-th on."""
        if TRAJ_IDS not in leaves:
            return
        first = self._spec.members.start * (lane.num_envs // len(lane.members)) + first_row
        self._tally.fragments |= lane.runner.fragments
        frames, envs = Frames.of_leaves(leaves), np.arange(first, first + len(leaves[TRAJ_IDS]))
        self._backlog.add(frames, envs, 0, -1, self._tell_of)

    def _tell_of(self, ended: Ended, *_: Any) -> None:
        self._ended.append(ended)

    def _take_ended(self, now: bool = False) -> Ended | None:
        """What is told of with a result. To count takes as long for one request as for many."""
        if now or not self._orders or self._backlog.waits_longer_than(_SECONDS_BETWEEN_COUNTS):
            self._backlog.count(self._tell_of)
        ended, self._ended = self._ended, []
        return Ended.joined(ended) if ended else None

    def _after(self, order: CollectRequest, steps: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Put on the status page what the batch took; which versions acted in it, and what is no whole episode."""
        host, page = self._host, self._page
        env_s, policy_s = host.seconds
        page.write(env_s=env_s, policy_s=policy_s, next_traj_id=host.next_id)
        page.add(frames=sum(taken * lane.num_envs for lane, taken in zip(host.lanes, steps, strict=True)))
        page.add(steps=sum(steps))
        page.write(on_core=_share_on_core(page))
        page.write(beat=0)  # its steps are among the frames now
        versions = host.first.runner.versions
        if order.first_step:
            versions = [(max(step, 0) + order.first_step, version) for step, version in versions]
        return versions, host.new_fragments()

    def _give_up(self, order: CollectRequest, error: BaseException, steps: list[int]) -> None:
        """An env or the policy raised: say so, with what was complete before it, and leave."""
        lanes = self._host.lanes
        while_collecting = len(steps) < len(lanes)  # else it was a postproc
        if while_collecting:
            with suppress(Exception):
                steps.append(lanes[len(steps)].collector.salvage_into())
        steps += [0] * (len(lanes) - len(steps))
        if order.block == INTO_BUFFER and while_collecting:
            self._write_rest(order, error, steps)
        self._channel.send("failed", order.number, pack(error), [step + order.first_step for step in steps])
        self.leaving = True

    def _write_rest(self, order: CollectRequest, error: BaseException, steps: list[int]) -> None:
        """What was complete before an exception is part of the replay buffer, as of an order that was stopped there."""
        try:
            self._write(order, steps)
        except Exception as another:
            add_note(error, f"swath: what was complete before this could not be stored: {told(another)}")
        else:
            result = CollectResult(order.number, steps, *self._after(order, steps), episodes=self._take_ended(now=True))
            self._channel.send("ready", *result)

    # -- calls: what the host does not answer alone --------------------------------------------------------------------

    _OWN_ANSWERS = frozenset({"set_seed", "reset", "load_state_dict", "get_distant_attr", "stored", "examine"})

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        if self._buffer is not None:
            self._buffer.drop()
        return self._host.set_seed(seed, static_seed)

    def reset(self, members: Sequence[int], **kwargs: Any) -> list[int]:
        """Start anew; the ids of the trajectories that are cut by it."""
        cut = self._host.reset_members(members, **kwargs)
        if self._buffer is not None:  # what waits there to be whole
            self._buffer.drop(cut)
        return cut

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        self._host.load_state_dict(state, strict)
        self._page.write(policy_version=self._control.policy_version)

    def get_distant_attr(self, path: str) -> Any:
        return self._host.get_distant_attr(path)[0]

    def stored(self, processing: bytes) -> Stored:
        """What a batch of one member becomes in a replay buffer: tried out with a real one, which is thrown away."""
        lane = self._host.lanes[0]
        batch = lane.collector.flat_rollout()
        lane.collector.reset()
        own = batch[0] if len(lane.members) > 1 else batch
        return pickle.loads(processing).try_out(own)

    def examine(self, look: Callable[[Any], Any]) -> Any:
        """What ``look`` finds out about the first collector; it may collect from it, and throw that away."""
        return look(self._host.first)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """After the step that is being taken; from another thread."""
        self.leaving = True
        self._page.waiting[0] = 1

    def close(self) -> None:
        for scheme in self._receivers.values():
            with suppress(Exception):
                scheme.shutdown()
        self._host.close()
        for env in self._made:
            with suppress(Exception):
                env.close(raise_if_closed=False)


def _share_on_core(page: StatusPage) -> float:
    """Of steps that wait; 0 where they compute (also if others have the core meanwhile)."""
    waits = page.integer("switches") >= page.integer("steps") / 2
    return min(1.0, page.seconds("cpu_s") / page.seconds("busy_s")) if waits and page.seconds("busy_s") else 0.0


def _voluntary_switches() -> int:
    """How often this process gave the core away because it had to wait."""
    import resource  # not on Windows, where there are no workers, but this is imported

    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

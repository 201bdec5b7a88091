"""One round of chaos: a collector, operations that follow from a seed, and the oracle's judgement of what came out."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from chaos_env import Board, signed_envs, signing_policy
from chaos_oracle import Frames, Wrong, check_frames, check_marks, check_story
from leaks import wait_until
from swath.collectors import AsyncBatchedCollector, AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage, TensorDictReplayBuffer
from swath.envs import ParallelEnv, SerialEnv
from swath.errors import BackgroundFailed, CollectorClosed, NodeLost, WorkerDied

KINDS = ("Collector", "MultiSync", "MultiAsync", "AsyncCollector", "AsyncBatched", "ParallelEnv", "Distributed")
#: Their policy is the very object that they were given.
_ONE_POLICY = ("Collector", "ParallelEnv", "AsyncBatched")
_RESTARTABLE = ("MultiSync", "MultiAsync", "AsyncCollector", "Distributed")
#: Operations, more often those that are here more often; some only mean something right behind another.
_ANYWHERE = 5 * ["update"] + 4 * ["ambush"] + 3 * ["kill", "fuse"] + 2 * ["meddle"]
_ANYWHERE += ["kill update", "save", "scribble", "calm"]
_ITERATING = 9 * ["next"] + 2 * ["reset", "partial", "reset kill next"] + ["seed", "seed kill", "load", "again"]
_BACKGROUND = 8 * ["wait"] + 4 * ["pause"] + 3 * ["wait_for_end pause"] + ["pause kill", "sample", "sample"]
_DEADLY = ("kill", "fuse", "ambush")
_END = object()


@dataclass(frozen=True)
class Plan:
    """All that a seed says."""

    kind: str
    mode: str
    pauses_s: list[float]
    num_workers: int
    frames_per_batch: int
    total_frames: int
    longest: int
    max_steps: int | None
    random_frames: int
    restarts: int
    processing: str | None
    hooks: bool
    sync: bool
    weight_size: int
    ops: list[tuple[str, int]]

    @classmethod
    def of(cls, kind: str, seed: int) -> Plan:
        draw = random.Random(f"{kind} {seed}")
        num_envs = 1 if kind == "AsyncCollector" else draw.randint(2, 4)
        num_workers = num_envs if kind == "Distributed" else draw.randint(min(2, num_envs), num_envs)
        pauses_s = [draw.choice([0.0, 0.0, 0.0005, 0.004]) for _ in range(num_envs)]
        if draw.random() < 0.4:  # one is much slower than the others, and has its worker for itself if there are enough
            pauses_s = [0.0] * (num_envs - 1) + [0.004]
        frames = num_envs * draw.randint(4, 40)
        most = int(min(2_000, 2.0 * num_envs / max(max(pauses_s), 1e-3)))
        mode = draw.choice(["iterate", "iterate", "store", "background", "background"])
        possible = _ANYWHERE + (_BACKGROUND if mode == "background" else _ITERATING) + ["sample"] * (mode == "store")
        chosen = " ".join(draw.choices(possible, k=draw.randint(6, 20))).split()
        restarts = 50 if kind in _RESTARTABLE and draw.random() < 0.8 else 0
        if kind == "Collector":
            chosen = [name for name in chosen if name not in _DEADLY]
        elif not restarts:  # one kill is the end, and not in every round
            last = max((i for i, name in enumerate(chosen) if name in _DEADLY and draw.random() < 0.3), default=-1)
            chosen = [name for i, name in enumerate(chosen) if name not in _DEADLY or i == last]
        return cls(
            kind=kind,
            mode=mode,
            pauses_s=pauses_s,
            num_workers=num_workers,
            frames_per_batch=frames,
            total_frames=draw.randint(min(most, 100), most),
            longest=draw.choice([3, 40, 200]),
            max_steps=draw.choice([None, None, 17]),
            random_frames=draw.choice([0, 0, draw.randint(1, 200)]),
            restarts=restarts,
            processing=draw.choice([None, None, "tag", "split"]),
            hooks=draw.random() < 0.25,
            sync=draw.random() < 0.5,
            weight_size=draw.choice([2, 20_000]),
            ops=[(name, draw.randrange(2**16)) for name in chosen],
        )

    def __str__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if name not in ("kind", "ops")}
        return ", ".join(f"{name}={value}" for name, value in settings.items())


class Tag:
    """A ``postproc`` that keeps the shape. In a worker, it may be its end: the board has a fuse for it."""

    def __init__(self, board: str, fuse: int) -> None:
        self.board, self.fuse, self.owner = board, fuse, os.getpid()

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        if os.getpid() != self.owner:
            Board(self.board).burn(self.fuse)
        return batch.set("tag", batch["collector", "traj_ids"] + 1)


class Round:
    """Plays a plan. ``say`` is told of every operation before it is done."""

    def __init__(self, plan: Plan, board: str, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self.num_envs = len(plan.pauses_s)
        self.board = Board(board, self.num_envs + 1)
        self.policy: Any = signing_policy(0, plan.weight_size)
        self.buffer: Any = None
        if plan.mode != "iterate":  # whatever env made them all, there is room
            storage = LazyTensorStorage(4 * plan.total_frames * self.num_envs)
            self.buffer = TensorDictReplayBuffer(storage=storage, batch_size=32)
        self.parts: list[Frames] = []
        self.hooked = 0
        self.over = False
        self.state: dict[str, Any] | None = None
        self.expected = plan.total_frames
        self.cuts = self.loads = self.kills = 0
        #: Held by who updates weights or loads a state, so that a version's number is known before it is there.
        self.updating = threading.Lock()
        self.meddling: threading.Thread | None = None
        self.is_calm = threading.Event()
        self.meddlers_error: BaseException | None = None
        self.collector: Any = self._make()
        self.batches: Any = None if plan.mode == "background" else iter(self.collector)

    def _make(self) -> Any:
        plan = self.plan
        envs = signed_envs(plan.pauses_s, plan.longest, None if plan.kind == "Collector" else self.board.path)
        kwargs: dict[str, Any] = {
            "frames_per_batch": plan.frames_per_batch,
            "total_frames": plan.total_frames,
            "max_frames_per_traj": plan.max_steps,
            "init_random_frames": plan.random_frames,
            "replay_buffer": self.buffer,
            "track_policy_version": True,
        }
        if plan.processing == "tag":
            kwargs["postproc"] = Tag(self.board.path, self.num_envs)
        elif plan.processing == "split":
            kwargs["split_trajs"] = True
        if plan.hooks:
            kwargs |= {"pre_collect_hook": lambda: None, "post_collect_hook": self._hook}
        if plan.kind == "Collector":
            return Collector(SerialEnv(self.num_envs, envs), self.policy, **kwargs)
        if plan.kind == "ParallelEnv":
            env = ParallelEnv(self.num_envs, envs, num_workers=plan.num_workers)
            return Collector(env, self.policy, **kwargs)
        if plan.kind == "AsyncBatched":
            return AsyncBatchedCollector(envs, self.policy, num_workers=plan.num_workers, **kwargs)
        if plan.kind == "Distributed":
            kwargs |= {"restart_nodes": plan.restarts, "sync": plan.sync}
            return DistributedCollector(envs, self.policy, **kwargs)
        kwargs["restart_workers"] = plan.restarts
        if plan.kind == "AsyncCollector":
            return AsyncCollector(envs[0], self.policy, **kwargs)
        kind = MultiSyncCollector if plan.kind == "MultiSync" else MultiAsyncCollector
        return kind(envs, self.policy, num_workers=plan.num_workers, **kwargs)

    def _hook(self, batch: TensorDictBase) -> None:
        frames = Frames.of(batch)
        check_frames(frames, self.plan.max_steps)
        self.hooked += len(frames)

    # -- playing ---------------------------------------------------------------------------------------------------

    def play(self) -> str:
        """What came out, in a few words; raises ``Wrong``."""
        try:
            if self.plan.mode == "background":
                self.collector.start()
            for name, argument in self.plan.ops:
                if not self.over:
                    self.say(f"{name} {argument}")
                    getattr(self, f"_{name}")(argument)
                    self._raise_meddlers_error()
            self.say("run to the end")
            self._run_to_the_end()
        except (WorkerDied, NodeLost, BackgroundFailed) as error:
            self._expect_death(error)
            self.say(f"ended by {type(error).__name__}")
        finally:
            self.is_calm.set()
            self.collector.shutdown()
        self._calm(0)
        self._raise_meddlers_error()
        self.kills += int(self.board.burnt.sum())
        return self._judge()

    def _run_to_the_end(self) -> None:
        if self.plan.mode == "background":
            while self.collector.is_running():
                time.sleep(0.01)
                self._raise_meddlers_error()
            self._calm(0)
            self.collector.async_shutdown()
        while not self.over and self.batches is not None:
            self._next(0)
        self.over = True

    def _expect_death(self, error: BaseException) -> None:
        if isinstance(error, BackgroundFailed) and error.__cause__ is not None:
            error = error.__cause__
        killed = self.kills + self.board.burnt.sum()
        if self.plan.restarts or not killed or not isinstance(error, WorkerDied | NodeLost):
            raise error
        left = self.collector.partial_batch
        if left is not None:
            check_frames(Frames.of(left), self.plan.max_steps)

    def _judge(self) -> str:
        plan = self.plan
        stored = self.buffer is not None
        parts = [Frames.of(self.buffer[:])] if stored and len(self.buffer) else self.parts
        frames = Frames.cat(parts) if parts else None
        if frames is not None:
            check_frames(frames, plan.max_steps)
            check_story(frames, num_cuts=self.cuts, num_kills=self.kills, max_steps=plan.max_steps)
        count = sum(map(len, parts))
        if self.over and count != self.expected:
            raise Wrong(f"{count} frames instead of {self.expected}")
        if stored and self.buffer.write_count != count:
            raise Wrong(f"write_count is {self.buffer.write_count}, and {count} frames are there")
        if self.over and plan.hooks and self.hooked != count:
            raise Wrong(f"hooks saw {self.hooked} frames of {count}")
        num_random = sum(int(part.is_random.sum()) for part in parts)
        if self.over and not self.loads and num_random != min(plan.random_frames, self.expected):
            raise Wrong(f"{num_random} random frames instead of {plan.random_frames}")
        # (Stored as rows, trajectories of whichever env share a track: there nobody can tell which one goes on.)
        if frames is not None and not (stored and plan.processing == "split"):
            check_marks(frames, stored=stored, num_cuts=self.cuts)
        return f"{count} frames, {self.kills} kills"

    # -- operations: between two batches ---------------------------------------------------------------------------

    def _next(self, argument: int) -> None:
        for _ in range(1 + argument % 3):
            batch: Any = next(self.batches, _END)
            if batch is _END:
                self.over = True
                return
            if self.buffer is None:
                frames = Frames.of(batch, len(self.parts))
                check_frames(frames, self.plan.max_steps)
                self.parts.append(frames)

    def _again(self, _: int) -> None:
        """A ``break``, and another loop."""
        self.batches = iter(self.collector)

    def _reset(self, _: int) -> None:
        self.cuts += 1
        self.collector.reset()

    def _partial(self, argument: int) -> None:
        if self.plan.kind == "Distributed":
            return
        self.cuts += 1
        mask = [bool(argument >> env & 1) for env in range(self.num_envs)]
        self.collector.reset(mask if any(mask) else [True] * self.num_envs)

    def _seed(self, argument: int) -> None:
        self.cuts += 1
        self.collector.set_seed(argument)

    def _save(self, _: int) -> None:
        with self.updating:
            self.state = self.collector.state_dict()

    def _load(self, _: int) -> None:
        if self.state is None:
            return
        self.cuts += 1
        self.loads += 1
        with self.updating:
            before = self.collector.stats()["frames"]
            self.collector.load_state_dict(self.state)
            self.expected += before - self.state["frames"]
        if self.plan.mode != "background":
            self._again(0)

    # -- operations: in the background -----------------------------------------------------------------------------

    def _wait(self, argument: int) -> None:
        self._wait_for(self.buffer.write_count + argument % (3 * self.plan.frames_per_batch))

    def _wait_for_end(self, argument: int) -> None:
        """Until only what the slowest has under way is missing: an order is 64 steps, or a batch."""
        order = max(64, self.collector.frames_per_batch)
        self._wait_for(self.expected - order - argument % order)

    def _wait_for(self, count: int) -> None:
        there = lambda: self.buffer.write_count >= count or not self.collector.is_running()  # noqa: E731
        while not wait_until(there, 1.0):
            self._raise_meddlers_error()

    def _pause(self, argument: int) -> None:
        if not self.collector.is_running():
            return
        with self.collector.pause():
            before = self.buffer.write_count
            calls = [self._reset, self._seed, self._save, self._load, self._partial]
            inside = calls[argument % 5] if argument % 3 == 0 else None
            if inside is not None and self.collector.is_running():
                self.say(f"  within: {inside.__name__}")
                inside(argument)
            self._sample(argument)
            if self.buffer.write_count != before:
                raise Wrong(f"{self.buffer.write_count - before} frames were written during a pause")

    def _sample(self, _: int) -> None:
        if len(self.buffer):
            check_frames(Frames.of(self.buffer.sample()), self.plan.max_steps)

    # -- operations: weights ---------------------------------------------------------------------------------------

    def _update(self, argument: int) -> None:
        plan = self.plan
        with self.updating:
            version = self.collector.policy_version + 1
            source: Any = signing_policy(version, plan.weight_size)
            way = argument % 4
            workers: Any = None
            if way == 1:
                source = source.state_dict()
            elif way == 2 and plan.kind not in _ONE_POLICY:
                self.policy.module.become(version)
                source = None
            elif way == 3 and plan.kind not in _ONE_POLICY:
                workers = [argument // 4 % self.collector.num_workers]
            self.collector.update_policy_weights_(source, worker_ids=workers)

    def _scribble(self, _: int) -> None:
        """The trainer's own weights change, and nobody is told."""
        if self.plan.kind not in _ONE_POLICY:
            with self.updating:
                self.policy.module.become(-1)

    def _meddle(self, _: int) -> None:
        """From here on another thread updates weights, too."""
        if self.meddling is None:
            self.is_calm.clear()
            self.meddling = threading.Thread(target=self._keep_updating, daemon=True)
            self.meddling.start()

    def _keep_updating(self) -> None:
        count = 0
        while not self.is_calm.wait(0.002):
            try:
                self._update(count)
            except CollectorClosed:
                return  # it has ended, or died: the others know
            except BaseException as error:
                self.meddlers_error = error
                return
            count += 1

    def _calm(self, _: int) -> None:
        if self.meddling is not None:
            self.is_calm.set()
            self.meddling.join()
            self.meddling = None

    def _raise_meddlers_error(self) -> None:
        if self.meddlers_error is not None:
            error, self.meddlers_error = self.meddlers_error, None
            with contextlib.suppress(WorkerDied, NodeLost, BackgroundFailed):
                raise error
            self._expect_death(error)

    # -- operations: kills -----------------------------------------------------------------------------------------

    def _kill(self, argument: int) -> None:
        self.kills += self.board.kill(argument % self.num_envs)

    def _fuse(self, argument: int) -> None:
        """An env kills its process in one of its next steps; or a postproc, in one of its next calls."""
        which = argument % (self.num_envs + 1)
        self.board.fuses[which] = 1 + argument // 5 % (60 if which < self.num_envs else 4)

    def _ambush(self, argument: int) -> None:
        """Killed while weights are being sent."""
        killer = threading.Thread(target=self._kill, args=(argument,))
        killer.start()
        self._update(argument // 4)
        killer.join()

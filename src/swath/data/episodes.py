"""Episodes, found in batches as they come: their returns and lengths, also of those that go over many batches.

Looked for in whole batches, once each: nothing here is on the path of a step. An env's episode under way is kept by its
trajectory id, so that one that was cut (by a reset, or by frames that were dropped) is not taken for the next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.keys import Key, leaves_of, show
from swath.rollout.delivery import TRAJ_IDS

#: So many episodes are kept for who asks for them.
MOST_KEPT = 10_000
#: Of how many of the last episodes ``stats()`` has the means.
RECENT = 100

_VERSION: Key = ("policy_version",)
_FLAGS = ("done", "terminated", "truncated")
_COUNTS = ("lengths", "envs", "workers", "traj_ids", "policy_versions", "frames")


@dataclass(frozen=True)
class Ended:
    """Episodes that ended: a row for each, in the order of envs, and of time within each. Travels between processes."""

    envs: np.ndarray
    traj_ids: np.ndarray
    lengths: np.ndarray
    #: Of the last frame; -1 where batches do not say.
    versions: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    #: Sums of rewards ``[episodes, all of their entries]``.
    sums: np.ndarray
    #: What these entries are: keys and shapes.
    rewards: tuple[tuple[Key, tuple[int, ...]], ...]
    #: In which step of its env's part of the batch each ended.
    last_steps: np.ndarray

    def __len__(self) -> int:
        return len(self.envs)

    @classmethod
    def joined(cls, parts: Sequence[Ended]) -> Ended:
        if len(parts) == 1:
            return parts[0]
        return cls(
            rewards=parts[0].rewards,
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS},
        )

    def as_lists(self) -> dict[str, Any]:
        """For ways that are no pickles."""
        rewards = [[list(key), list(shape)] for key, shape in self.rewards]
        return {"rewards": rewards, **{name: getattr(self, name).tolist() for name in _COLUMNS}}

    @classmethod
    def of_lists(cls, told: Mapping[str, Any] | None) -> Ended | None:
        if told is None:
            return None
        rewards = tuple((tuple(key), tuple(shape)) for key, shape in told["rewards"])
        return cls(rewards=rewards, **{name: np.asarray(told[name]) for name in _COLUMNS})

    def returns(self) -> np.ndarray:
        """One number each."""
        return _returns(self.sums, self.rewards)


def _returns(sums: np.ndarray, rewards: tuple[tuple[Key, tuple[int, ...]], ...]) -> np.ndarray:
    """Of the root's reward, or else of all groups', all objectives and agents together."""
    if not rewards:
        return np.full(len(sums), np.nan)
    parts = dict(_parts(rewards))
    return sums[:, parts.get(("next", "reward"), slice(None))].sum(-1)


def _parts(rewards: tuple[tuple[Key, tuple[int, ...]], ...]) -> Iterator[tuple[Key, slice]]:
    """Where each key's entries are among all."""
    at = 0
    for key, shape in rewards:
        yield key, slice(at, at := at + math.prod(shape))


_COLUMNS = tuple(column.name for column in fields(Ended) if column.name != "rewards")


class UnderWay(NamedTuple):
    """Of each env's episode under way: -1 as its id if there is none."""

    traj_ids: np.ndarray
    lengths: np.ndarray
    sums: np.ndarray


@dataclass(frozen=True)
class News:
    """What a batch brings; nothing of it counts before it is accepted."""

    ended: Ended
    #: Of the envs of this batch: where they stand behind it.
    envs: np.ndarray
    under_way: UnderWay


@dataclass(frozen=True)
class _Keys:
    """Where batches have what is looked at; found out with the first."""

    flags: Mapping[str, tuple[Key, ...]]
    rewards: tuple[Key, ...]
    has_version: bool

    @cached_property
    def all(self) -> Sequence[Key]:
        flags = [key for keys in self.flags.values() for key in keys]
        return (TRAJ_IDS, *flags, *self.rewards, *([_VERSION] if self.has_version else []))

    @classmethod
    def of(cls, keys: Iterable[Key]) -> _Keys:
        keys = list(keys)
        flags = {}
        for name in _FLAGS:
            # The root's say when the env begins anew; of several groups, each may have one of its own.
            own = [key for key in keys if key[0] == "next" and key[-1] == name]
            flags[name] = (("next", name),) if ("next", name) in own else tuple(own)
        rewards = tuple(key for key in keys if key[0] == "next" and key[-1] == "reward")
        return cls(flags, rewards, _VERSION in keys)


class Frames(NamedTuple):
    """Frames ``[*lead, steps]``, to be looked at."""

    get: Callable[[Key], Any]
    keys: Callable[[], Iterable[Key]]
    shape: Sequence[int]

    @classmethod
    def of_batch(cls, batch: TensorDictBase) -> Frames:
        after: Any = batch.get("next")

        def get(key: Key) -> Any:  # step by step: half the time of a nested key
            return after.get(key[1] if len(key) == 2 else key[1:]) if key[0] == "next" else batch.get(key)

        return cls(get, lambda: (key for key, _ in leaves_of(batch)), batch.batch_size)

    @classmethod
    def of_leaves(cls, leaves: Mapping[Key, torch.Tensor]) -> Frames:
        return cls(leaves.__getitem__, lambda: leaves, leaves[TRAJ_IDS].shape)


class EpisodeTally:
    """Adds up the rewards of each env's episode."""

    def __init__(self) -> None:
        self._keys: _Keys | None = None
        self._reward_layout: tuple[tuple[Key, tuple[int, ...]], ...] = ()
        self._under_way = UnderWay(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0)))
        #: Ids of trajectories that are not whole episodes: they are not counted.
        self.fragments: set[int] = set()
        #: Whether another one needs them, and forgets them.
        self.shares_fragments = False

    def under_way(self) -> Ended:
        """Those that have not ended, as if they had now."""
        known = self._under_way
        envs = np.flatnonzero(known.traj_ids >= 0)
        nothing, never = np.full(len(envs), -1), np.zeros(len(envs), bool)
        own = known.traj_ids[envs], known.lengths[envs], nothing, never, never, known.sums[envs]
        return Ended(envs, *own, self._reward_layout, nothing)

    def add(self, frames: Frames, envs: np.ndarray, turns: np.ndarray | None = None) -> Ended:
        """Count them; see ``look``."""
        news = self.look(frames, envs, turns)
        self.accept(news)
        return news.ended

    def keys_looked_at(self, frames: Frames) -> Sequence[Key]:
        """The same in all batches."""
        if self._keys is None:
            self._keys = _Keys.of(frames.keys())
        return self._keys.all

    def look(self, frames: Frames, envs: np.ndarray, turns: np.ndarray | None = None) -> News:
        """At the next frames of some envs.

        Args:
            frames: as they were collected, with trajectory ids.
            envs: the number of each row's env ``[rows]``; or of each frame's ``[frames]``, where envs are mixed.
            turns: when each frame had its turn ``[frames]``, where that is not its step in the batch.
        """
        self.keys_looked_at(frames)
        get = frames.get
        ids = get(TRAJ_IDS)
        num_steps = ids.shape[-1]
        ids = _numpy(ids).reshape(-1)
        count = len(ids)
        done = self._flag(get, "done", count)
        sums = self._rewards(get, len(frames.shape), count)
        order = None
        is_mixed = len(envs) == count and num_steps != 1
        if is_mixed:  # the frames of an env may lie in several places
            order = np.argsort(envs, kind="stable")
            envs, ids, done, sums = envs[order], ids[order], done[order], sums[order]
        begins = np.empty(count, bool)
        np.not_equal(ids[1:], ids[:-1], out=begins[1:])
        begins[1:] |= done[:-1]
        if is_mixed:
            begins[1:] |= envs[1:] != envs[:-1]
        else:
            begins[::num_steps] = True
        begins[:1] = True
        starts = np.flatnonzero(begins)
        lasts = np.append(starts[1:], count) - 1
        of_env = envs[starts] if is_mixed else envs[starts // num_steps]
        sums = np.add.reduceat(sums, starts, axis=0, dtype=np.float64) if count else sums
        pieces = _Pieces(of_env, ids[starts], lasts - starts + 1, sums, lasts)
        if count and ids.min() < 0:  # frames that were not collected (preemptive_threshold)
            pieces = pieces.only(pieces.ids >= 0)
        if turns is None:
            turns = np.arange(count) % max(1, num_steps)
        return self._follow_up(pieces, get, done, order, turns)

    def _flag(self, get: Callable[[Key], Any], name: str, count: int) -> np.ndarray:
        assert self._keys is not None
        flags = [_numpy(get(key)).reshape(count, -1) for key in self._keys.flags[name]]
        if len(flags) == 1 and flags[0].shape[1] == 1:
            return flags[0][:, 0]
        return np.asarray(np.concatenate(flags, 1).any(-1)) if flags else np.zeros(count, bool)

    def _rewards(self, get: Callable[[Key], Any], num_dims: int, count: int) -> np.ndarray:
        """``[frames, all entries]``."""
        assert self._keys is not None
        found = [get(key) for key in self._keys.rewards]
        if len(self._reward_layout) != len(found):
            shapes = [tuple(reward.shape[num_dims:]) for reward in found]
            self._reward_layout = tuple(zip(self._keys.rewards, shapes, strict=True))
        # (NumPy knows no bfloat16.)
        flat = [
            _numpy(reward.float() if reward.dtype == torch.bfloat16 else reward).reshape(count, math.prod(shape))
            for reward, (_, shape) in zip(found, self._reward_layout, strict=True)
        ]
        if len(flat) == 1:
            return flat[0]
        return np.concatenate(flat, axis=1) if flat else np.zeros((count, 0))

    def _follow_up(
        self,
        pieces: _Pieces,
        get: Callable[[Key], Any],
        done: np.ndarray,
        order: np.ndarray | None,
        turns: np.ndarray,
    ) -> News:
        """Pieces of episodes, behind what the batches before had of them."""
        assert self._keys is not None
        known = self._room_for(pieces)
        envs, count = pieces.envs, len(pieces.envs)
        is_first, is_last = np.ones(count, bool), np.ones(count, bool)
        is_first[1:] = is_last[:-1] = envs[1:] != envs[:-1]
        goes_on = is_first & (known.traj_ids[envs] == pieces.ids)
        lengths, sums = pieces.lengths, pieces.sums
        longer = envs[goes_on]
        lengths[goes_on] += known.lengths[longer]
        sums[goes_on] += known.sums[longer]
        is_over = done[pieces.lasts]
        stays = UnderWay(np.where(is_over, -1, pieces.ids)[is_last], lengths[is_last], sums[is_last])
        chosen = is_over
        if self.fragments:
            is_fragment = np.isin(pieces.ids, list(self.fragments))
            if not self.shares_fragments:
                self.fragments.difference_update(pieces.ids[is_over & is_fragment].tolist())
            chosen = is_over & ~is_fragment
        return News(self._ended(pieces, lengths, sums, chosen, get, order, turns), envs[is_last], stays)

    def _ended(
        self,
        pieces: _Pieces,
        lengths: np.ndarray,
        sums: np.ndarray,
        chosen: np.ndarray,
        get: Callable[[Key], Any],
        order: np.ndarray | None,
        turns: np.ndarray,
    ) -> Ended:
        assert self._keys is not None
        rows, num_frames = np.flatnonzero(chosen), len(turns)
        frames = pieces.lasts[rows] if order is None else order[pieces.lasts[rows]]
        last_steps = turns[frames]
        if len(rows) > 1:
            by_time = np.argsort(last_steps, kind="stable")
            rows, frames, last_steps = rows[by_time], frames[by_time], last_steps[by_time]

        def flags(name: str) -> np.ndarray:
            return self._flag(get, name, num_frames)[frames] if len(frames) else np.zeros(0, bool)

        versions = _numpy(get(_VERSION)).reshape(-1)[frames] if self._keys.has_version else np.full(len(rows), -1)
        return Ended(
            pieces.envs[rows],
            pieces.ids[rows],
            lengths[rows],
            versions,
            flags("terminated"),
            flags("truncated"),
            sums[rows],
            self._reward_layout,
            last_steps,
        )

    def _room_for(self, pieces: _Pieces) -> UnderWay:
        """Entries for all of these envs."""
        known = self._under_way
        missing = int(pieces.envs.max(initial=-1)) + 1 - len(known.traj_ids)
        if missing > 0 or known.sums.shape[1] != pieces.sums.shape[1]:
            missing = max(0, missing)
            size = len(known.traj_ids) + missing
            sums = np.zeros((size, pieces.sums.shape[1]))
            if known.sums.shape[1] == sums.shape[1]:
                sums[: len(known.sums)] = known.sums
            known = UnderWay(
                np.concatenate([known.traj_ids, np.full(missing, -1)]),
                np.concatenate([known.lengths, np.zeros(missing, np.int64)]),
                sums,
            )
            self._under_way = known
        return known

    def accept(self, news: News) -> None:
        """From now on it counts."""
        for mine, new in zip(self._under_way, news.under_way, strict=True):
            mine[news.envs] = new


class _Pieces(NamedTuple):
    """Stretches of frames of one env's one episode."""

    envs: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    sums: np.ndarray
    #: Where each has its last frame.
    lasts: np.ndarray

    def only(self, chosen: np.ndarray) -> _Pieces:
        return _Pieces(*(column[chosen] for column in self))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


# -- what is told of them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episodes:
    """Episodes that have ended: arrays with an entry for each, in the order in which they were delivered."""

    #: Sums of rewards, of the root's or of all groups'; all objectives and agents together. NaN without rewards.
    returns: np.ndarray
    #: In steps.
    lengths: np.ndarray
    #: Counted over all workers, or nodes; and which worker, or node, it is in.
    envs: np.ndarray
    workers: np.ndarray
    traj_ids: np.ndarray
    #: Of the weights that chose the last action; with ``track_policy_version``, else as of its delivery.
    policy_versions: np.ndarray
    #: How many frames the collector had delivered with the episode's end.
    frames: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    #: Sums of rewards by key (``"reward"``, ``"agents.reward"``), ``[episodes, *shape of a reward]``.
    rewards: Mapping[str, np.ndarray] = field(default_factory=dict)
    #: How many more there were since the last call than are kept.
    missed: int = 0

    def __len__(self) -> int:
        return len(self.returns)


class EpisodeHistory:
    """The last episodes that ended, for whoever asks; any thread may. Their memory is used again and again."""

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._lock = threading.Lock()
        self._columns: dict[str, np.ndarray] = {}
        self._rewards: tuple[tuple[Key, tuple[int, ...]], ...] = ()
        #: Of all that there were.
        self.count = 0
        #: Of those that were asked for.
        self._num_taken = 0
        #: Why there are none.
        self.refusal: str | None = None

    def add(self, ended: Ended, workers: np.ndarray, version: int | np.ndarray, frames: int | np.ndarray) -> None:
        """Of batches with which so many frames were delivered; ``version`` is for those that have none."""
        columns = {
            "sums": ended.sums,
            "lengths": ended.lengths,
            "envs": ended.envs,
            "workers": workers,
            "traj_ids": ended.traj_ids,
            "policy_versions": np.where(ended.versions < 0, version, ended.versions),
            "frames": np.broadcast_to(frames, len(ended)),
            "terminated": ended.terminated,
            "truncated": ended.truncated,
        }
        with self._lock:
            if not self._columns:
                self._rewards = ended.rewards
                self._columns = {
                    name: np.zeros((self._most_kept, *new.shape[1:]), new.dtype) for name, new in columns.items()
                }
            kept = slice(max(0, len(ended) - self._most_kept), None)
            at = np.arange(self.count, self.count + len(ended))[kept] % self._most_kept
            for name, new in columns.items():
                self._columns[name][at] = new[kept]
            self.count += len(ended)

    def take(self) -> Episodes:
        """Those that nobody has taken."""
        with self._lock:
            new = self.count - self._num_taken
            self._num_taken = self.count
            return self._last(new, missed=max(0, new - self._most_kept))

    def last(self, count: int) -> Episodes:
        """The last few, whoever has taken them."""
        with self._lock:
            return self._last(count)

    def recent_means(self) -> tuple[float | None, float | None]:
        """Mean return and length of the last few."""
        last = self.last(RECENT)
        return (float(last.returns.mean()), float(last.lengths.mean())) if len(last) else (None, None)

    def _last(self, count: int, missed: int = 0) -> Episodes:
        count = min(count, self._most_kept, self.count)
        at = np.arange(self.count - count, self.count) % self._most_kept
        if not self._columns:
            none: dict[str, Any] = {name: np.zeros(0, np.int64) for name in _COUNTS}
            none |= {name: np.zeros(0, bool) for name in _FLAGS[1:]}
            return Episodes(returns=np.zeros(0), **none)
        columns = {name: column[at] for name, column in self._columns.items()}
        sums = columns.pop("sums")
        rewards = {
            ".".join(key[1:]): sums[:, part].reshape(count, *shape)
            for (key, shape), (_, part) in zip(self._rewards, _parts(self._rewards), strict=True)
        }
        return Episodes(returns=_returns(sums, self._rewards), **columns, rewards=rewards, missed=missed)


def needs_ids() -> str:
    return f"episodes() tells episodes apart by {show(TRAJ_IDS)}: collect with track_traj_ids=True"

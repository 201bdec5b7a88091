"""What must be true of frames that were delivered or stored, whatever happened meanwhile (docs/faults.md, replay.md).

Every frame is true by itself: env, action and weights have signed it (``check_frames``). An env's frames in their order
are its episodes, each in one piece under one id, and nothing is there twice or missing (``check_story``). An episode
that was cut says so (``check_marks``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from chaos_env import (
    CHECK,
    END,
    ENV,
    EPISODE,
    LIFE,
    RECEIVED,
    STEP,
    TERMINATED,
    TICK,
    TRUNCATED,
    check_of,
    digest_of,
    seen_in,
)

_KEYS: dict[str, Any] = {
    "root": "observation",
    "next": ("next", "observation"),
    "action": "action",
    "reward": ("next", "reward"),
    "ids": ("collector", "traj_ids"),
    "version": "policy_version",
    "done_before": "done",
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
    "done": ("next", "done"),
}


class Wrong(AssertionError):
    """A promise is broken."""


@dataclass
class Frames:
    """Frames in the order in which each env made them; ``batch`` is the number of the batch that each came with."""

    root: np.ndarray
    next: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    ids: np.ndarray
    version: np.ndarray
    done_before: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    done: np.ndarray
    batch: np.ndarray

    @classmethod
    def of(cls, batch: TensorDictBase, number: int = 0) -> Frames:
        mask: Any = batch.get(("collector", "mask"), None)
        kept: Any = slice(None) if mask is None else mask.reshape(-1).numpy()
        columns: dict[str, np.ndarray] = {}
        for name, key in _KEYS.items():
            entry: Any = batch.get(key)
            shape = entry.shape[batch.ndim :] if name in ("root", "next", "action") else ()
            columns[name] = entry.numpy().reshape(-1, *shape)[kept].copy()
        return cls(**columns, batch=np.full(len(columns["ids"]), number))

    @classmethod
    def cat(cls, parts: list[Frames]) -> Frames:
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def __getitem__(self, index: Any) -> Frames:
        return Frames(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_random(self) -> np.ndarray:
        return np.all(self.action < 0, axis=-1)

    def show(self, at: int) -> str:
        names = ("env", "life", "episode", "step", "tick", "end")
        root, after = (", ".join(map("{} {}".format, names, rows[at])) for rows in (self.root, self.next))
        flags = f"terminated {self.terminated[at]}, truncated {self.truncated[at]}"
        about = f"id {self.ids[at]}, version {self.version[at]}, batch {self.batch[at]}, {flags}"
        return f"{about}\n    root: {root}\n    next: {after}\n    action: {self.action[at].tolist()}"


def _require(good: np.ndarray, what: str, frames: Frames, shift: int = 0) -> None:
    if not good.all():
        bad = np.flatnonzero(~good)
        lines = [f"{what}: {len(bad)} of {len(good)} frames, the first is"]
        lines += [f"  {frames.show(at)}" for at in range(bad[0], bad[0] + shift + 1)]
        raise Wrong("\n".join(lines))


def check_frames(frames: Frames, max_steps: int | None = None) -> None:
    """Each frame by itself."""
    if not len(frames):
        return
    root, after, action = frames.root, frames.next, frames.action
    for name, rows in (("root", root), ("next", after)):
        signed = (rows[:, CHECK:] == check_of(rows)[:, None]).all(-1)
        _require(signed, f"no env made this ({name}; all zeros: {int((rows == 0).all(-1).sum())})", frames)
    same = (root[:, [ENV, LIFE, EPISODE]] == after[:, [ENV, LIFE, EPISODE]]).all(-1)
    _require(same, "root and next are of different episodes", frames)
    _require(after[:, TICK] == root[:, TICK] + 1, "next is not one step after root", frames)
    _require(after[:, STEP] == root[:, STEP] + 1, "next is not one step after root", frames)
    _require(frames.reward == after[:, TICK].astype(np.float32), "the reward is another step's", frames)
    _require(after[:, RECEIVED] == digest_of(action), "the env got another action", frames)
    _require(frames.terminated == (after[:, END] == TERMINATED), "terminated is not what the env said", frames)
    _require(frames.truncated | (after[:, END] != TRUNCATED), "truncated is not what the env said", frames)
    _require(frames.done == (frames.terminated | frames.truncated), "done is not terminated or truncated", frames)
    _require(~frames.done_before, "done at the root", frames)
    if max_steps is not None:
        _require(after[:, STEP] <= max_steps, "an episode is longer than max_frames_per_traj", frames)
        _require(frames.done | (after[:, STEP] < max_steps), "an episode at its longest is not truncated", frames)
    acted = frames[~frames.is_random]
    weights = acted.action[:, 1:]
    _require(acted.action[:, 0] == seen_in(acted.root), "the action was chosen for another frame", acted)
    _require((weights == weights[:, :1]).all(-1), "torn weights", acted)
    _require(weights[:, 0] == acted.version, "the action was chosen by other weights than policy_version says", acted)


def _by_env(frames: Frames) -> Iterator[tuple[int, Frames, Frames, Frames]]:
    """Each env's frames, and each two of them that follow one another."""
    for env in np.unique(frames.root[:, ENV]).tolist():
        own = frames[frames.root[:, ENV] == env]
        yield env, own, own[:-1], own[1:]


def check_story(frames: Frames, *, num_cuts: int, num_kills: int, max_steps: int | None = None) -> None:
    """All frames together, env by env.

    Args:
        num_cuts: how often all that was under way was thrown away (``reset``, ``set_seed``, ``load_state_dict``).
    """
    for env, own, first, second in _by_env(frames):
        for name, key in (("life", own.root[:, LIFE]), ("id", own.ids)):
            begins = np.r_[True, key[1:] != key[:-1]]
            again = np.isin(np.arange(len(key)), np.unique(key, return_index=True)[1], invert=True)
            _require(~(begins & again), f"env {env}: frames of one {name} are not in one piece", own)
        same_life = first.next[:, LIFE] == second.root[:, LIFE]
        missing = second.root[:, TICK] - first.next[:, TICK] - first.done
        same_id = first.ids == second.ids
        _require(~same_life | (missing >= 0), f"env {env}: frames are there twice, or not in order", own, 1)
        _require(~same_id | same_life, f"env {env}: one id in two lives", own, 1)
        _require(~same_id | (missing == 0), f"env {env}: a hole in a trajectory", own, 1)
        _require(~same_id | ~first.done, f"env {env}: a trajectory goes on after its end", own, 1)
        follows = (first.next[:, :END] == second.root[:, :END]).all(-1)
        _require(~same_id | follows, f"env {env}: next is not the following root", own, 1)
        begins = np.r_[True, ~same_id]
        _require(~begins | (own.root[:, STEP] == 0), f"env {env}: a trajectory lacks its beginning", own)
        marked = own.truncated & (own.next[:, END] != TRUNCATED)
        if max_steps is not None:
            marked &= own.next[:, STEP] != max_steps
        if marked.sum() > num_cuts + num_kills:
            raise Wrong(f"env {env}: {marked.sum()} episodes were cut by {num_cuts} calls and {num_kills} kills")
        lost = same_life & (missing > 0)
        if lost.sum() > num_cuts:
            what = f"env {env}: frames were lost {lost.sum()} times by {num_cuts} calls that discard what is under way"
            _require(~lost, what, own, 1)
    key = frames.root[:, [ENV, LIFE, TICK]]
    if len(np.unique(key, axis=0)) != len(key):
        raise Wrong("a frame is there twice")
    owners = np.unique(
        np.stack([frames.ids, frames.root[:, ENV], frames.root[:, LIFE], frames.root[:, EPISODE]]), axis=1
    )
    if owners.shape[1] != len(np.unique(frames.ids)):
        raise Wrong("one id was given to two episodes")


def check_marks(frames: Frames, *, stored: bool, num_cuts: int) -> None:
    """An episode that does not go on says so: ``truncated`` where the env did not end it.

    In a replay buffer (``stored``) always, whatever cut it. Of what was delivered already nobody can: there, it ends
    with a batch, and one in the same life was cut by one of ``num_cuts`` calls.
    """
    for env, own, first, second in _by_env(frames):
        unmarked = (first.ids != second.ids) & ~first.done
        by_call = unmarked & (first.root[:, LIFE] == second.root[:, LIFE])
        if stored or by_call.sum() > num_cuts:
            _require(~unmarked, f"env {env}: an episode was cut, and is not marked truncated", own, 1)
        _require(~unmarked | (first.batch != second.batch), f"env {env}: cut within a batch, and unmarked", own, 1)

"""Episodes that will not go on: the last frame that is there becomes their end, truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.memory import FrameMemory
from swath.keys import Key, as_key
from swath.rollout.delivery import TRAJ_IDS


def mark_ends(memory: FrameMemory, tracks: Sequence[int]) -> None:
    """Episodes under way in these tracks will not go on: their last frame becomes their end, truncated."""
    flags = [leaf for key, leaf in memory.leaves.items() if key[0] == "next" and key[-1] == "done"]
    for track in tracks:
        committed = int(memory.tracks.committed[track])
        slot = track * memory.tracks.length + (committed - 1) % memory.tracks.length
        if committed and not all(bool(done[slot].all()) for done in flags):
            with memory.tracks.editing(track):
                mark_frames(memory.leaves, slot)


def mark_frames(leaves: Mapping[Key, torch.Tensor], where: Any) -> None:
    """Frames become the ends of their episodes, truncated where they were none."""
    for key, done in leaves.items():
        if key[0] == "next" and key[-1] == "done":
            truncated = leaves.get((*key[:-1], "truncated"))
            if truncated is not None:
                truncated[where] |= ~done[where]
            done[where] = True


def end_others(memory: FrameMemory, tracks: Sequence[int], traj_ids: Sequence[int]) -> None:
    """See ``Storage.end_others``. Without ids nobody can tell."""
    ids = memory.leaves.get(TRAJ_IDS)
    if ids is None:
        return
    of_track = np.asarray(tracks, dtype=np.int64)
    committed = memory.tracks.committed[of_track]
    slots = of_track * memory.tracks.length + (committed - 1) % memory.tracks.length
    differ = ids[torch.from_numpy(slots)].cpu().numpy() != np.asarray(traj_ids)
    mark_ends(memory, of_track[differ & (committed > 0)].tolist())


def marked_cuts(frames: TensorDictBase, track_of_frame: np.ndarray) -> TensorDictBase:
    """Frames ``[n]`` of many tracks: where a trajectory follows on another one that has no end, that one gets one."""
    ids = frames.get(TRAJ_IDS, None)
    if ids is None:
        return frames
    order = np.argsort(track_of_frame, kind="stable")
    tracks, own = track_of_frame[order], ids.reshape(-1).cpu().numpy()[order]
    cut = order[:-1][(tracks[1:] == tracks[:-1]) & (own[1:] != own[:-1])]
    keys = [as_key(key) for key in frames.keys(True, True) if as_key(key)[0] == "next"]
    flags = {key: frames.get(key) for key in keys if key[-1] in ("done", "truncated")}
    where = torch.from_numpy(cut)
    if all(bool(flag[where].all()) for key, flag in flags.items() if key[-1] == "done"):
        return frames
    frames = frames.copy()  # a hook may have what was collected
    flags = {key: flag.clone() for key, flag in flags.items()}
    mark_frames(flags, where)
    for key, flag in flags.items():
        frames.set(key, flag)
    return frames

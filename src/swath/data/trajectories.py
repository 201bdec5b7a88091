"""Trajectories: batches cut at episode ends, and whole episodes put together over batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase

from swath.data.frames import as_tensordict
from swath.errors import EnvError
from swath.keys import as_key
from swath.process.ctrl_c import ctrl_c_waits
from swath.rollout.delivery import TRAJ_IDS

TrajFormat = Literal["padded", "cat"]


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Any = None,
    trajectory_key: Any = None,
    done_key: Any = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """One row per trajectory: ``[num_trajectories, longest]``, padded with zeros, with a bool ``mask``.

    Trajectories are told apart by ``("collector", "traj_ids")`` or, without it, by ``("next", "done")``. The input
    is not changed. With ``as_nested`` the leaves are nested tensors, the batch size is ``[num_trajectories, -1]``, and
    there is no mask: ``to_padded_tensor(mask_key=...)`` makes one.

    >>> batch = TensorDict(x=torch.arange(4), next=TensorDict(done=torch.tensor([[0], [1], [0], [0]]).bool()),
    ...                    batch_size=4)
    >>> split_trajectories(batch)["x"]
    tensor([[0, 1],
            [2, 3]])
    """
    data = rollout_tensordict
    if prefix is None and "collector" in data.keys():  # noqa: SIM118 (a TensorDict)
        prefix = "collector"
    id_key = trajectory_key or ((prefix, "traj_ids") if prefix else "traj_ids")
    mask_key = (*id_key[:-1], "mask") if isinstance(id_key, tuple) else "mask"
    if not data.batch_size.numel():  # (numel() is 1 at least) a batch that was stopped before its first step
        none: Any = data.apply(
            lambda leaf: leaf.new_zeros(0, 0, *leaf.shape[data.ndim :]), batch_size=[0, 0], names=None
        )
        return none if as_nested else none.set(mask_key, torch.zeros(0, 0, dtype=torch.bool, device=data.device))
    rows = data.reshape(1, -1) if data.ndim == 1 else data.reshape(-1, data.shape[-1])
    num_rows, num_steps = rows.shape
    ids = rows.get(id_key, None)
    if ids is None:
        done = rows.get(("next", done_key or "done")).reshape(num_rows, num_steps)
        ends_before = done.long().cumsum(1) - done.long()
        per_row = ends_before.amax(1) + 1
        ids = ends_before + (per_row.cumsum(0) - per_row).unsqueeze(1)
        rows = rows.copy()
        rows.set(id_key, ids)
    ids = ids.reshape(num_rows, num_steps)
    new_run = torch.ones_like(ids, dtype=torch.bool)
    new_run[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = new_run.reshape(-1).nonzero().reshape(-1)
    lengths = torch.diff(starts, append=starts.new_tensor([ids.numel()])).tolist()
    flat = rows.reshape(-1)
    if bool((ids < 0).any()):  # frames that were not collected (preemptive_threshold)
        flat = flat[ids.reshape(-1) >= 0]
        collected = (ids.reshape(-1)[starts] >= 0).tolist()
        lengths = [length for length, there in zip(lengths, collected, strict=True) if there]
        num_rows = -1
    if as_nested:
        return _nested(flat, lengths)
    if len(lengths) == num_rows:  # every row is one whole trajectory
        whole = (data.unsqueeze(0) if data.ndim == 1 else data).copy()
        whole.set(id_key, ids.reshape(whole.shape))
        return whole.set(mask_key, torch.ones(whole.shape, dtype=torch.bool, device=ids.device))
    return pad_trajectories(list(flat.split(lengths, 0)), mask_key)


def pad_trajectories(trajectories: Sequence[TensorDictBase], mask_key: Any) -> TensorDictBase:
    """Stack trajectories of different lengths, zeros behind the shorter ones."""
    lengths = torch.tensor([trajectory.shape[0] for trajectory in trajectories])
    longest = int(lengths.max())

    def padded(key: Any) -> torch.Tensor:
        leaves = [trajectory.get(key) for trajectory in trajectories]
        return torch.stack([F.pad(x, (0, 0) * (x.ndim - 1) + (0, longest - len(x))) for x in leaves])

    first = trajectories[0]
    out = TensorDict({}, batch_size=(len(trajectories), longest), device=first.device)
    for key in first.keys(True, True):
        out.set(key, padded(key))
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    return out.set(mask_key, mask.to(first.device) if first.device else mask)


def _nested(flat: TensorDictBase, lengths: list[int]) -> TensorDictBase:
    """Batch size ``[trajectories, -1]``; strided, not jagged, since only those can be padded by their TensorDict."""
    leaves = {}
    for key in flat.keys(True, True):
        leaves[as_key(key)] = torch.nested.as_nested_tensor(list(flat.get(key).split(lengths, 0)))
    return as_tensordict(leaves, torch.Size([len(lengths), -1]), flat.device, ())


def _joined(pieces: list[TensorDictBase]) -> Any:
    return torch.cat(pieces)  # type: ignore[arg-type]


def _ends(rows: TensorDictBase) -> torch.Tensor:
    """Which frames ``[envs, time]`` are an episode's last: any flag named "done" says so."""
    after = rows.get("next")
    flags = [after.get(key).flatten(rows.ndim) for key in after.keys(True, True) if as_key(key)[-1] == "done"]
    if not flags:
        raise EnvError("trajs_per_batch needs to see where episodes end, but no flag of this env is called 'done'")
    return torch.stack([flag.any(-1) for flag in flags]).any(0)


def pieces_of_envs(batch: TensorDictBase, env_of_frames: np.ndarray) -> Iterator[TensorDictBase]:
    """A batch in which frames of several envs lie behind one another, in pieces of one env each."""
    in_time = env_of_frames.reshape(-1, batch.shape[-1])[0]
    lengths = np.diff(np.flatnonzero(np.diff(in_time)) + 1, prepend=0, append=len(in_time))
    yield from batch.split(lengths.tolist(), -1)


class TrajectoryAssembler:
    """Puts whole episodes together from batches; an episode in progress waits for its end.

    Args:
        trajs_per_batch: so many are in a batch.
        traj_format: see ``pop``.
        most: up to so many, if more are complete than have to be.
    """

    def __init__(self, trajs_per_batch: int, traj_format: TrajFormat, most: int | None = None) -> None:
        self._trajs_per_batch = trajs_per_batch
        self.most = trajs_per_batch if most is None else most
        self._format = traj_format
        self._pending: dict[int, list[TensorDictBase]] = {}
        self._complete: deque[TensorDictBase] = deque()
        #: Ids of trajectories that are not whole episodes (see ``Boundaries.fragments``).
        self.fragments: set[int] = set()

    @property
    def has_batch(self) -> bool:
        return len(self._complete) >= self._trajs_per_batch

    @ctrl_c_waits
    def add(self, batch: TensorDictBase) -> None:
        """Take a batch ``[*batch_size, T]`` apart; envs in order, episodes in order within each."""
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise KeyError("trajs_per_batch needs ('collector', 'traj_ids'), which this batch does not have")
        if not batch.batch_size.numel():  # it was stopped before its first frame
            return
        rows = batch.reshape(1, -1) if batch.ndim == 1 else batch.reshape(-1, batch.shape[-1])
        rows.names = None
        ends = _ends(rows)
        finished: list[tuple[int, int, TensorDictBase]] = []
        for env in range(rows.shape[0]):
            start = 0
            env_ids = ids.reshape(rows.shape)[env]
            env_ids = env_ids[: int((env_ids >= 0).sum())]  # what a worker that was stopped did not collect is behind
            if not len(env_ids):
                continue
            # A change of id without an end is an episode that was cut short: it will never be complete.
            cuts = (env_ids[1:] != env_ids[:-1]).nonzero().reshape(-1).tolist()
            stops = sorted({*ends[env].nonzero().reshape(-1).tolist(), *cuts, len(env_ids) - 1})
            for stop in stops:
                # A copy: a view would keep the whole batch alive, and see what is written there next.
                piece = rows[env, start : stop + 1].clone()
                traj_id = int(env_ids[start])
                self._pending.setdefault(traj_id, []).append(piece)
                if bool(ends[env, stop]):
                    pieces = self._pending.pop(traj_id)
                    if traj_id in self.fragments:
                        self.fragments.discard(traj_id)
                    else:
                        finished.append((stop, env, _joined(pieces)))
                elif stop in cuts:
                    self._pending.pop(traj_id)
                start = stop + 1
        # In the order in which they were completed.
        finished.sort(key=lambda entry: entry[:2])
        self._complete.extend(trajectory for _, _, trajectory in finished)

    def drop(self, traj_ids: Iterable[int]) -> None:
        """Forget episodes in progress: their envs were reset."""
        for traj_id in traj_ids:
            self._pending.pop(int(traj_id), None)

    def drop_all(self) -> None:
        """Forget all episodes in progress."""
        self._pending.clear()

    @ctrl_c_waits
    def pop(self) -> TensorDictBase | None:
        """A batch of whole episodes, or None while there are too few."""
        if not self.has_batch:
            return None
        chosen = [self._complete.popleft() for _ in range(min(self.most, len(self._complete)))]
        if self._format == "cat":
            return _joined(chosen)
        return pad_trajectories(chosen, ("collector", "mask"))

"""Reward2GoTransform: what an episode still brings, in each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from swath.data.sequences import (
    MASK,
    BatchTransform,
    discounted_sums,
    find,
    goes_on,
    like,
    masks_of,
    refuse_number,
    time_last,
    without_last_ones,
)
from swath.keys import as_key, show
from swath.warn import warn_user


class Reward2GoTransform(BatchTransform):
    """The discounted sum of rewards from each step to its episode's end; for a replay buffer, or a batch (``inv``).

    What is written must have episodes that end: collect whole ones with ``trajs_per_batch``, or batches that are longer
    than an episode. Of an episode that does not end in a batch, only what is in it can be summed; a warning says so.

    Args:
        gamma: the discount.
        in_keys: the rewards; ``("next", "reward")`` by default.
        out_keys: where the sums are written; over the rewards by default.
        done_key: which flag in ``next`` ends episodes.

    >>> from swath.collectors import Collector
    >>> to_go = Reward2GoTransform(gamma=0.5, out_keys=["to_go"])
    >>> batch = next(iter(Collector("CartPole-v1", frames_per_batch=200, trajs_per_batch=1, postproc=to_go.inv)))
    >>> batch["to_go"].reshape(-1)[-3:]
    tensor([1.7500, 1.5000, 1.0000])
    """

    def __init__(
        self,
        gamma: float | torch.Tensor = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey = "done",
    ) -> None:
        if isinstance(gamma, torch.Tensor) and gamma.numel() != 1:
            refuse_number("Reward2GoTransform", "gamma", gamma, "one number for all")
        self.gamma = float(gamma)
        self.in_keys = [("next", "reward")] if in_keys is None else list(in_keys)
        self.out_keys = list(self.in_keys if out_keys is None else out_keys)
        if len(self.in_keys) != len(self.out_keys) or not self.in_keys:
            raise ValueError(
                f"Reward2GoTransform: in_keys and out_keys are pairs, got {self.in_keys} and {self.out_keys}"
            )
        self.done_key = done_key

    def inv(self, data: TensorDictBase) -> TensorDictBase:
        """A batch ``[*envs, time]`` with the sums; the given one is not changed."""
        batch, back = time_last(data, type(self).__name__)
        who, lead = type(self).__name__, batch.batch_dims
        flag = ("next", *as_key(self.done_key))
        done = without_last_ones(find(batch, flag, who, "says where episodes end (done_key)"), lead)
        mask = masks_of(batch, (MASK, ("mask",)))
        self._require_ends(done.bool(), mask, lead - 1)
        going = goes_on(done, batch, mask)
        made: Any = batch.copy()
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            reward = find(batch, as_key(in_key), who, "is to be summed (in_keys)")
            sums = discounted_sums(reward, like(going, reward, who), self.gamma, batch.shape[-1], lead - 1)
            made.set(as_key(out_key), sums)
        return back(made)

    def inv_rows(self, rows: TensorDictBase, first_env: int | None) -> list[tuple[int | None, TensorDictBase]]:
        """How a replay buffer calls it with frames ``[envs, time]`` of a collector."""
        return [(first_env, self.inv(rows))]

    def _require_ends(self, done: torch.Tensor, mask: torch.Tensor | None, time: int) -> None:
        if not done.numel():
            return
        if not bool(done.any(time).all()):
            raise RuntimeError(
                f"Reward2GoTransform: no episode ends in some rows of this batch {tuple(done.shape)}, so that what is "
                f"still to come is not known. Collect whole episodes (trajs_per_batch=), or more frames_per_batch than "
                f"an episode has; {show(('next', *as_key(self.done_key)))} says where they end"
            )
        if mask is not None:
            done = done | ~mask.reshape(*mask.shape, *[1] * (done.ndim - mask.ndim))
        if not bool(done.select(time, -1).all()):
            warn_user(
                "Reward2GoTransform: the batch ends in the middle of episodes; of those, the reward to go is that "
                "of the batch's own frames only. Collect whole episodes (trajs_per_batch=)"
            )

    def __repr__(self) -> str:
        return f"Reward2GoTransform(gamma={self.gamma}, in_keys={self.in_keys}, out_keys={self.out_keys})"

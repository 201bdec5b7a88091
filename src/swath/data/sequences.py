"""Frames in the order of time: where episodes go on, what lies how far ahead, and sums over it.

All of it is done for whole batches at once, in a number of operations that does not depend on the number of frames or
of episodes, but for logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.keys import Key, as_key, show
from swath.rollout.delivery import TRAJ_IDS

MASK: Key = ("collector", "mask")


def looks_ahead(function: Any) -> bool:
    """Whether this, given as a ``postproc``, takes frames that lie behind one another for an env's next ones."""
    owner = getattr(function, "__self__", function)
    return bool(getattr(type(owner), "looks_ahead", False))


def require_ids(data: TensorDictBase, who: str) -> None:
    """Of frames of several envs behind one another: that it can be seen where those of one end."""
    if data.get(TRAJ_IDS, None) is None:
        raise ValueError(
            f"{who} would take frames of one env for the next ones of another: they lie behind one another in a batch "
            f"{tuple(data.batch_size)} without {show(TRAJ_IDS)}. Leave track_traj_ids=True, or collect [envs, time]"
        )


class BatchTransform:
    """What is done to frames that are written to a replay buffer (``inv``) or sampled from it; nothing for an env.

    It cannot be a transform of an env: an env gives one step, and what lies ahead is not known then.
    """

    #: Whether it is called with samples.
    changes_samples = False
    looks_ahead = True

    @property
    def instead_of_env(self) -> str:
        """For who gives it to an env: what to write."""
        return f"rb.append_transform({self}), for a replay buffer rb"

    def __call__(self, data: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} changes what is written to a replay buffer of swath, where it is called by itself "
            f"(rb.append_transform). {self._instead_of_call}"
        )

    #: For who calls it with a batch, or gives it as ``postproc``.
    _instead_of_call = "For a batch of your own, or as a collector's postproc, give its inv: postproc=transform.inv"


def time_last(data: Any, who: str) -> tuple[TensorDictBase, Callable[[Any], Any]]:
    """A batch with time as its last dimension, and the way back.

    Time is the dimension that is called ``"time"``, else the last.
    """
    if not is_tensor_collection(data):
        raise TypeError(f"{who} takes a batch as a TensorDict, got {type(data).__name__}")
    if not data.batch_dims:
        raise ValueError(f"{who} takes a batch [*envs, time]; this TensorDict has no batch size")
    batch: Any = data
    if "time" not in batch.names[:-1]:
        return batch, lambda made: made
    at = batch.names.index("time")
    return batch.transpose(at, -1), lambda made: None if made is None else made.transpose(at, -1)


def unnamed(data: TensorDictBase) -> TensorDictBase:
    """With other dimensions than it had, names are lost or in the way."""
    if data.names is not None and any(name is not None for name in data.names):
        data = data.copy()
        data.names = None
    return data


def find(data: TensorDictBase, key: Key, who: str, what: str) -> torch.Tensor:
    value = data.get(key, None)
    if value is None:
        known = ", ".join(show(as_key(each)) for each in data.keys(True, True))
        raise KeyError(f"{who}: there is no {show(key)} in this batch, which {what}; it has {known}")
    return value


def without_last_ones(flag: torch.Tensor, num_dims: int) -> torch.Tensor:
    """A flag or an id of each frame, ``[*envs, time]`` or with ones behind that, without these."""
    while flag.ndim > num_dims and flag.shape[-1] == 1:
        flag = flag.squeeze(-1)
    return flag


def like(flag: torch.Tensor, value: torch.Tensor, who: str) -> torch.Tensor:
    """A flag ``[*envs, time, *more]`` with as many dimensions as a value, for which it holds."""
    fits = value.shape[: flag.ndim] == flag.shape
    if not fits:
        raise ValueError(
            f"{who}: what ends an episode has shape {tuple(flag.shape)}, and does not fit what is summed, "
            f"{tuple(value.shape)}; give the done_key of these rewards"
        )
    return flag.reshape(*flag.shape, *[1] * (value.ndim - flag.ndim))


def masks_of(data: TensorDictBase, keys: Sequence[Key]) -> torch.Tensor | None:
    """Which frames are none but fill up; None where all are frames."""
    masks = [data.get(key, None) for key in dict.fromkeys(keys)]
    masks = [mask for mask in masks if mask is not None and mask.dtype is torch.bool]
    masks = [mask.reshape(data.batch_size) for mask in masks if mask.numel() == data.batch_size.numel()]
    return torch.stack(masks).all(0) if masks else None


def goes_on(done: torch.Tensor, data: TensorDictBase, mask: torch.Tensor | None) -> torch.Tensor:
    """Where the frame behind is the same episode's next step; ``done`` is ``[*envs, time, *more]``.

    An episode ends where it says so, where another trajectory begins, and where frames end that only fill up.
    """
    time = data.batch_dims - 1
    going = ~done.bool()
    going.narrow(time, max(0, done.shape[time] - 1), min(1, done.shape[time])).fill_(False)
    ids = data.get(TRAJ_IDS, None)
    for mark in (ids, mask):
        if mark is None or mark.numel() != data.batch_size.numel():
            continue
        mark = mark.reshape(data.batch_size)
        same = torch.zeros_like(mark, dtype=torch.bool)
        same[..., :-1] = mark[..., 1:] == mark[..., :-1]
        going &= same.reshape(*same.shape, *[1] * (going.ndim - same.ndim))
    return going


def steps_to_end(going: torch.Tensor, at_most: int, time: int) -> torch.Tensor:
    """How many frames there are from each one to its episode's last, both counted; ``at_most`` so many."""
    length = going.shape[time]
    numbers = torch.arange(length, device=going.device).reshape(-1, *[1] * (going.ndim - time - 1))
    ends = torch.where(going, length, numbers)
    if length:
        ends = ends.flip(time).cummin(time).values.flip(time)
    return (ends - numbers + 1).clamp_max(at_most)


def discounted_sums(values: torch.Tensor, going: torch.Tensor, gamma: float, num_steps: int, time: int) -> torch.Tensor:
    """Of each frame: the sum over it and those ahead, ``num_steps`` at most and never beyond the episode's end.

    Each of them is worth ``gamma`` times the one before. Sums of 1, 2, 4, ... steps are made of one another.

    >>> discounted_sums(torch.ones(5), torch.tensor([True, True, False, True, False]), 0.5, 2, time=0)
    tensor([1.5000, 1.5000, 1.0000, 1.5000, 1.0000])
    """
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    block = values.to(torch.float32 if dtype.itemsize < 4 else dtype)
    num_steps = max(1, min(num_steps, values.shape[time]))
    total: torch.Tensor | None = None
    length = 1  # of what ``block`` sums; ``going`` says where so many steps lead to the same episode

    def followed_by(further: torch.Tensor) -> torch.Tensor:
        # What is beyond an end is left out, not multiplied by 0: it may be infinite, or no number.
        ahead = _ahead(further, length, time)
        return block + torch.where(going, gamma**length * ahead, torch.zeros_like(ahead))

    while True:
        if num_steps & length:
            total = block if total is None else followed_by(total)
        if 2 * length > num_steps:
            break
        block = followed_by(block)
        going = going & _ahead(going, length, time)
        length *= 2
    assert total is not None
    return total.to(dtype)


def _ahead(values: torch.Tensor, count: int, time: int) -> torch.Tensor:
    """What is so many frames ahead of each; zeros beyond the last."""
    length = values.shape[time]
    count = min(count, length)
    rest = torch.zeros_like(values.narrow(time, 0, count))
    return torch.cat([values.narrow(time, count, length - count), rest], time)


def refuse_number(who: str, name: str, value: Any, expected: str) -> NoReturn:
    raise ValueError(f"{who}: {name} is {expected}, got {value!r}")

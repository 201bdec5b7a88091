"""TransformChain: a buffer's transforms, called with samples in order, and their ``inv`` with what is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from swath.data.inverses import checked_transform, claimed, inverts, require_by_env
from swath.data.multi_step import MultiStepTransform
from swath.data.sequences import BatchTransform, looks_ahead, require_ids
from swath.data.storage_base import Storage
from swath.data.storages import TensorStorage
from swath.warn import warn_user


class TransformChain:
    """Those of one buffer. Some hold frames back until they know what comes next."""

    def __init__(self) -> None:
        self._transforms: list[Any] = []

    def __len__(self) -> int:
        return len(self._transforms)

    def __getitem__(self, index: int) -> Any:
        return self._transforms[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._transforms)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(type(each).__name__ for each in self)})"

    def insert(self, index: int, transform: Any, owner: Any) -> None:
        """Put it before the ``index``-th, for the buffer ``owner``."""
        if not -len(self) <= index <= len(self):
            raise ValueError(f"a transform can be inserted from {-len(self)} to {len(self)} here, not at {index}")
        self._transforms.insert(index, claimed(checked_transform(transform), owner))

    def require_equal_rows(self, storage: Storage, data: Any) -> None:
        """Where rows are stored as they are, a transform may not change how long they are."""
        if not self.can_hold or not isinstance(storage, TensorStorage) or not storage.is_laid_out:
            return
        known = dict(storage.laid_out().layout.sizes).get((), torch.Size())
        if known != data.batch_size[1:]:
            raise ValueError(
                f"MultiStepTransform holds back the end of each row, so that the first rows are {tuple(known)} and "
                f"these {tuple(data.batch_size[1:])}. Store frames: {type(storage).__name__}(max_size, ndim=2)"
            )

    # -- samples ---------------------------------------------------------------------------------------------------

    def apply(self, sample: Any) -> Any:
        for transform in self._transforms:
            if getattr(transform, "changes_samples", True):
                sample = transform(sample)
        return sample

    # -- what is written -------------------------------------------------------------------------------------------

    @property
    def changes_what_is_written(self) -> bool:
        return any(map(inverts, self._transforms))

    def _inverting(self) -> Iterator[Any]:
        return filter(inverts, reversed(self._transforms))

    def require_ids(self, frames: TensorDictBase) -> None:
        """Of frames ``[n]`` of several envs: that transforms which look ahead can tell these apart."""
        for transform in self._transforms:
            if looks_ahead(transform) and inverts(transform):
                require_ids(frames, type(transform).__name__)

    def inverted(self, data: Any, storage: Storage, dim_extend: int | None) -> Any:
        """What is to be stored of a user's data; None if that is nothing."""
        for transform in self._inverting():
            if data is None:
                break
            if isinstance(transform, BatchTransform):
                data = _in_time(transform, data, storage, dim_extend)
            else:
                data = transform.inv(data)
        return data

    def inverted_in_place(self, data: Any) -> Any:
        """What is to be stored in place of frames that are there."""
        for transform in self._inverting():
            if looks_ahead(transform):
                raise TypeError(
                    f"{type(transform).__name__} needs the frames behind one, and rb[i] = data has none; "
                    "rb.storage.set(index, data) stores data as it is"
                )
            data = transform.inv(data.copy() if isinstance(data, TensorDictBase) else data)
        return data

    def inverted_rows(self, rows: Any, first_track: int | None) -> list[tuple[int | None, Any]]:
        """What is to be stored of a collector's frames: rows, and the track of the first."""
        parts: list[tuple[int | None, Any]] = [(first_track, rows)]
        for transform in self._inverting():
            if isinstance(transform, BatchTransform):
                parts = [made for first, part in parts for made in transform.inv_rows(part, first)]
                continue
            require_by_env(transform)
            made = [(first, transform.inv(part.copy())) for first, part in parts]  # a hook may have what was collected
            parts = [(first, part) for first, part in made if part is not None]
        return parts

    # -- what is held back -----------------------------------------------------------------------------------------

    @property
    def _holding(self) -> list[MultiStepTransform]:
        return [transform for transform in self._transforms if isinstance(transform, MultiStepTransform)]

    @property
    def can_hold(self) -> bool:
        """Whether one of them keeps frames for later."""
        return bool(self._holding)

    def holds(self, track: int) -> bool:
        """Whether the last frames of an env are held back."""
        return any(transform.holds(track) for transform in self._holding)

    def end(self, tracks: range) -> None:
        """What is held back of these envs has no next."""
        for transform in self._holding:
            transform.end(tracks)

    @property
    def next_traj_id(self) -> int:
        """Above all ids of what is held back."""
        return max((transform.next_traj_id for transform in self._holding), default=0)

    def clear(self) -> None:
        """Forget it."""
        for transform in self._holding:
            transform.clear()

    def held(self) -> dict[int, dict[str, Any]]:
        """What each transform holds back, by its place."""
        return {i: each.state_dict() for i, each in enumerate(self) if isinstance(each, MultiStepTransform)}

    def hold(self, held: Mapping[int, Mapping[str, Any]]) -> None:
        """What ``held`` gave."""
        for number, state in held.items():
            transform = self._transforms[number] if number < len(self) else None
            if isinstance(transform, MultiStepTransform):
                transform.load_state_dict(state)
            elif state["held"]:
                count = sum(len(frames) for frames in state["held"].values())
                warn_user(
                    f"{count} frames that a MultiStepTransform held back when this was saved are left out: transform "
                    f"{number} of this buffer is none. Append the same transforms before loading"
                )


def _in_time(transform: BatchTransform, data: Any, storage: Storage, dim_extend: int | None) -> Any:
    """Invert what takes time as the last dimension."""
    if storage.ndim == 1 or not is_tensor_collection(data):
        return transform.inv(data)
    time_dim = storage.time_dim(data, dim_extend)
    if time_dim == len(data.shape) - 1:
        return transform.inv(data)
    made = transform.inv(data.transpose(time_dim, -1))
    return None if made is None else made.transpose(time_dim, -1)

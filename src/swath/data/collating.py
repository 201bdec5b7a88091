"""What a sample is put together from, where frames are entries of a list; and what is said of each of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection

from swath.rollout.structure import maybe_dense_stack


def collate(entries: list[Any]) -> Any:
    """One thing of many that are alike."""
    if is_tensor_collection(entries[0]):
        stacked = maybe_dense_stack(entries)
        # The members of a lazy stack are those that are stored.
        return stacked.clone() if isinstance(stacked, LazyStackedTensorDict) else stacked
    if isinstance(entries[0], torch.Tensor):
        return torch.stack(entries)
    if isinstance(entries[0], dict):
        if any(entry.keys() != entries[0].keys() for entry in entries):
            raise ValueError(
                "a sample has dicts with different keys, which are not put together by themselves: give the buffer a "
                "collate_fn=, such as list, which leaves entries as they are"
            )
        return {key: collate([entry[key] for entry in entries]) for key in entries[0]}
    if isinstance(entries[0], (tuple, list)):
        parts = [collate(list(part)) for part in zip(*entries, strict=True)]
        kind = type(entries[0])
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)  # a namedtuple takes them one by one
    if isinstance(entries[0], (int, float, np.ndarray, np.generic)):
        return torch.as_tensor(np.asarray(entries))
    return entries


def set_by_row(data: TensorDictBase, key: str, values: torch.Tensor) -> None:
    """Set what there is one of for each row; all steps of a row have the same."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        for row, value in zip(data.tensordicts, values, strict=True):
            row.set(key, value.expand(row.batch_size))
    elif data.batch_dims > values.ndim:
        data.set(key, values.reshape(-1, *[1] * (data.batch_dims - 1)).expand(data.batch_size))
    else:
        data.set(key, values)

"""What a replay buffer consists of; each part may be exchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from swath.data.samplers import Sampler
from swath.data.storage_base import Storage
from swath.data.transform_chain import TransformChain
from swath.data.writers import Writer

#: What collectors and workers ask of a buffer, besides what users do.
FOR_WRITERS = (
    *("changes_what_is_written", "end_tracks", "may_write", "next_traj_id", "prepare_tracks"),
    *("require_ids", "share_tracks", "write_mixed", "write_rows"),
)


@dataclass
class BufferParts:
    """Shared by all that works on one buffer."""

    storage: Storage
    sampler: Sampler
    writer: Writer
    transforms: TransformChain


def made_of(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    """A part of a buffer that was given: itself, or what makes it."""
    if given is None:
        return default()
    made = given if isinstance(given, kind) else given() if callable(given) else given
    if not isinstance(made, kind):
        instead = f": LazyTensorStorage({made})" if kind.__name__ == "Storage" and isinstance(made, int) else ""
        raise TypeError(
            f"expected a {kind.__name__} of swath.data, or what makes one; got {type(made).__name__}{instead}"
        )
    return made


def check_prefetch(prefetch: int | None, batch_size: int | None, shared: bool) -> None:
    """Refuse a batch size that is none, and what a buffer that prepares samples ahead cannot be."""
    if batch_size is not None and (not isinstance(batch_size, Integral) or batch_size < 1):
        raise ValueError(f"batch_size must be a whole number, at least 1; got {batch_size!r}")
    if prefetch and batch_size is None:
        raise ValueError("prefetch needs batch_size: samples are prepared before they are asked for")
    if prefetch and shared:
        raise ValueError("prefetch does not go with shared=True")


def check_dim_extend(dim_extend: int | None) -> None:
    if dim_extend is not None and dim_extend < 0:
        raise ValueError(f"dim_extend must not be negative, got {dim_extend}")

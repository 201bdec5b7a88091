"""``check_finite=True``: NaN and infinity become an error that names where they came from."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from swath.errors import NonFiniteData
from swath.keys import as_key, show


def require_finite(batch: TensorDictBase) -> None:
    """Raise ``NonFiniteData`` for the earliest NaN or infinity in a batch ``[*batch_size, T]``."""
    found: list[tuple[int, int, str, str]] = []
    for key in batch.keys(True, True):
        leaf = batch.get(key)
        if not leaf.is_floating_point():
            continue
        frames = leaf.reshape(-1, batch.shape[-1], *leaf.shape[batch.ndim :])
        bad = (~torch.isfinite(frames)).flatten(2).any(-1) if frames.ndim > 2 else ~torch.isfinite(frames)
        for env, step in bad.nonzero()[:1].tolist():
            kind = "NaN" if bool(torch.isnan(frames[env, step]).any()) else "infinity"
            found.append((step, env, show(as_key(key)), kind))
    if found:
        step, env, key, kind = min(found)
        raise NonFiniteData(f"{key} holds {kind} at step {step} of this batch in env {env} (check_finite=True)")

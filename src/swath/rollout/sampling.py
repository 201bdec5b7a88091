"""Samplers for the distributions that policies use most, without building the distribution.

A ``torch.distributions`` object spends half a millisecond on checking its arguments, many times what the sampling
takes. Here the same operations are done in the same order, so the same random state gives the same numbers, to the
last bit. Arguments that the distribution would refuse are left to it: ``sampler_for`` gives functions that return
None then, and the caller builds the distribution, which raises what it always raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributions as D

#: Parameters to (sample, log-probability), or None where a parameter is not valid.
Sampler = Callable[..., tuple[torch.Tensor, torch.Tensor] | None]


def sampler_for(kind: Any, parameter_names: list[str], constants: dict[str, Any]) -> Sampler | None:
    """A sampler for ``kind(**parameters, **constants)``, or None if only the distribution itself will do."""
    if set(constants) - {"validate_args"}:
        return None
    return _SAMPLERS.get((kind, frozenset(parameter_names)))


def _is_nan(total: float) -> bool:
    return total != total


def _choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indices ``[..., 1]`` and normalised logits, as ``Categorical`` does it.

    ``logsumexp`` and ``multinomial`` are written out, because their own checks cost more than they compute.
    """
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1, keepdim=True).log_().add_(largest)
    if _is_nan(total.sum().item()):
        return None
    logits = logits - total
    probabilities = torch.softmax(logits, dim=-1)
    race = torch.empty_like(probabilities).exponential_(1)
    return torch.div(probabilities, race, out=race).argmax(-1, keepdim=True), logits


def _categorical(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    chosen = _choose(logits)
    if chosen is None:
        return None
    index, logits = chosen
    return index.squeeze(-1), logits.gather(-1, index).squeeze(-1)


def _one_hot_categorical(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    chosen = _choose(logits)
    if chosen is None:
        return None
    index, logits = chosen
    return torch.zeros_like(logits).scatter_(-1, index, 1), logits.gather(-1, index).squeeze(-1)


_LOG_SQRT_TWO_PI = math.log(math.sqrt(2 * math.pi))


def _normal(loc: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    if loc.shape != scale.shape:
        return None
    sample = loc + torch.empty_like(loc).normal_() * scale
    log_prob = -((sample - loc) ** 2) / (2 * scale**2) - scale.log() - _LOG_SQRT_TWO_PI
    # Not a number, a scale of zero, a negative scale: each shows here.
    return None if _is_nan(log_prob.sum().item()) else (sample, log_prob)


_SAMPLERS: dict[tuple[Any, frozenset[str]], Sampler] = {
    (D.Categorical, frozenset(["logits"])): _categorical,
    (D.OneHotCategorical, frozenset(["logits"])): _one_hot_categorical,
    (D.Normal, frozenset(["loc", "scale"])): _normal,
}

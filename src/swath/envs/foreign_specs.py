"""Specs that are not of swath, as ours."""

from __future__ import annotations

from typing import Any

import torch

from swath.specs import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Spec, Unbounded


def as_own_spec(spec: Any, who: str) -> Spec:
    """A leaf of TorchRL's, by the name of its class; ours as it is."""
    if isinstance(spec, Spec):
        return spec
    kind = type(spec)
    if kind.__module__.startswith("torchrl.data."):
        shape, dtype, device = spec.shape, spec.dtype, spec.device
        for known in kind.__mro__:
            if known.__name__ == "Unbounded":
                return Unbounded(shape, dtype, device)
            if known.__name__ == "Bounded":
                low, high = (bound.cpu().numpy() for bound in (spec.space.low, spec.space.high))
                return Bounded(low, high, shape, dtype, device)
            if known.__name__ in _CHOICES:
                return _CHOICES[known.__name__](spec, shape, dtype, device)
    raise TypeError(
        f"{who} is a {kind.__module__}.{kind.__name__}, not a spec; one is Unbounded((2,)), Bounded(-1, 1, (2,)), "
        "Categorical(5) or another of swath.envs"
    )


def _numbers(nvec: Any) -> Any:
    """Of one env: specs that were expanded repeat them."""
    nvec = torch.as_tensor(nvec)
    return nvec.reshape(-1, nvec.shape[-1])[0].cpu().numpy()


#: By the name that both libraries have. The most special first: a Binary is a Categorical in both.
_CHOICES: dict[str, Any] = {
    "Binary": lambda spec, *rest: Binary(spec.shape[-1], *rest),
    "OneHot": lambda spec, *rest: OneHot(int(spec.space.n), *rest),
    "Categorical": lambda spec, *rest: Categorical(int(spec.space.n), *rest),
    "MultiOneHot": lambda spec, *rest: MultiOneHot([int(box.n) for box in spec.space.boxes], *rest),
    "MultiCategorical": lambda spec, *rest: MultiCategorical(_numbers(spec.nvec), *rest),
}

"""What swath uses of tensordict that tensordict does not document: all of it is here, and known of 0.14.

Everybody else asks this module. Where a name is not there any more, the documented way is taken (slower), or a module
is called as a whole, without being taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import probabilistic

# -- TensorDicts, without checks: for data that is known to be right ---------------------------------------------------

#: ``new_unchecked(source=dict, batch_size=size, device=device)``.
new_unchecked: Callable[..., TensorDict] = getattr(TensorDict, "_new_unsafe", TensorDict)

#: A TensorDict's own dict: what is changed there is changed in it.
entries_of: Callable[[Any], dict[str, Any]] = (
    attrgetter("_tensordict") if hasattr(TensorDict(), "_tensordict") else lambda data: dict(data.items())
)


def put(data: Any, name: str, value: torch.Tensor) -> None:
    """``data.set(name, value)``."""
    data._set_str(name, value, validated=True, inplace=False, non_blocking=False)


if not hasattr(TensorDict, "_set_str"):

    def put(data: Any, name: str, value: torch.Tensor) -> None:
        data.set(name, value)


# -- modules -----------------------------------------------------------------------------------------------------------


def modules_of(sequence: Any) -> list[Any] | None:
    """Those of a TensorDictSequential, in their order; None: not known."""
    walk = getattr(sequence, "_module_iter", None)
    return None if walk is None else list(walk())


def hides_outputs(sequence: Any) -> bool:
    """Whether a TensorDictSequential leaves out some of what its modules write."""
    return bool(getattr(sequence, "_select_before_return", True))


def has_arguments_of_its_own(module: Any) -> bool:
    """Whether a TensorDictModule gives its module more than the values of its in_keys."""
    return getattr(module, "_kwargs", ()) is not None or bool(getattr(module, "_get_kwargs", True))


def has_generator(sampler: Any) -> bool:
    """Whether a ProbabilisticTensorDictModule draws from a generator of its own."""
    return getattr(sampler, "_generator", ()) is not None or getattr(sampler, "_generator_key", ()) is not None


#: Where the exploration type of all threads is kept. Without it swath is not imported: an evaluation in a thread would
#: make the training deterministic, in silence.
INTERACTION_TYPE: Any = probabilistic._interaction_type

"""What swath uses of torch that torch does not document: all of it is here, and known of torch 2.13.

Everybody else asks this module. Without one of these names swath cannot tell whether a recorded policy is right, so it
does not go on without: importing fails, or the first call that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules import module as torch_module

# -- modules -----------------------------------------------------------------------------------------------------------

#: All hooks that are called with whichever module: mappings, which torch changes in place.
GLOBAL_HOOKS = [
    hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict)
]


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module calls more than the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
    )


def parameters_of(layer: nn.Module) -> Iterable[nn.Parameter | None]:
    """Its own, in their order; None for those that it was made without."""
    return layer._parameters.values()


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Its own by name: what is put there is the module's."""
    return module._buffers


# -- operations --------------------------------------------------------------------------------------------------------

Operation = torch._ops.OpOverload
OperationPacket = torch._ops.OpOverloadPacket
#: Functions as ``torch.nn.functional`` calls them.
linear, one_hot = torch._C._nn.linear, torch._C._nn.one_hot


def operation_name(operation: Any) -> str:
    return operation._schema.name.partition("::")[2]


def overload_name(operation: Any) -> str:
    return operation._overloadname


def num_outs(operation: Any) -> int:
    """How many arguments it has that its results are written to."""
    return sum(argument.is_out for argument in operation._schema.arguments)


def binding(name: str) -> Any:
    """What Python calls an operation: with fewer detours than the operation itself; None where there is none."""
    return getattr(torch, name, None) or getattr(torch._C._nn, name, None)


def storage_of(tensor: torch.Tensor) -> int:
    """The same for all tensors of the same memory."""
    return tensor.untyped_storage()._cdata


def changes_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; those that were made for inference do not count."""
    return 0 if tensor.is_inference() else tensor._version


# -- settings ----------------------------------------------------------------------------------------------------------


def modes() -> tuple[int, int]:
    """How many modes look at operations, and at functions."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def validates_arguments() -> bool:
    """Whether distributions check what they are given."""
    return Distribution._validate_args

"""Stacks of layers as flat lists of functional calls.

Walking ``nn.Module.__call__`` costs more than the arithmetic of a small network. A stack of plain layers is
therefore called as ``for function, arguments in calls: x = function(x, *arguments)`` with the layers' own
parameters as arguments: what an optimizer does in place is seen at once. Whatever is not known here (a layer of
another class, one with hooks) is called as it is, so the list is right for every module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Call = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]

#: Layers without parameters: how to call them, from the layer's attributes.
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], Call]] = {
    nn.Tanh: lambda m: (torch.tanh, ()),
    nn.Sigmoid: lambda m: (torch.sigmoid, ()),
    nn.ELU: lambda m: (F.elu, (m.alpha,)),
    nn.SELU: lambda m: (F.selu, ()),
    nn.SiLU: lambda m: (F.silu, ()),
    nn.GELU: lambda m: (lambda x: F.gelu(x, approximate=m.approximate), ()),
    nn.LeakyReLU: lambda m: (F.leaky_relu, (m.negative_slope,)),
    nn.Softplus: lambda m: (F.softplus, (m.beta, m.threshold)),
    nn.Hardtanh: lambda m: (F.hardtanh, (m.min_val, m.max_val)),
    nn.ReLU6: lambda m: (F.relu6, ()),
    nn.Mish: lambda m: (F.mish, ()),
}

#: Layers with parameters; their result is always new memory.
_PARAMETRIC: dict[type[nn.Module], Callable[[Any], Call]] = {
    nn.Linear: lambda m: (torch._C._nn.linear, (m.weight, m.bias)),
    nn.LayerNorm: lambda m: (F.layer_norm, (m.normalized_shape, m.weight, m.bias, m.eps)),
}

_VIEWS: dict[type[nn.Module], Callable[[Any], Call | None]] = {
    nn.Identity: lambda m: None,
    nn.Flatten: lambda m: (torch.flatten, (m.start_dim, m.end_dim)),
}


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does nothing but run its ``forward``."""
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def functional_calls(module: Any) -> list[Call]:
    """A module of one input as a list of calls, equal to calling it.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> x = torch.ones(1, 2)
    >>> y = x
    >>> for function, arguments in functional_calls(net):
    ...     y = function(y, *arguments)
    >>> torch.equal(y, net(x))
    True
    """
    calls: list[Call] = []
    # Whether the current value is memory that nobody else sees, so that it may be changed in place.
    ours = False
    for layer in _flatten(module):
        kind = type(layer)
        if isinstance(layer, nn.Module) and is_plain(layer):
            if kind in _PARAMETRIC:
                calls.append(_PARAMETRIC[kind](layer))
                ours = True
                continue
            if kind is nn.ReLU:
                # Never in place on what was given, also where the layer would: that is the env's observation.
                calls.append((torch.relu_ if ours else torch.relu, ()))
                ours = True
                continue
            if kind is nn.Conv2d and layer.padding_mode == "zeros":
                arguments = (
                    layer.weight,
                    layer.bias,
                    layer.stride,
                    layer.padding,
                    layer.dilation,
                    layer.groups,
                )
                calls.append((F.conv2d, arguments))
                ours = True
                continue
            if kind in _ACTIVATIONS and not getattr(layer, "inplace", False):
                calls.append(_ACTIVATIONS[kind](layer))
                ours = True
                continue
            if kind in _VIEWS:
                call = _VIEWS[kind](layer)
                if call is not None:
                    calls.append(call)
                continue
        calls.append((layer, ()))
        ours = False
    return calls


def _flatten(module: Any) -> list[Any]:
    if type(module) is nn.Sequential and is_plain(module):
        return [leaf for child in module for leaf in _flatten(child)]
    return [module]

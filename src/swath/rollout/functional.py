"""Stacks of layers as flat lists of functions.

Walking ``nn.Module.__call__`` costs more than the arithmetic of a small network, and so does allocating its
intermediate results. A stack of plain layers therefore becomes ``for function in functions: x = function(x)``, with
the layers' own parameters bound (what an optimizer does in place is seen at once) and with intermediate results in
memory that is used again on every step. A layer that is not known here, or has hooks, is called as it is, so the
list is right for every module. Each function does the very operation that the layer would: results are equal to
the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swath.rollout.torch_internals import has_hooks, parameters_of

Function = Callable[[torch.Tensor], torch.Tensor]

#: Layers without parameters, whose result is new memory.
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], Function]] = {
    nn.Tanh: lambda m: torch.tanh,
    nn.Sigmoid: lambda m: torch.sigmoid,
    nn.ELU: lambda m: lambda x: F.elu(x, m.alpha),
    nn.SELU: lambda m: torch.selu,
    nn.SiLU: lambda m: F.silu,
    nn.GELU: lambda m: lambda x: F.gelu(x, approximate=m.approximate),
    nn.LeakyReLU: lambda m: lambda x: F.leaky_relu(x, m.negative_slope),
    nn.Softplus: lambda m: lambda x: F.softplus(x, m.beta, m.threshold),
    nn.Hardtanh: lambda m: lambda x: F.hardtanh(x, m.min_val, m.max_val),
    nn.Mish: lambda m: F.mish,
}

#: Activations that may work in place on memory that is ours.
_IN_PLACE: dict[type[nn.Module], Function] = {
    nn.ReLU: torch.relu_,
    nn.Tanh: torch.tanh_,
    nn.Sigmoid: torch.sigmoid_,
}


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module does nothing but run its class's ``forward``."""
    return not has_hooks(module) and "forward" not in module.__dict__ and type(module).__call__ is nn.Module.__call__


def layers_of(module: Any) -> list[Any]:
    """A tree of plain ``nn.Sequential`` as a flat list."""
    if type(module) is nn.Sequential and is_plain(module):
        return [leaf for child in module for leaf in layers_of(child)]
    return [module]


def stack_fingerprint(module: Any) -> list[Any]:
    """Changes when a layer, the memory of a parameter, a hook or the autocast mode does."""
    seen: list[Any] = [torch.is_autocast_enabled("cpu")]
    for layer in layers_of(module):
        known = _is_known(layer)
        seen += (layer, known)  # modules compare by identity
        if known:
            seen += [p if p is None else (p.data_ptr(), p.shape) for p in parameters_of(layer)]
    return seen


def stack_functions(module: Any, shape: torch.Size, *, result_leaves: bool = True) -> list[Function]:
    """A module of one input, of this shape, as a list of functions, equal to calling it.

    ``result_leaves=False`` if the result is used up before the next call, so that it may lie in reused memory.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> y = x = torch.ones(1, 2)
    >>> with torch.no_grad():
    ...     for function in stack_functions(net, x.shape):
    ...         y = function(y)
    >>> torch.equal(y, net(x))
    True
    """
    layers = layers_of(module)
    functions: list[Function] = []
    # Whether the current value is memory that nobody else sees, so that it may be changed in place.
    ours = False
    # The shape of the value without its last dimension, as long as it is known: these layers keep it.
    lead: torch.Size | None = shape[:-1]
    for index, layer in enumerate(layers):
        kind = type(layer)
        if not _is_known(layer) or kind in (nn.Conv2d, nn.Flatten):
            lead = None
        if not _is_known(layer):
            functions.append(layer)
            ours = False
        elif kind is nn.Linear:
            reuse_memory = not _escapes(layers[index + 1 :], result_leaves)
            functions.append(_linear(layer, reuse_memory=reuse_memory, lead=lead))
            ours = True
        elif kind in _IN_PLACE and ours:
            functions.append(_IN_PLACE[kind])
        elif kind is nn.ReLU:  # never in place on what was given, also where the layer would: it is the env's
            functions.append(torch.relu)
            ours = True
        elif kind in _ACTIVATIONS:
            functions.append(_ACTIVATIONS[kind](layer))
            ours = True
        elif kind is nn.LayerNorm:
            functions.append(_layer_norm(layer))
            ours = True
        elif kind is nn.Conv2d:
            functions.append(_conv2d(layer))
            ours = True
        elif kind is nn.Flatten:
            functions.append(_flatten(layer))
        # What is left is nn.Identity.
    return functions


def is_known_stack(module: Any) -> bool:
    """Whether every layer of a stack is known, so that nothing in it keeps what it is given."""
    return all(_is_known(layer) for layer in layers_of(module))


def _escapes(following: list[Any], result_leaves: bool) -> bool:
    """Whether a result's memory is seen outside: by a layer that is not known (it might keep it), or at the end."""
    for layer in following:
        if not _is_known(layer):
            return True
        if type(layer) not in (nn.Flatten, nn.Identity, *_IN_PLACE):
            return False  # its result is new memory
    return result_leaves


def _is_known(layer: Any) -> bool:
    if not isinstance(layer, nn.Module) or not is_plain(layer):
        return False
    kind = type(layer)
    if kind is nn.Conv2d:
        return layer.padding_mode == "zeros"
    return kind in (nn.Linear, nn.ReLU, nn.LayerNorm, nn.Flatten, nn.Identity) or (
        kind in _ACTIVATIONS and not getattr(layer, "inplace", False)
    )


def _linear(layer: nn.Linear, *, reuse_memory: bool, lead: torch.Size | None) -> Function:
    """``nn.Linear`` without its detours: on one or two dimensions it is ``addmv`` or ``addmm``.

    ``lead`` is the shape of its input without the last dimension, where that is known.
    """
    weight, bias = layer.weight, layer.bias
    if bias is None or not _is_simple(weight):
        return lambda x: F.linear(x, weight, bias)
    size, weight_t, addmm, addmv = weight.shape[0], weight.t(), torch.addmm, torch.addmv

    def into_new_memory(x: torch.Tensor) -> torch.Tensor:
        dims = x.dim()
        if dims == 1:
            return addmv(bias, weight, x)
        return addmm(bias, x, weight_t) if dims == 2 else F.linear(x, weight, bias)

    if not reuse_memory:
        return into_new_memory
    vector = weight.new_empty(size)
    if lead is not None and len(lead) == 0:
        return lambda x: addmv(bias, weight, x, out=vector)
    if lead is not None and len(lead) == 1:
        matrix = weight.new_empty((*lead, size))
        return lambda x: addmm(bias, x, weight_t, out=matrix)
    return into_new_memory


def linear_into(layer: Any, row: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
    """A last ``nn.Linear`` as ``function(x, out)`` that writes to rows like this one; None if it cannot."""
    if not (_is_known(layer) and type(layer) is nn.Linear and layer.bias is not None and _is_simple(layer.weight)):
        return None
    weight, bias = layer.weight, layer.bias
    if row.dtype != weight.dtype or row.device != weight.device or row.shape[-1:] != weight.shape[:1]:
        return None
    if row.dim() == 2:
        weight_t, addmm = weight.t(), torch.addmm
        return lambda x, out: addmm(bias, x, weight_t, out=out)
    if row.dim() == 1:
        addmv = torch.addmv
        return lambda x, out: addmv(bias, weight, x, out=out)
    return None


def _is_simple(weight: torch.Tensor) -> bool:
    """Whether ``out=`` does just what the layer does: not under autocast, nor where a device has its own kernels."""
    return weight.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _layer_norm(layer: nn.LayerNorm) -> Function:
    shape, weight, bias, eps = layer.normalized_shape, layer.weight, layer.bias, layer.eps
    return lambda x: F.layer_norm(x, shape, weight, bias, eps)  # type: ignore[arg-type]


def _conv2d(layer: nn.Conv2d) -> Function:
    arguments = (layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return lambda x: F.conv2d(x, *arguments)  # type: ignore[arg-type]


def _flatten(layer: nn.Flatten) -> Function:
    start, end = layer.start_dim, layer.end_dim
    return lambda x: torch.flatten(x, start, end)

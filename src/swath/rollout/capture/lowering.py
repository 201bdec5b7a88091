"""Lowering: an operation as the cheapest call that writes its recorded result again, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swath.rollout.capture.recording import EQUAL, LINEAR, ONE_HOT, TO_LIST, Node
from swath.rollout.capture.rewrites import LOOKS, Makers, gives_probabilities, no_nan
from swath.rollout.torch_internals import Operation, binding, num_outs, overload_name, storage_of


@dataclass(frozen=True, eq=False)
class Statement:
    """``function(*args, **kwargs)``, and which parts of what it returns are copied where (None: all of it).

    Or what it returns stands for a recorded tensor in the statements that follow.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    copied: tuple[tuple[int | None, torch.Tensor], ...] = ()
    stands_for: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Check:
    """A value that decided something: ``look[0]`` or ``look()`` must be what it was; None: must be a number."""

    look: Any
    expected: Any
    is_memory: bool
    where: str


#: What they give does not depend on values, only on shapes.
_CONSTANT_LIKE = frozenset(["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"])
_EMPTY = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"])
#: A copy, with another dtype perhaps.
_COPIES = frozenset(["clone", "_to_copy"])


def lowered(order: Sequence[Node], nodes: list[Node], outputs: Sequence[torch.Tensor]) -> Iterator[Statement | Check]:
    """The statements for these operations, in this order; ``nodes`` are all that were recorded."""
    changed = {storage_of(tensor) for node in order for tensor in node.written}
    read = {storage_of(tensor) for node in order for tensor in node.inputs} | {storage_of(t) for t in outputs}
    numbers = {id(node.args[0]) for node in order if node.op is no_nan}
    makers = Makers(nodes)
    passed_on = _passed_on(order, outputs)
    with torch.random.fork_rng(devices=[]):  # calls are tried out
        for node in order:
            if node.name == "logsumexp" and _is_subtracted_and_checked(node, order, numbers):
                yield from _logsumexp(node)
            elif node.name == "multinomial" and _is_softmax_of_numbers(node, makers, numbers):
                yield from _multinomial(node)
            else:
                yield from _lower(node, changed, read, passed_on)


def _passed_on(order: Sequence[Node], outputs: Sequence[torch.Tensor]) -> set[int]:
    """Results (by identity) that need no memory of their own: nobody looks at them but the operations they go to."""
    tensors: dict[int, set[int]] = {}
    needed = {storage_of(tensor) for tensor in outputs}
    for node in order:
        for tensor in (*node.inputs, *node.outputs):
            tensors.setdefault(storage_of(tensor), set()).add(id(tensor))
        if not _is_plain(node):
            needed |= {storage_of(tensor) for tensor in (*node.inputs, *node.outputs)}
    made = (tensor for node in order for tensor in node.made)
    return {id(t) for t in made if storage_of(t) not in needed and len(tensors[storage_of(t)]) == 1}


def _is_plain(node: Node) -> bool:
    """Whether it is run on what it is given as it is, not on a view of it, a look into its memory, or a list."""
    special = node.is_check or node.is_there_to_raise or node.op in (no_nan, LINEAR, torch.matmul, ONE_HOT)
    given = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.Tensor)]
    in_order = not special and not node.written and node.name not in ("logsumexp", "multinomial")
    return in_order and len(given) == len(node.inputs)


def _lower(node: Node, changed: set[int], read: set[int], passed_on: set[int]) -> Iterator[Statement | Check]:
    if node.op is no_nan:
        yield from _no_nan(node)
    elif node.is_check:
        yield _check(node)
    elif node.pristine is not None or node.name in _CONSTANT_LIKE:
        if storage_of(node.outputs[0]) in changed:
            yield _anew(node)
    elif node.is_there_to_raise:
        yield Statement(node.op, node.args, node.kwargs)
    elif node.name in _EMPTY or _is_view(node):
        return
    elif node.written:
        yield _in_place(node)
    elif node.name in _COPIES:
        yield Statement(torch.Tensor.copy_, (node.outputs[0], node.inputs[0]))
    elif node.op is LINEAR:
        yield _linear(node)
    elif node.op is torch.matmul:
        yield _product(node)
    elif node.op is ONE_HOT:
        yield Statement(torch.Tensor.zero_, (node.result,))
        yield Statement(torch.Tensor.scatter_, (node.result, -1, node.args[0].unsqueeze(-1), 1))
    else:
        yield _out_of_place(node, read, passed_on)


def _is_view(node: Node) -> bool:
    """Whether it only looks at what it was given, which stays where it is."""
    given = {storage_of(tensor) for tensor in node.inputs}
    return bool(given) and not node.written and all(storage_of(tensor) in given for tensor in node.outputs)


def _check(node: Node) -> Check:
    if node.op is EQUAL:
        first, second = node.args
        return Check(lambda: torch.equal(first, second), node.result, False, node.where)
    (tensor,) = node.inputs
    if node.op is TO_LIST:
        return Check(tensor.tolist, node.result, False, node.where)
    if tensor.device.type == "cpu" and tensor.dtype not in (torch.bfloat16, torch.float16):
        return Check(_seen(tensor), node.result, True, node.where)
    return Check(tensor.item, node.result, False, node.where)


def _seen(number: torch.Tensor) -> memoryview:
    """A number in main memory, to be read without a call: ``[0]`` of this."""
    return memoryview(number.view(1).numpy())  # type: ignore[arg-type]


def _no_nan(node: Node) -> Iterator[Statement | Check]:
    (x,) = node.args
    total = x.new_empty(())
    yield Statement(torch.sum, (x, tuple(range(x.dim()))), {"out": total})
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        yield Check(_seen(total), None, True, node.where)
    else:
        yield Check(total.item, None, False, node.where)


def _is_subtracted_and_checked(node: Node, order: Sequence[Node], numbers: set[int]) -> bool:
    """``x - x.logsumexp(-1, keepdim=True)`` that is known to have no NaN in it, so no infinity was the largest."""
    x, dims, *keepdim = node.args
    if keepdim != [True] or list(dims) not in ([-1], [x.dim() - 1]):
        return False
    return any(
        user.name == "sub" and len(user.inputs) == 2 and user.inputs[1] is node.result and id(user.result) in numbers
        for user in order
    )


def _logsumexp(node: Node) -> Iterator[Statement]:
    """The same operations in the same order, without what is only for infinities."""
    x, out = node.args[0], node.result
    largest, shifted = torch.empty_like(out), torch.empty_like(x)
    yield Statement(torch.amax, (x, -1, True), {"out": largest})
    yield Statement(torch.sub, (x, largest), {"out": shifted})
    yield Statement(torch.exp_, (shifted,))
    yield Statement(torch.sum, (shifted, -1, True), {"out": out})
    yield Statement(torch.log_, (out,))
    yield Statement(torch.Tensor.add_, (out, largest))


def _is_softmax_of_numbers(node: Node, makers: Makers, numbers: set[int]) -> bool:
    """One sample of what can only be probabilities: there is nothing to check."""
    maker = makers.through(node.args[0], LOOKS)
    return (
        node.args[1] == 1
        and maker is not None
        and maker.name == "_softmax"
        and gives_probabilities(maker, makers, numbers)
    )


def _multinomial(node: Node) -> Iterator[Statement]:
    """The same operations in the same order, without the checks, which take longer than they do."""
    probabilities, out = node.args[0], node.result
    race = torch.empty_like(probabilities)
    yield Statement(torch.Tensor.exponential_, (race, 1))
    yield Statement(torch.div, (probabilities, race), {"out": race})
    yield Statement(torch.argmax, (race, -1, True), {"out": out})


def _anew(node: Node) -> Statement:
    """A constant that is changed later on."""
    (result,) = node.outputs
    if node.pristine is not None:
        return Statement(torch.Tensor.copy_, (result, node.pristine))
    value = {"zeros": 0, "ones": 1}.get(node.name.removeprefix("new_").removesuffix("_like"))
    return Statement(torch.Tensor.fill_, (result, node.args[-1] if value is None else value))


def _in_place(node: Node) -> Statement:
    name = node.name
    method = getattr(torch.Tensor, name, None) if name.endswith("_") else None
    if method is None or node.kwargs or overload_name(node.op) not in ("default", "Tensor", "Scalar"):
        method = node.op
    return Statement(method, node.args, node.kwargs)


def _linear(node: Node) -> Statement:
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    (out,) = node.outputs
    if bias is not None and weight.device.type == "cpu" and x.dtype is weight.dtype is bias.dtype:
        if x.dim() == 1:
            return Statement(torch.addmv, (bias, weight, x), {"out": out})
        if x.dim() == 2:
            return Statement(torch.addmm, (bias, x, weight.t()), {"out": out})
    return Statement(node.op, node.args, node.kwargs, ((None, out),))


def _product(node: Node) -> Statement:
    a, b = node.args
    (out,) = node.outputs
    if a.dim() == 1 and b.dim() == 2:  # as it is done inside, where ``out=`` would be resized
        return Statement(torch.mm, (a.unsqueeze(0), b), {"out": out.unsqueeze(0)})
    if a.dim() == 2 and b.dim() in (1, 2):
        return Statement(torch.mm if b.dim() == 2 else torch.mv, (a, b), {"out": out})
    return Statement(torch.matmul, (a, b), {}, ((None, out),))


def _out_of_place(node: Node, read: set[int], passed_on: set[int]) -> Statement:
    function = binding(node.name)
    if node.name == "relu":  # which is this, and has no ``out=``
        return Statement(torch.clamp_min, (*node.inputs, 0), {"out": node.result})
    results: Any = node.result if isinstance(node.result, torch.Tensor) else tuple(node.outputs)
    kwargs = {key: value for key, value in node.kwargs.items() if value is not None}
    if function is not None and _takes_out(function, node.args, kwargs, results):
        return Statement(function, node.args, {**kwargs, "out": results})
    if id(node.result) in passed_on:
        if function is None or not _gives_the_same(function, node):
            function = node.op
        return Statement(function, node.args, node.kwargs, stands_for=node.result)
    overload = _out_overload(node)
    if overload is not None and _takes_out(overload, node.args, kwargs, results):
        return Statement(overload, node.args, {**kwargs, "out": results})
    if isinstance(node.result, torch.Tensor):
        return Statement(node.op, node.args, node.kwargs, ((None, node.result),))
    copied = tuple((i, part) for i, part in enumerate(node.result) if _is_read(part, read))
    return Statement(node.op, node.args, node.kwargs, copied)


def _takes_out(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> bool:
    try:
        function(*args, **kwargs, out=results)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def _gives_the_same(function: Callable[..., Any], node: Node) -> bool:
    """By its looks. What is in it is compared when the program is on trial."""
    try:
        made = function(*node.args, **node.kwargs)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    found = node.result
    return (made.shape, made.dtype, made.stride()) == (found.shape, found.dtype, found.stride())


def _is_read(part: Any, read: set[int]) -> bool:
    return isinstance(part, torch.Tensor) and storage_of(part) in read


def _out_overload(node: Node) -> Callable[..., Any] | None:
    if not isinstance(node.op, Operation):
        return None
    packet = node.op.overloadpacket
    overload = overload_name(node.op)
    for name in ("out" if overload == "default" else f"{overload}_out", "out"):
        if name in packet.overloads():
            found = getattr(packet, name)
            if num_outs(found) == 1:
                return found
    return None

"""Rewrites: what distributions check, as something cheaper that can only be stricter.

A distribution of torch looks at its arguments, and at each sample before it gives its log-probability. Where one of
these fails, the policy is called as it is, and raises what it always raises; so a check may be replaced by one that
fails more often, and be left out where it cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swath.rollout.capture.recording import ITEM, Node
from swath.rollout.torch_internals import storage_of


def no_nan(x: torch.Tensor) -> bool:
    """Whether the sum is a number: it is not if anything in it is not (nor where infinities cancel out)."""
    total = x.sum()
    return bool(total == total)


#: Operations between a condition and "all of it is true".
_ALL = frozenset(["_is_all_true", "all", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand", "alias"])
#: Operations on each element, or each row, by itself.
_BY_ROW = _ALL | frozenset(
    {"remainder", "eq", "ge", "le", "bitwise_and", "bitwise_or", "sum", "scatter", "scatter_", "one_hot", "zero_"}
    | {"zeros_like", "fill_", "clone", "_to_copy", "arange", "permute", "t", "transpose", "select", "slice"}
)


def rewritten(nodes: list[Node]) -> list[Node]:
    """The same operations, with cheaper checks."""
    makers = Makers(nodes)
    kept: list[Node] = []
    for node in nodes:
        if node.op is ITEM and node.result is True:
            condition = makers.through(node.inputs[0], _ALL)
            if condition is not None and condition.name == "eq" and _compares_with_itself(condition):
                kept.append(Node(no_nan, (condition.inputs[0],), {}, True, node.where))
                continue
            if node.validates and _holds_for_every_index(node, makers):
                continue
        kept.append(node)
    return _with_checks_of_softmax(kept)


#: Operations that only look at memory.
LOOKS = frozenset(["view", "_unsafe_view", "reshape", "alias", "expand"])


def _with_checks_of_softmax(nodes: list[Node]) -> list[Node]:
    """A check of each softmax that is sampled from, if there is none: cheaper than those of ``multinomial``."""
    makers = Makers(nodes)
    checked = {id(node.args[0]) for node in nodes if node.op is no_nan}
    sampled = [makers.through(node.args[0], LOOKS) for node in nodes if node.name == "multinomial"]
    kept: list[Node] = []
    for node in nodes:
        kept.append(node)
        if node.name == "_softmax" and node in sampled and not gives_probabilities(node, makers, checked):
            # Logits that were normalised tell as much, and then their normalising can be written out as well.
            normalised = gives_probabilities(node, makers, checked | {id(node.args[0])})
            kept.append(Node(no_nan, (node.args[0] if normalised else node.result,), {}, True, "a sample"))
    return kept


def gives_probabilities(softmax: Node, makers: Makers, numbers: set[int]) -> bool:
    """Whether it is known to: an infinite number among those it is given is enough for it to give none."""
    if softmax.args[1] not in (-1, softmax.args[0].dim() - 1):
        return False
    if id(softmax.result) in numbers:
        return True
    maker = makers.of(softmax.args[0])
    if maker is None or maker.name != "sub" or len(maker.inputs) != 2 or id(maker.result) not in numbers:
        return False
    total = makers.of(maker.inputs[1])
    return total is not None and total.name == "logsumexp" and total.args[0] is maker.inputs[0]


def _compares_with_itself(node: Node) -> bool:
    return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1] and node.inputs[0].is_floating_point()


class Makers:
    """Which operation made a tensor, if no other has written to it."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self._of: dict[int, Node] = {}
        changed = {storage_of(tensor) for node in nodes for tensor in node.written}
        for node in nodes:
            for tensor in node.outputs:
                if storage_of(tensor) not in changed:
                    self._of.setdefault(id(tensor), node)

    def of(self, tensor: torch.Tensor) -> Node | None:
        return self._of.get(id(tensor))

    def through(self, tensor: torch.Tensor, names: frozenset[str]) -> Node | None:
        """The maker, looked for behind operations of these names that have one input."""
        node = self.of(tensor)
        while node is not None and node.name in names and len(node.inputs) == 1:
            node = self.of(node.inputs[0])
        return node

    def before(self, check: Node) -> Iterator[Node]:
        """All that a check was computed from, last first; not beyond random numbers."""
        wanted = {storage_of(tensor) for tensor in check.inputs}
        for node in reversed(self.nodes[: self.nodes.index(check)]):
            touched = {storage_of(tensor) for tensor in (*node.outputs, *node.written)}
            if touched & wanted:
                yield node
                if not node.is_random:
                    wanted |= {storage_of(tensor) for tensor in node.inputs}


def _holds_for_every_index(check: Node, makers: Makers) -> bool:
    """Whether a check is about nothing but an index that ``multinomial`` drew, and holds for each that it can draw."""
    needed = list(makers.before(check))
    drawn = [node for node in needed if node.is_random]
    others = [node for node in needed if not node.is_random]
    if len(drawn) != 1 or drawn[0].name != "multinomial" or any(node.name not in _BY_ROW for node in others):
        return False
    made = {id(tensor) for node in needed for tensor in node.outputs}
    if any(id(tensor) not in made for node in others for tensor in node.inputs):
        return False
    (index,) = drawn[0].outputs
    return all(_outcome(others[::-1], index, k, check) for k in range(drawn[0].inputs[0].shape[-1]))


def _outcome(nodes: list[Node], index: torch.Tensor, k: int, check: Node) -> bool:
    """What the check says if every row has drawn ``k``."""
    values: dict[int, torch.Tensor] = {id(index): torch.full_like(index, k)}

    def now(value: object) -> object:
        return values.get(id(value), value) if isinstance(value, torch.Tensor) else value

    for node in nodes:
        result = node.op(*map(now, node.args), **{key: now(value) for key, value in node.kwargs.items()})
        for before, after in zip(node.outputs, [result] if isinstance(result, torch.Tensor) else result, strict=True):
            values[id(before)] = after
    return bool(values[id(check.inputs[0])])

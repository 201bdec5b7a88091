"""Program: the operations of a recording that matter, as one function without arguments but the step's number.

Every result was kept by the recording, and is written again in each step, so views were made once and for all. What
is done in each step: copy the inputs in, run the operations, copy the outputs out. Values that decided something in
Python are looked at before anything happens that could not be taken back (a random number, a changed buffer): if one
is different, ``bail_out`` calls the policy as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swath.rollout.capture.lowering import Check, Statement, lowered
from swath.rollout.capture.memory import OwnMemory
from swath.rollout.capture.recording import EQUAL, ITEM, LIFT, TO_LIST, Node, NotCapturable, Recording
from swath.rollout.capture.rewrites import rewritten
from swath.rollout.torch_internals import storage_of

#: Where a program was left, if not at a value that was looked at.
RAISED = "an operation that raised"

#: Memory that a program may hold.
MAX_BYTES = 256 * 2**20

Rows = Sequence[torch.Tensor]

#: Operations that some values make raise.
_RAISING = frozenset(
    {
        "index",
        "index_select",
        "index_put",
        "index_put_",
        "index_add_",
        "index_copy_",
        "embedding",
        "scatter",
        "scatter_",
    }
    | {"take", "multinomial", "bincount", "normal", "bernoulli_", "scatter_add_", "masked_scatter"}
)


def random_states() -> list[torch.Tensor]:
    """Of all devices that are in use."""
    states = [torch.get_rng_state()]
    return states + torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else states


def restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@dataclass(frozen=True)
class Program:
    """What is run in each step, and on what."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    statements: tuple[Statement | Check, ...]
    #: The tensors of the policy that it changes.
    changes: tuple[torch.Tensor, ...]
    #: Whether it must remember the random state: something is looked at after a random number was drawn.
    looks_back: bool

    @property
    def num_operations(self) -> int:
        return sum(isinstance(statement, Statement) for statement in self.statements)

    def bound(
        self,
        inputs: Sequence[Rows],
        outputs: Sequence[Rows],
        bail_out: Callable[..., None],
        live: list[Any],
        numbers: Sequence[tuple[Any, Any, Any]] = (),
    ) -> Any:
        """``act(t)`` on these rows; once ``live`` is empty, or one of the ``numbers`` another, ``bail_out`` only."""
        return _Source(self, inputs, outputs, bail_out, live, numbers).compiled()


def program_of(
    recording: Recording, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], known: set[int]
) -> Program:
    """The program of a recorded call; ``known`` are the tensors (by identity) that are there for every call."""
    _require_known(recording.nodes, inputs, outputs, known)
    own = OwnMemory()
    for tensor in (*inputs, *(tensor for node in recording.nodes for tensor in node.made)):
        own.add(tensor)
    nodes = [own.moved(node) for node in recording.nodes]
    inputs, outputs = own(list(inputs)), own(list(outputs))
    nodes = rewritten(nodes)
    graph = _Graph(nodes, inputs, outputs)
    order, looks_back = graph.schedule()
    return Program(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        statements=tuple(lowered(order, nodes, outputs)),
        changes=tuple(graph.changes),
        looks_back=looks_back,
    )


def _require_known(
    nodes: list[Node], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], known: set[int]
) -> None:
    """Every tensor must come from somewhere: one that does not was made outside, by NumPy say."""
    known = known | {id(tensor) for tensor in inputs}
    num_bytes = 0
    for node in nodes:
        if node.op is LIFT:
            known |= {id(tensor) for tensor in node.inputs}
        _require_repeatable(node)
        for tensor in node.inputs:
            if id(tensor) not in known:
                raise NotCapturable(f"it uses a tensor of shape {tuple(tensor.shape)} whose owner cannot be found")
        for tensor in node.outputs:
            known.add(id(tensor))
            num_bytes += tensor.nbytes
    for tensor in outputs:
        if id(tensor) not in known:
            raise NotCapturable("it returns a tensor that was not made by torch's operations")
    if num_bytes > MAX_BYTES:
        raise NotCapturable(f"its intermediate results take {num_bytes / 2**20:.0f} MiB")


def _require_repeatable(node: Node) -> None:
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in (*node.inputs, *node.outputs)):
        raise NotCapturable(f"{node.name} works on a subclass of Tensor")
    if any(isinstance(value, torch.Generator) for value in (*node.args, *node.kwargs.values())):
        raise NotCapturable(f"{node.name} draws from a generator of its own")
    # Batch normalisation does not declare that it changes its running statistics.
    is_training = node.name in ("native_batch_norm", "cudnn_batch_norm") and node.args[3] is not None and node.args[5]
    if is_training or (node.written and node.made):
        raise NotCapturable(f"{node.name} gives a result and changes what it is given")
    if any(t.is_conj() or t.is_neg() for t in (*node.inputs, *node.outputs)):
        raise NotCapturable(f"{node.name} works on a tensor that is yet to be conjugated or negated")
    if node.is_check and node.op not in (ITEM, EQUAL, TO_LIST):
        raise NotCapturable(f"{node.name} looks at a tensor ({node.where})")
    if any(t.is_sparse or t.is_quantized or t.is_nested for t in (*node.inputs, *node.outputs)):
        raise NotCapturable(f"{node.name} works on sparse, quantized or nested tensors")
    tags = getattr(node.op, "tags", ())
    by_mask = node.name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in node.inputs[1:])
    if torch.Tag.dynamic_output_shape in tags and (node.name != "index" or by_mask):
        raise NotCapturable(f"the shape of what {node.name} gives depends on values")
    if torch.Tag.data_dependent_output in tags and not node.is_check:
        raise NotCapturable(f"{node.name} reads a tensor's value")


class _Graph:
    """Which operation needs which others to have run: by the memory that they read and write."""

    def __init__(self, nodes: list[Node], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self.nodes = nodes
        self._inputs = {storage_of(tensor) for tensor in inputs}
        self._writers: dict[int, list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        self._needs: list[set[int]] = []
        self._made: set[int] = set()
        self.changes: list[torch.Tensor] = []
        self._changing: set[int] = set()
        last_random: int | None = None
        for index, node in enumerate(nodes):
            needs = self._note(index, node)
            if node.is_random:
                needs |= set() if last_random is None else {last_random}
                last_random = index
            self._needs.append(needs - {index})
        self._wanted = {w for tensor in outputs for w in self._writers.get(storage_of(tensor), ())}

    def _note(self, index: int, node: Node) -> set[int]:
        needs: set[int] = set()
        for storage in map(storage_of, node.inputs):
            needs.update(self._writers.get(storage, ()))
            self._readers.setdefault(storage, []).append(index)
        for tensor in node.written:
            storage = storage_of(tensor)
            needs.update(self._readers.get(storage, ()))
            self._writers.setdefault(storage, []).append(index)
            if storage not in self._made and storage not in self._inputs:
                self.changes.append(tensor)
                self._changing.add(index)
        read = {storage_of(tensor) for tensor in node.inputs}
        for storage in map(storage_of, node.outputs):
            if storage not in read:
                self._made.add(storage)
                self._writers.setdefault(storage, []).append(index)
        if node.op is LIFT:
            for storage in map(storage_of, node.outputs):
                self._made.add(storage)
                self._writers.setdefault(storage, []).append(index)
        return needs

    def schedule(self) -> tuple[list[Node], bool]:
        """The operations that matter; checks, and what they need, first. Whether a check follows a random number."""
        checks = [i for i, node in enumerate(self.nodes) if node.is_check]
        lasting = {i for i, node in enumerate(self.nodes) if node.is_random} | self._changing
        early: set[int] = set()
        looks_back = False
        for check in checks:
            needed = self._closure({check})
            if needed & self._changing:
                raise NotCapturable(f"it looks at a value that it has changed ({self.nodes[check].where})")
            if needed & lasting:
                looks_back = True
            else:
                early |= needed
        raising = {i for i, node in enumerate(self.nodes) if node.is_there_to_raise}
        needed = self._closure(self._wanted | lasting | raising | set(checks))
        order = sorted(early) + sorted(needed - early)
        late = (set(checks) - early) | {i for i in needed if self._may_raise(self.nodes[i])}
        last = max((place for place, i in enumerate(order) if i in late), default=0)
        if any(i in self._changing for i in order[:last]):
            raise NotCapturable("it changes a buffer before all that could go wrong is known")
        return [self.nodes[i] for i in order], looks_back or any(self.nodes[i].is_random for i in order[:last])

    def _may_raise(self, node: Node) -> bool:
        """Whether it depends on values if it raises: on an index, mostly. One that was drawn is always right."""
        if node.name in ("gather", "one_hot"):
            index = storage_of(node.args[2 if node.name == "gather" else 0])
            return not any(self.nodes[i].name == "multinomial" for i in self._writers.get(index, ()))
        return (
            node.is_there_to_raise or node.name in _RAISING or node.name.startswith(("linalg_", "_linalg", "cholesky"))
        )

    def _closure(self, roots: set[int]) -> set[int]:
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting.extend(self._needs[index])
        return found


class _Source:
    """A program as Python's source: calling through it costs less than any loop over functions."""

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Rows],
        outputs: Sequence[Rows],
        bail_out: Callable[..., None],
        live: list[Any],
        numbers: Sequence[tuple[Any, Any, Any]],
    ) -> None:
        self._names: dict[int, str] = {}
        self.values: dict[str, Any] = {"bail_out": bail_out, "live": live}
        # The loop runs once. Where it is left, the policy is called behind the handler: what it raises is its own.
        self._lines = ["def act(t):", f"    left = {RAISED!r}"]
        if program.looks_back:
            self.values |= {"random_states": random_states, "restore": restore}
            self._lines.append("    states = random_states()")
        self._lines += ["    try:", "      while live:"]
        self._look_at(numbers)
        for tensor, rows in zip(program.inputs, inputs, strict=True):
            self._line(f"{self._name(tensor, 'x')}.copy_({self._name(rows, 'rows')}[t])")
        for statement in program.statements:
            self._statement(statement, program.looks_back)
        for tensor, rows in zip(program.outputs, outputs, strict=True):
            self._line(f"{self._name(rows, 'rows')}[t].copy_({self._name(tensor, 'v')})")
        self._line("return")
        self._lines += ["    except Exception:"]
        self._line("restore(states)" if program.looks_back else "pass")
        self._lines += ["    bail_out(t, left)"]

    def _look_at(self, numbers: Sequence[tuple[Any, Any, Any]]) -> None:
        """Numbers that the policy's own code reads: an env's step may change them, too."""
        conditions = []
        for i, (owner, key, value) in enumerate(numbers):
            self.values |= {f"owner{i}": owner, f"number{i}": value}
            found = f"owner{i}.cell_contents" if key is None else f"owner{i}[{key!r}]"
            conditions.append(f"{found} is not number{i}")
        if conditions:
            self._line(f"if {' or '.join(conditions)}:")
            self._line("    left = 'a number that it reads'")
            self._line("    break")

    def compiled(self) -> Callable[[int], None]:
        exec(compile("\n".join(self._lines), "<captured policy>", "exec"), self.values)
        return self.values["act"]

    def _statement(self, statement: Statement | Check, looks_back: bool) -> None:
        if isinstance(statement, Check):
            look = self._name(statement.look, "look") + ("[0]" if statement.is_memory else "()")
            expected = look if statement.expected is None else self._name(statement.expected, "c")
            condition = f"{look} != {expected}"
            if isinstance(statement.expected, float) and statement.expected == 0.0:  # so is -0.0, another number
                self.values["copysign"] = math.copysign
                condition += f" or copysign(1.0, {look}) != {math.copysign(1.0, statement.expected)}"
            self._line(f"if {condition}:")
            if looks_back:
                self._line("    restore(states)")
            self._line(f"    left = {statement.where!r}")
            self._line("    break")
            return
        given = [self._name(value, "c") for value in statement.args]
        given += [f"{key}={self._name(value, 'c')}" for key, value in statement.kwargs.items()]
        call = f"{self._name(statement.function, 'f')}({', '.join(given)})"
        if statement.stands_for is not None:
            self._line(f"{self._name(statement.stands_for, 'v')} = {call}")
        elif not statement.copied:
            self._line(call)
        elif len(statement.copied) == 1 and statement.copied[0][0] is None:
            self._line(f"{self._name(statement.copied[0][1], 'v')}.copy_({call})")
        else:
            self._line(f"r = {call}")
            for position, target in statement.copied:
                self._line(f"{self._name(target, 'v')}.copy_(r[{position}])")

    def _line(self, text: str) -> None:
        self._lines.append(f"        {text}")

    def _name(self, value: Any, kind: str) -> str:
        if type(value) in (bool, int, str, type(None)):
            return repr(value)
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"{kind}{len(self._names)}"
            self.values[name] = value  # kept, so that no other value gets its identity
        return name

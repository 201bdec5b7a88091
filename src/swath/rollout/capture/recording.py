"""Recording: what one call of a policy does, as operations on tensors and as Python code that ran.

The tensors of a recording are kept: they are the memory in which the program runs later.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from swath.errors import SwathError
from swath.rollout.torch_internals import Operation, linear, one_hot, operation_name, storage_of

#: Packages whose code does what its arguments and attributes say, and nothing else.
LIBRARIES = frozenset(["torch", "tensordict", "torchrl", "swath", "functorch"])

#: Modules of the standard library whose code is as predictable.
PURE_MODULES = frozenset(
    {"abc", "builtins", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "itertools", "math"}
    | {"numbers", "operator", "types", "typing", "typing_extensions", "warnings", "weakref", "_abc", "_collections"}
    | {"_collections_abc", "_functools", "_operator", "_weakref", "_weakrefset"}
)

#: What their functions give is different each time, or is seen outside, whoever calls them.
IMPURE_MODULES = frozenset(
    {"_random", "logging", "numpy", "os", "posix", "random", "secrets", "socket", "time", "uuid"}
)

#: Builtins that a policy's code may call: they change nothing, and depend on their arguments only.
_PURE_BUILTINS = frozenset(
    {"abs", "all", "any", "callable", "chr", "divmod", "format", "getattr", "hasattr", "isinstance", "issubclass"}
    | {"iter", "len", "max", "min", "next", "ord", "pow", "repr", "round", "setattr", "sorted", "sum"}
)

#: Methods of a tensor whose result no operation shows.
_LEAVING_TORCH = frozenset(["numpy", "data_ptr", "__array__", "__dlpack__", "untyped_storage", "storage"])

#: What nn.MultiheadAttention and nn.TransformerEncoderLayer call in ``eval()``, and do not while anybody looks at
#: operations: then they take another way, to other last bits.
_UNSEEN = frozenset(["_native_multi_head_attention", "_transformer_encoder_layer_fwd"])

#: Reads a tensor's value into Python.
ITEM = torch.ops.aten._local_scalar_dense.default
EQUAL = torch.ops.aten.equal.default
#: A tensor made from Python's numbers.
LIFT = torch.ops.aten.lift_fresh.default


class NotCapturable(SwathError):
    """Why a policy is called as it is."""


@dataclass(eq=False)
class Node:
    """One operation: what ran, on what, and what came of it."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    #: The user's line that it came from; only for values that were read into Python.
    where: str = ""
    #: Whether it was a distribution that looked, to see if its arguments are what they should be.
    validates: bool = False
    #: The result as it was, for a constant that later operations may have changed.
    pristine: torch.Tensor | None = None
    inputs: list[torch.Tensor] = field(init=False)
    outputs: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = tensors_in((self.args, self.kwargs))
        self.outputs = tensors_in(self.result)

    @property
    def name(self) -> str:
        return operation_name(self.op) if isinstance(self.op, Operation) else self.op.__name__

    @property
    def is_check(self) -> bool:
        return self.op is TO_LIST or isinstance(self.result, (bool, int, float, complex))

    @property
    def is_there_to_raise(self) -> bool:
        return not (self.outputs or self.written or self.is_check)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(self.op, "tags", ())

    @property
    def made(self) -> list[torch.Tensor]:
        """The results in new memory."""
        if self.op is LIFT:
            return self.outputs
        given = {storage_of(tensor) for tensor in self.inputs}
        return [tensor for tensor in self.outputs if storage_of(tensor) not in given]

    @property
    def written(self) -> list[torch.Tensor]:
        """The inputs that it changes."""
        schema = getattr(self.op, "_schema", None)
        if schema is None:
            return []
        changed = []
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = self.args[position] if position < len(self.args) else self.kwargs.get(argument.name)
                changed += tensors_in(given)
        return changed


@dataclass
class Recording:
    """A call's operations, and the code that ran."""

    nodes: list[Node] = field(default_factory=list)
    #: Code that ran, with the globals it saw; what is not a library's.
    user_code: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    #: Every name that any code that ran could have looked up.
    names: set[str] = field(default_factory=set)
    #: Whether names were looked up that the code does not spell out.
    looks_up_any_name: bool = False
    #: What was called that cannot be left out the next time, or would be done differently.
    refusals: list[str] = field(default_factory=list)
    result: Any = None


def record(function: Callable[[], Any]) -> Recording:
    """Call ``function`` once; what it gave, and what it did."""
    recording = Recording()
    with _Operations(recording) as operations, _WholeLayers(operations):
        _watched(function, recording)
    return recording


def scouted(function: Callable[[], Any]) -> list[str]:
    """Call ``function`` once; why it cannot be recorded: compiled code must not even see that it is."""
    recording = Recording()
    _watched(function, recording)
    return recording.refusals


def _watched(function: Callable[[], Any], recording: Recording) -> None:
    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # else finalizers, and whoever is told of a collection, would run as if the policy had called them
    sys.setprofile(_Profiler(recording))
    try:
        recording.result = function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


class _Operations(TorchDispatchMode):
    """Notes every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else Dynamo is imported, which takes seconds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what other threads compile meanwhile is not our business

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.nodes = recording.nodes
        self.refusals = recording.refusals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except Exception:  # which the policy may handle: another time, nothing may be raised
            self.refusals.append(f"{func} raises ({user_line(sys._getframe(1))})")
            raise
        node = Node(func, args, kwargs, result)
        if node.is_check:
            node.where = user_line(sys._getframe(1))
            node.validates = _is_called_by(sys._getframe(1), "torch.distributions")
        elif isinstance(result, torch.Tensor) and (func is LIFT or not node.inputs) and not node.is_random:
            node.pristine = result.clone()
        self.nodes.append(node)
        return result


#: Noted as one operation. Seen from below, a linear layer would take another way than it takes unseen, and a one-hot
#: code looks at its indices only to raise.
LINEAR, ONE_HOT = linear, one_hot
TO_LIST = torch.Tensor.tolist
#: A product changes the shape of its own result, which would not be seen.
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _WholeLayers(TorchFunctionMode):
    """Notes some functions as one operation."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._nodes = operations.nodes
        self._refusals = operations.refusals

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_whole(func, args, kwargs):
            before = len(self._nodes)
            result = func(*args, **kwargs)
            if _reads_unseen(func, args, self._nodes[before:]):
                self._refusals.append(f"{func.__name__} reads a tensor's value ({user_line(sys._getframe(1))})")
            return result
        mode: Any = _pop_mode()
        try:
            result = func(*args, **kwargs)
        finally:
            _push_mode(mode)
        node = Node(torch.matmul if func in _PRODUCTS else func, args, kwargs, result)
        node.where = user_line(sys._getframe(1)) if node.is_check else ""
        self._nodes.append(node)
        return result


def _is_whole(function: Any, args: Any, kwargs: Any) -> bool:
    if function is ONE_HOT:
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) > 0
    if torch.is_autocast_enabled("cpu"):
        return function is TO_LIST
    return function in (TO_LIST, LINEAR) or (function in _PRODUCTS and not kwargs)


def _reads_unseen(function: Any, args: Any, nodes: list[Node]) -> bool:
    """Whether it may have read a tensor's value without an operation that shows it."""
    name = getattr(function, "__name__", "")
    if name in ("__float__", "__int__", "__index__", "__bool__", "__complex__"):
        return not any(node.is_check for node in nodes)
    if name == "tensor_split":
        return len(tensors_in(args)) > 1
    # A tensor of numbers, some of which are in tensors: torch.tensor([1.0, x[0]])
    return any(node.op is LIFT for node in nodes) and any(
        isinstance(value, (list, tuple)) and tensors_in(value) for value in args
    )


class _Profiler:
    """Notes which Python code runs, and which functions of C it calls."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._enters(frame)
        elif event == "c_call":
            reason = _why_not_called(argument, _by_library(frame))
            if reason:
                self._recording.refusals.append(f"{reason} ({user_line(frame)})")
            elif getattr(argument, "__name__", "") in ("getattr", "setattr", "hasattr") and not is_library(frame):
                self._recording.looks_up_any_name = True

    def _enters(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in self._seen:
            return
        self._seen.add(code)
        self._recording.names.update(names_in(code))
        module = frame.f_globals.get("__name__") or ""
        if is_library(frame):
            if code.co_name == "compile_wrapper" and module.startswith("torch._dynamo"):
                self._recording.refusals.append(f"it calls what torch.compile has made ({user_line(frame.f_back)})")
            return
        if not _is_standard(frame):
            self._recording.user_code[code] = frame.f_globals
            if "__dict__" in code.co_names or any(i.opname == "MATCH_CLASS" for i in dis.get_instructions(code)):
                self._recording.looks_up_any_name = True
        elif _root_of(frame) not in PURE_MODULES and (_root_of(frame) in IMPURE_MODULES or not _by_library(frame)):
            self._recording.refusals.append(f"it calls {module}.{code.co_qualname} ({user_line(frame.f_back)})")


def names_in(code: CodeType) -> set[str]:
    """The names that code spells: of globals and attributes, also as strings."""
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}


def _root_of(frame: FrameType) -> str:
    return (frame.f_globals.get("__name__") or "").partition(".")[0]


def is_library(frame: FrameType) -> bool:
    return _root_of(frame) in LIBRARIES


def _is_standard(frame: FrameType) -> bool:
    return _root_of(frame) in sys.stdlib_module_names and _root_of(frame) != "__main__"


def _by_library(frame: FrameType) -> bool:
    """Whether it was a library that called Python's standard library, to look at its own objects."""
    caller: FrameType | None = frame
    while caller is not None and _is_standard(caller):
        caller = caller.f_back
    return caller is not None and is_library(caller)


def _is_called_by(frame: FrameType | None, package: str) -> bool:
    """Whether it is the package's own code that is running, but for what is here and in torch to let it run."""
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch._tensor", "torch.functional"):
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__") or "").startswith(package)


def user_line(frame: FrameType | None) -> str:
    """The policy's innermost line that is not a library's, as "agent.py:31"; else the library's."""
    while frame is not None and _root_of(frame) == "swath":
        frame = frame.f_back
    innermost = frame
    while frame is not None and is_library(frame) and _root_of(frame) != "swath":
        frame = frame.f_back
    if frame is None or _root_of(frame) == "swath":
        frame = innermost
    return "in a library" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


_PURE_OWNERS = (list, dict, tuple, str, set, frozenset, int, float, bytes, type)


def _why_not_called(function: Any, by_library: bool) -> str | None:
    """Why a call of a function of C cannot be left out, or made only when recorded; None if it can."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "?")
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    if name in _UNSEEN:
        return (
            f"it calls torch.{name}, the fast path of attention in eval(), which cannot be recorded; "
            "torch.backends.mha.set_fastpath_enabled(False) leaves it out"
        )
    if isinstance(owner, torch.Tensor):
        return f"it calls .{name}() of a tensor" if name in _LEAVING_TORCH else None
    kind = owner if isinstance(owner, type) else type(owner)
    source = module or kind.__module__.partition(".")[0]
    if by_library:
        return f"it calls {source}.{name}" if source in IMPURE_MODULES else None
    is_pure = issubclass(kind, _PURE_OWNERS)
    if module == "builtins" and name not in _PURE_BUILTINS and not is_pure:
        return f"it calls {name}()"
    if source in LIBRARIES or source in PURE_MODULES or is_pure:
        return None
    return f"it calls {source}.{name}"


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

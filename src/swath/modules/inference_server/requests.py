"""Requests: what a client asks, in tensors, and where the answer goes."""

from __future__ import annotations

import _thread
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import EllipsisType
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type

from swath.errors import message_of
from swath.keys import Key, as_key, nested, show

#: A client looks so often whether its server is still there.
LOOK_EVERY_S = 0.25


def wait_looking(acquire: Callable[[float], bool], timeout_s: float | None, look: Callable[[], None]) -> bool:
    """Whether something is had in time. ``look`` is called now and then, and raises if nobody will ever answer."""
    deadline = None if timeout_s is None else perf_counter() + timeout_s
    while True:
        left_s = LOOK_EVERY_S if deadline is None else min(LOOK_EVERY_S, deadline - perf_counter())
        if acquire(max(left_s, 0.0)):
            return True
        if deadline is not None and perf_counter() >= deadline:
            return False
        look()


class Content:
    """What is asked: the tensors of a TensorDict, or the TensorDict itself where there is more in it than tensors.

    Requests of equal ``signature`` can be answered in one forward.
    """

    __slots__ = ("batch_size", "keys", "num_rows", "signature", "tensordict", "tensors")

    def __init__(
        self,
        batch_size: torch.Size,
        keys: tuple[Key, ...],
        tensors: Sequence[torch.Tensor],
        kind: InteractionType | None,
        tensordict: TensorDictBase | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.num_rows = batch_size.numel()
        self.keys = keys
        self.tensors = tensors
        self.tensordict = tensordict
        if tensordict is not None:
            self.signature: tuple[Any, ...] = (kind, batch_size)
        else:
            ndim = len(batch_size)
            self.signature = (kind, keys, *[(t.dtype, t.shape[ndim:], t.device) for t in tensors])

    @property
    def kind(self) -> InteractionType | None:
        """How a probabilistic policy is to choose; None: as it does by default."""
        return self.signature[0]

    def as_tensordict(self) -> TensorDictBase:
        if self.tensordict is not None:
            return self.tensordict
        leaves = dict(zip(self.keys, self.tensors, strict=True))
        return TensorDict(nested(leaves), batch_size=self.batch_size)


class _AskedAs(threading.local):
    kind: InteractionType | EllipsisType | None = ...


_asked_as = _AskedAs()


@contextmanager
def asking_as(kind: InteractionType | None) -> Iterator[None]:
    """What this thread asks meanwhile is asked with this interaction type, whatever others set for all threads."""
    before, _asked_as.kind = _asked_as.kind, kind
    try:
        yield
    finally:
        _asked_as.kind = before


def read_content(tensordict: TensorDictBase, in_keys: tuple[Key, ...] | None, *, copies: bool = False) -> Content:
    """What of a TensorDict is sent: the policy's ``in_keys`` that are there, or everything.

    ``copies``: whoever asks does not wait, and may write to its tensors meanwhile.
    """
    kind = _asked_as.kind
    if isinstance(kind, EllipsisType):
        kind = interaction_type()
    names: list[Key] = []
    values: list[Any] = []
    if in_keys is None:
        for name, value in tensordict.items(True, True, is_leaf=is_leaf_nontensor):
            names.append(as_key(name))
            values.append(value)
    else:
        for key in in_keys:
            value = tensordict.get(key, None)
            if value is not None:
                names.append(key)
                values.append(value)
    for value in values:
        if not isinstance(value, torch.Tensor):
            return Content(tensordict.batch_size, (), (), kind, tensordict.clone() if copies else tensordict)
    if copies:
        values = [value.clone() for value in values]
    return Content(tensordict.batch_size, tuple(names), values, kind)


def keys_of(spec: Any) -> tuple[Key, ...] | None:
    """The keys of a TensorDict, a spec or a list of keys."""
    if spec is None:
        return None
    return tuple(as_key(key) for key in (spec.keys(True, True) if hasattr(spec, "keys") else spec))


#: The keys of an answer, and a value for each.
Answer = tuple[tuple[Key, ...], Sequence[Any]]


def merge(tensordict: TensorDictBase, answer: Answer) -> TensorDictBase:
    """A new TensorDict: what was asked, with the policy's outputs."""
    keys, values = answer
    if type(tensordict) is TensorDict and not tensordict.batch_size and all(len(key) == 1 for key in keys):
        leaves = dict(tensordict.items())  # half the time of a copy
        leaves.update(zip([key[0] for key in keys], values, strict=True))
        return TensorDict(leaves, batch_size=tensordict.batch_size, device=tensordict.device)
    merged = tensordict.copy()
    for key, value in zip(keys, values, strict=True):
        merged.set(key, value)
    return merged


def select_keys(answer: Answer, wanted: tuple[Key, ...]) -> Answer:
    """Of an answer, these keys.

    Raises:
        KeyError: it has not all of them.
    """
    there = dict(zip(*answer, strict=True))
    missing = [key for key in wanted if key not in there]
    if missing:
        raise KeyError(f"the policy did not write {show(missing[0])}, which response_spec declares; it has {[*there]}")
    return wanted, [there[key] for key in wanted]


class Asked(Protocol):
    """A request, as the server's loop sees it."""

    content: Content
    #: Whether whoever asked does nothing else until there is an answer.
    waits: bool
    submitted_at: float

    def answer(self, keys: tuple[Key, ...], values: Sequence[Any]) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Unless it is answered already."""
        ...


class Request:
    """A question of this process, and the place for its answer.

    Waiting is for a bare lock: a ``Future`` with its condition costs ten times as much.
    """

    __slots__ = ("_done", "answer_", "content", "error", "submitted_at", "waits")

    def __init__(self, content: Content, *, waits: bool) -> None:
        self.content = content
        self.waits = waits
        self.submitted_at = perf_counter()
        self.answer_: Answer | None = None
        self.error: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def answer(self, keys: tuple[Key, ...], values: Sequence[Any]) -> None:
        if self.error is None:
            self.answer_ = keys, values
            self._done.release()

    def fail(self, error: BaseException) -> None:
        """Unless it is answered already."""
        if self.answer_ is None and self.error is None:
            self.error = error
            self._done.release()

    def is_done(self) -> bool:
        return not self._done.locked()

    def wait(self, timeout_s: float | None, look: Callable[[], None]) -> bool:
        """Whether it is done in time. ``look`` is called now and then, and raises if nobody will ever answer."""
        if not wait_looking(self._acquire, timeout_s, look):
            return False
        self._done.release()  # for others that wait, and for is_done()
        return True

    def _acquire(self, timeout_s: float) -> bool:
        return self._done.acquire(timeout=timeout_s)

    def take(self) -> Answer:
        if self.error is not None:
            raise own_copy(self.error)
        assert self.answer_ is not None
        return self.answer_


def own_copy(error: BaseException) -> BaseException:
    """An exception of many requests, for one of them: raising it in several threads would mix their tracebacks."""
    try:
        copied = copy.copy(error)
    except Exception:
        return error
    if type(copied) is not type(error) or message_of(copied) != message_of(error):
        return error
    copied.__cause__ = error
    return copied

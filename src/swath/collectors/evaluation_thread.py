"""The thread in which an Evaluator's tasks are done, one after the other."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from swath.collectors.evaluation import Weights
from swath.collectors.evaluation_backends import EvaluationBackend
from swath.errors import CollectorClosed
from swath.process.supervise import EndedAtExit
from swath.rollout.exploration import own_exploration
from swath.timeline.companions import Companion, companions
from swath.timeline.recorder import Kind

Result = dict[str, Any]

logger = logging.getLogger(__name__)


@dataclass
class _Task:
    do: Callable[[], Any]
    future: Future[Any]


class EvaluationThread:
    """Does tasks one after the other, in a thread. Knows nothing of the Evaluator, so that that can be garbage."""

    def __init__(
        self, backend: EvaluationBackend, prefix: str, on_result: Callable[[TensorDictBase], Any] | None
    ) -> None:
        self._backend = backend
        self._prefix = prefix
        self._on_result = on_result
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._under_way: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        #: How many evaluations there were, and what came of the last one.
        self.num_done = 0
        self.last: Result = {}
        self._owner_pid = os.getpid()
        #: In traces of collectors.
        self.companion = Companion("evaluator", backend.pid)
        companions.add(self.companion)
        self._thread = threading.Thread(target=self._work, name="swath-evaluator", daemon=True)
        self._thread.start()
        _threads.add(self)
        try:
            result_of(self.call(backend.prepare))
        except BaseException:
            self.shut_down(2.0)
            raise

    @property
    def is_busy(self) -> bool:
        return any(not future.done() for future in tuple(self._under_way))

    def submit(self, weights: Weights, step: int) -> Future[Result]:
        return self.call(lambda: self._evaluate(weights, step))

    def call(self, do: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise _is_closed()
            self._under_way.add(future)
            self._tasks.put(_Task(do, future))
        future.add_done_callback(self._under_way.discard)
        return future

    def require_other(self, what: str) -> None:
        """Raise in this thread, which calls ``on_result``, before it waits for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"{what}() in on_result waits for itself: trigger_eval() there, with busy_policy='queue'"
            )

    def _work(self) -> None:
        try:
            with own_exploration():
                while (task := self._tasks.get()) is not None:
                    self.companion.turns_to(Kind.EVALUATE)
                    self._do(task)
                    self.companion.turns_to(Kind.WAIT_FOR_REQUEST)
                    task = None  # nothing of it is kept while waiting for the next
        finally:
            self._backend.close()

    def _do(self, task: _Task) -> None:
        # The future is not marked as running, so that shut_down() can cancel it whatever the thread is doing.
        if task.future.cancelled():
            return
        try:
            result = task.do()
        except BaseException as error:
            with suppress(InvalidStateError):
                task.future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                task.future.set_result(result)

    def _evaluate(self, weights: Weights, step: int) -> Result:
        metrics = self._backend.run(weights, step)
        result = {f"{self._prefix}/{name}": value for name, value in {**metrics, "step": step}.items()}
        self.num_done, self.last = self.num_done + 1, result
        if self._on_result is not None:
            try:
                self._on_result(_flat_tensordict(result))
            except Exception:
                logger.exception("on_result of an Evaluator failed, at step %s; the result is kept", step)
        return result

    def shut_down(self, timeout_s: float) -> None:
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for future in tuple(self._under_way):
            future.cancel()
        self._backend.interrupt()
        self._tasks.put(None)
        if threading.current_thread() is self._thread:  # called by on_result: it ends after this task
            return
        self._thread.join(timeout_s * 0.6)
        if self._thread.is_alive():
            self._backend.kill()
            self._thread.join(timeout_s * 0.4)


def result_of(future: Future[Any]) -> Any:
    try:
        return future.result()
    except CancelledError:
        raise _is_closed() from None


def _is_closed() -> CollectorClosed:
    return CollectorClosed("this Evaluator was shut down; make a new one")


def _flat_tensordict(result: Result) -> TensorDict:
    flat = TensorDict({}, batch_size=[])
    for name, value in result.items():
        if isinstance(value, torch.Tensor):
            flat.set(name, value.detach().cpu())
        elif isinstance(value, (bool, int, float)):
            flat.set(name, torch.tensor(value))
        else:
            flat.set_non_tensor(name, value)
    return flat


#: Those that were not shut down.
_threads = EndedAtExit[EvaluationThread](lambda threads: [thread.shut_down(2.0) for thread in threads])

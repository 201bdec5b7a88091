"""Futures: the answers to what was submitted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from tensordict import TensorDictBase

from swath.modules.inference_server.requests import Answer, Content, Request, merge, own_copy, wait_looking


class InferenceFuture(Future[TensorDictBase]):
    """The answer to a request that was submitted: a ``concurrent.futures.Future``.

    What is under way cannot be cancelled.
    """

    def __init__(self, tensordict: TensorDictBase, look: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._tensordict = tensordict
        #: Raises if nobody will ever answer.
        self._look = look
        self._merged: TensorDictBase | None = None

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The answer; raises what the policy raised, ``ServerClosed`` or ``ServerDied``.

        Raises:
            TimeoutError: not within ``timeout`` seconds; the request is still under way.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        if self._merged is None:  # by whoever wants it, not by the server
            answer: Any = super().result()
            self._merged = merge(self._tensordict, answer)
        return self._merged

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ``result`` would raise; None if it would return."""
        if not self.wait(timeout):
            raise TimeoutError(f"the inference server did not answer within {timeout:g} s; the request is under way")
        return super().exception()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is done in time, or nobody will ever answer."""
        if self.done():
            return True
        try:
            return wait_looking(self._is_settled_within, timeout, self._look)
        except Exception as error:
            self.fail(error)
            return True

    def _is_settled_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            super().exception(timeout_s)
        return self.done()

    def answer(self, answer: Answer) -> None:
        """For whoever has the answer; too late if it failed meanwhile."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(answer)  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        """Unless it is answered already."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


class SubmittedRequest(Request):
    """A question of this process that nobody waits for: its answer goes into a future."""

    __slots__ = ("future",)

    def __init__(self, content: Content, future: InferenceFuture) -> None:
        super().__init__(content, waits=False)
        self.future = future

    def answer(self, keys: Any, values: Any) -> None:
        self.future.answer((keys, values))

    def fail(self, error: BaseException) -> None:
        self.future.fail(own_copy(error))

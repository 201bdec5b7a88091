"""Clients: what asks a server, and the futures of what was asked."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase

from swath.modules.inference.requests import Answer, merge


class Pending(Protocol):
    """A request under way."""

    def is_done(self) -> bool: ...

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it is done in time. Raises when nobody will ever answer."""
        ...

    def take(self) -> Answer:
        """The answer; raises what the policy raised."""
        ...


class InferenceFuture:
    """The answer to a request that was submitted."""

    def __init__(self, pending: Pending, tensordict: TensorDictBase) -> None:
        self._pending = pending
        self._tensordict = tensordict
        self._result: TensorDictBase | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether ``result`` returns, or raises, at once."""
        return self._is_settled or self._pending.is_done()

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The answer; raises what the policy raised, ``ServerClosed`` or ``ServerDied``.

        Raises:
            TimeoutError: not within ``timeout`` seconds; the request is still under way.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ``result`` would raise; None if it would return."""
        if self._is_settled:
            return self._error
        if not self.wait(timeout):
            raise TimeoutError(f"the inference server did not answer within {timeout:g} s; the request is under way")
        if not self._is_settled:
            try:
                self._result = merge(self._tensordict, self._pending.take())
            except Exception as error:
                self._error = error
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is done in time, or nobody will ever answer."""
        if self._is_settled:
            return True
        try:
            return self._pending.wait(timeout)
        except Exception as error:
            self._error = error
            return True

    @property
    def _is_settled(self) -> bool:
        return self._result is not None or self._error is not None


class InferenceClient:
    """Asks a server. Made by ``server.client()``; may be used by several threads."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Ask, and wait: a new TensorDict with what was given, the policy's outputs and its version.

        Only the keys that the policy reads are sent.
        """
        raise NotImplementedError

    def submit(self, tensordict: TensorDictBase) -> InferenceFuture:
        """Ask, and go on."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> InferenceClient:
        """A policy that is copied asks the same server."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the client holds; it can be used again."""

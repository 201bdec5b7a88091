"""The loop of a server: wait for requests, form a batch, answer it; between two batches, new weights."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from swath.errors import InferenceError, ServerDied, add_note, told
from swath.modules.inference_server.config import InferenceServerConfig
from swath.modules.inference_server.received_weights import ReceivedWeights
from swath.modules.inference_server.replies import was_shut_down
from swath.modules.inference_server.requests import Answer, Asked, select_keys
from swath.modules.inference_server.served_policy import ServedPolicy
from swath.modules.inference_server.stats import ServerStats
from swath.modules.inference_server.transport import Transport
from swath.timeline.companions import Companion
from swath.timeline.recorder import Kind, Recorder

#: A server without work looks so often whether it is to end.
_IDLE_S = 0.25
#: And so often for weights, where a scheme brings them.
_IDLE_WITH_SCHEME_S = 0.01
#: How long clients that were answered together are waited for, for each of them (a change of threads and what a client
#: does take some 60 µs); and for how many batches not, if some did not come.
_GATHER_S_EACH = 0.0002
_IMPATIENT_BATCHES = 32


class _RecordedTurn:
    """Requests have come, after waiting for them since the last ones were answered."""

    def __init__(self, recorder: Recorder, answered_at: float) -> None:
        self._recorder = recorder
        self._waits_since = max(answered_at, recorder.last_end_s)
        self._began = perf_counter()

    def waited(self) -> None:
        """For nothing."""
        self._add(self._began, 0)

    def served(self, num_requests: int) -> None:
        """Before anybody has an answer: who looks then, finds it recorded."""
        self._add(perf_counter(), num_requests)

    def _add(self, now: float, num_requests: int) -> None:
        recorder = self._recorder
        waited_s = self._began - self._waits_since
        recorder.add(Kind.SERVE, recorder.last_end_s, now, num_requests, x=now - self._began, y=waited_s)
        self._began = self._waits_since = now


class ServingLoop:
    """Runs in a thread until ``stop``. Knows nothing of the server that owns it, so that the server can be garbage."""

    def __init__(
        self,
        policy: ServedPolicy,
        transport: Transport,
        config: InferenceServerConfig,
        stats: ServerStats,
        weights: ReceivedWeights | None = None,
        shutdown_event: Any = None,
    ) -> None:
        self.policy = policy
        self.transport = transport
        self.stats = stats
        self._config = config
        self._weights = weights
        self._is_stopping = False
        #: In traces of collectors.
        self.companion = Companion("inference server")
        self._recorded_turn: _RecordedTurn | None = None
        self._answered_at = 0.0
        self._shutdown_event = shutdown_event
        #: Taken from the transport and not answered.
        self._backlog: deque[Asked] = deque()
        #: In the batch that is being answered.
        self._under_way: Sequence[Asked] = ()
        #: How many of the last batch's clients wait for their answers.
        self._last_size = 1
        self._impatient_for = 0

    def stop(self) -> None:
        self._is_stopping = True
        self.transport.ring()

    def run(self) -> None:
        reason: InferenceError = was_shut_down()
        # OpenMP's number of threads is each thread's own: without this, a new thread uses every core, whatever the
        # program has set, and spins for milliseconds where others need the core.
        torch.set_num_threads(torch.get_num_threads())
        self.companion.thread = threading.get_ident()
        try:
            while not self._is_stopping:
                if self._shutdown_event is not None and self._shutdown_event.is_set():
                    break
                self._receive_weights()
                batch = self._next_batch()
                recorder = self.companion.recorder  # which may be there since a moment ago
                if recorder is not None:
                    self._answer_recorded(batch, recorder)
                elif batch:
                    self._answer(batch)
        except BaseException as error:
            reason = ServerDied(f"the inference server's thread has ended with {told(error)}")
            raise
        finally:
            self._close(reason)

    def _answer(self, batch: Sequence[Asked]) -> None:
        self._under_way = batch
        self._serve(batch)
        self._under_way = ()

    def _answer_recorded(self, batch: Sequence[Asked], recorder: Recorder) -> None:
        """With a clock."""
        self._recorded_turn = turn = _RecordedTurn(recorder, self._answered_at)
        if batch:
            self._answer(batch)
        else:
            turn.waited()
        self._recorded_turn = None
        self._answered_at = perf_counter()

    def give_up(self) -> None:
        """Fail everything, be it from another thread while the policy computes."""
        self._close(was_shut_down())

    def _close(self, reason: InferenceError) -> None:
        self.transport.close(reason, (*self._backlog, *self._under_way))

    # -- forming batches -------------------------------------------------------------------------------------------

    def _next_batch(self) -> list[Asked]:
        backlog, transport = self._backlog, self.transport
        backlog.extend(transport.take_requests())
        if self._config.min_batch_size == 1:
            self._gather()
        if not backlog:
            transport.wait(_IDLE_S if self._weights is None else _IDLE_WITH_SCHEME_S)
            backlog.extend(transport.take_requests())
            if not backlog:
                return []
        if self._config.min_batch_size > 1:
            self._wait_for_more()
        batch = [backlog.popleft()]
        room = self._config.max_batch_size - batch[0].content.num_rows
        while backlog and backlog[0].content.num_rows <= room:
            batch.append(backlog.popleft())
            room -= batch[-1].content.num_rows
        self._last_size = sum(request.waits for request in batch)
        return batch

    def _wait_for_more(self) -> None:
        """Until there are enough rows, the oldest request has waited long enough, or nobody is left who could ask."""
        backlog = self._backlog
        until = backlog[0].submitted_at + self._config.timeout
        while not self._is_stopping:
            if sum(request.content.num_rows for request in backlog) >= self._config.min_batch_size:
                return
            num_clients = self.transport.num_clients()
            if num_clients is not None and sum(request.waits for request in backlog) >= num_clients:
                return
            left_s = until - perf_counter()
            if left_s <= 0:
                return
            self.transport.wait(left_s)
            backlog.extend(self.transport.take_requests())

    def _gather(self) -> None:
        """Wait a moment for clients that were answered together, and will ask again together.

        Being woken for each of them would cost a change of threads apiece; and those that are about to run would fight
        with the policy for the interpreter, and then make a batch of their own. If they do not come, because they have
        something else to do, they are not waited for the next times.
        """
        backlog, transport = self._backlog, self.transport
        clients = transport.num_clients()
        expected = min(clients if clients is not None else self._last_size, self._config.max_batch_size)
        if expected < 2 or len(backlog) >= expected:
            return
        if self._impatient_for:
            self._impatient_for -= 1
            return
        transport.wait_for(expected - len(backlog), _GATHER_S_EACH * expected)
        backlog.extend(transport.take_requests())
        if len(backlog) < expected:
            self._impatient_for = _IMPATIENT_BATCHES

    # -- answering -------------------------------------------------------------------------------------------------

    def _serve(self, batch: Sequence[Asked]) -> None:
        """Requests that cannot go into one forward (by their keys, shapes, interaction type) go into several."""
        signature = batch[0].content.signature
        if all(request.content.signature == signature for request in batch):
            self._serve_alike(batch)
            return
        groups: dict[Any, list[Asked]] = {}
        for request in batch:
            groups.setdefault(request.content.signature, []).append(request)
        for group in groups.values():
            self._serve_alike(group)

    def _serve_alike(self, group: Sequence[Asked]) -> None:
        start = perf_counter()
        error: Exception | None = None
        answers: Sequence[Answer] = ()
        try:
            answers = list(self.policy.answer([request.content for request in group]))
            if self.transport.response_keys is not None:
                answers = [select_keys(answer, self.transport.response_keys) for answer in answers]
        except Exception as raised:
            error = raised
        except BaseException as ending:  # sys.exit() in a policy ends the server, not its clients
            for request in group:
                request.fail(ServerDied(f"the policy ended the inference server with {ending!r}"))
            raise
        if self._recorded_turn is not None:
            self._recorded_turn.served(len(group))
        self.stats.count(  # before anybody has an answer: who looks then, finds it counted
            [start - request.submitted_at for request in group],
            sum([request.content.num_rows for request in group]),
            perf_counter() - start,
            failed=error is not None,
        )
        if error is not None:
            self._fail(group, error)
            return
        for request, answer in zip(group, answers, strict=True):
            request.answer(*answer)

    def _fail(self, group: Sequence[Asked], error: Exception) -> None:
        keys = ", ".join(map(str, group[0].content.as_tensordict().keys(True, True)))
        add_note(
            error,
            f"swath: raised by an inference server for a batch of {len(group)} requests (the first one of batch size "
            f"{tuple(group[0].content.batch_size)}, with {keys or 'no key that the policy reads'}); the server goes on",
        )
        for request in group:
            request.fail(error)

    # -- weights ---------------------------------------------------------------------------------------------------

    def _receive_weights(self) -> None:
        if self._weights is None:
            return
        with self.policy.lock, contextlib.suppress(EOFError, OSError):  # the sender is gone: no more weights
            self._weights.receive()

"""Where evaluations run: in a thread of the program, or in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle
import torch

from swath import platforms
from swath.collectors.evaluation import Evaluation, EvaluationPlan, Weights, on_cpu
from swath.collectors.evaluation_schemes import Receivers, Senders
from swath.process import pickling
from swath.process.channel import Channel, pack, unpack
from swath.process.helper import Helper
from swath.process.owner import leave_with_owner
from swath.process.seeding import draw_base_seed, seed_process
from swath.weight_update.scheme import WeightSyncScheme


class EvaluationBackend(Protocol):
    """One evaluation at a time; ``interrupt`` and ``kill`` may come from another thread meanwhile."""

    @property
    def pid(self) -> int | None:
        """Where it runs, if that is known."""
        ...

    def prepare(self) -> None:
        """Before anything else, in the thread that evaluates."""
        ...

    def run(self, weights: Weights, step: int) -> dict[str, Any]: ...

    def set_seed(self, seed: int, static_seed: bool) -> int | None: ...

    def interrupt(self) -> None:
        """Let the evaluation under way end soon, with an exception; there will be no other."""
        ...

    def kill(self) -> None:
        """``interrupt`` was not enough."""
        ...

    def close(self) -> None: ...


class ThreadBackend:
    """In this process, in whatever thread calls ``prepare`` and ``run``: some simulators know one thread only."""

    pid: int | None = None

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = plan
        self._stopped = threading.Event()
        self._made: Evaluation | None = None
        #: Each thread has one, and factories are to find the program's.
        self._default_device = torch.get_default_device()

    def prepare(self) -> None:
        with self._default_device if self._default_device.type != "cpu" else nullcontext():
            self._made = Evaluation(self._plan, self._stopped.is_set, has_own_process=False)

    @property
    def _evaluation(self) -> Evaluation:
        assert self._made is not None
        return self._made

    def run(self, weights: Weights, step: int) -> dict[str, Any]:
        return self._evaluation.run(weights, step)

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        return self._evaluation.set_seed(seed, static_seed)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def interrupt(self) -> None:
        self._stopped.set()

    def kill(self) -> None:
        """A thread cannot be killed; as a daemon, it does not keep the program."""


class ProcessBackend:
    """In a process of its own, where env and policy are made.

    Args:
        schemes: how weights get there, by model id; None: with the order to evaluate.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        init_fn: Callable[[], Any] | None,
        schemes: Mapping[str, WeightSyncScheme] | None = None,
    ) -> None:
        what = "the Evaluator's env, policy_factory or another argument"
        with pickling.to_be_sent(what, "a process", pickling.INSIDE_OF_FACTORIES):
            blueprint = pickling.dumps((plan, init_fn, draw_base_seed()))
        platforms.require("an Evaluator with backend='process'", (platforms.PROCESSES,), "use backend='thread'")
        self._senders = None if schemes is None else Senders(schemes)
        self._helper = Helper(_main, "Evaluator", args=(None if self._senders is None else self._senders.halves(),))
        try:
            self._ask(blueprint)
            if self._senders is not None:
                self._senders.connect(self._helper)
        except BaseException:
            self._helper.kill()
            self.close()
            raise

    def prepare(self) -> None:
        """It is made."""

    def _ask(self, message: bytes) -> Any:
        succeeded, content = self._helper.ask(message)
        if not succeeded:
            raise unpack(content, 0, self._helper.who)
        return content

    @property
    def pid(self) -> int:
        return self._helper.pid

    def run(self, weights: Weights, step: int) -> dict[str, Any]:
        if self._senders is not None and weights:
            self._senders.send(weights)
            weights = None
        return self._ask(pickling.dumps(("run", on_cpu(weights), step)))

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        return self._ask(pickling.dumps(("set_seed", seed, static_seed)))

    def interrupt(self) -> None:
        self._helper.tell_to_close()

    def kill(self) -> None:
        self._helper.kill()

    def close(self) -> None:
        self._helper.close(timeout_s=2.0)
        if self._senders is not None:
            self._senders.close()


def _main(connection: Connection, schemes: Mapping[str, WeightSyncScheme] | None) -> None:
    """The process."""
    leave_with_owner()
    channel = Channel(connection)
    try:
        evaluation = _prepare(channel, connection.recv_bytes())
        if evaluation is None:
            return
        try:
            receivers = Receivers(schemes or {}, evaluation)
            while _serve(channel, evaluation, receivers):
                pass
        finally:
            evaluation.close()
    except (EOFError, OSError):  # the owner is gone
        pass


def _prepare(channel: Channel, blueprint: bytes) -> Evaluation | None:
    try:
        torch.set_num_threads(1)
        plan, init_fn, seed = cloudpickle.loads(blueprint)
        if init_fn is not None:
            init_fn()
        seed_process(seed)
        # Nothing is sent while an evaluation runs, but the order to stop it.
        evaluation = Evaluation(plan, channel.has_message, has_own_process=True)
    except BaseException as error:
        channel.send(False, pack(error))
        return None
    channel.send(True, None)
    return evaluation


def _serve(channel: Channel, evaluation: Evaluation, receivers: Receivers) -> bool:
    """Do what the owner asks for; whether to go on."""
    order, *details = channel.receive()
    if order == "close":
        return False
    if order == "take_weights":  # answered by the scheme
        receivers.take(*details)
        return True
    try:
        reply = pickling.dumps((True, getattr(evaluation, order)(*details)))
    except Exception as error:
        reply = pickling.dumps((False, pack(error)))
    channel.send_pickled(reply)
    return True

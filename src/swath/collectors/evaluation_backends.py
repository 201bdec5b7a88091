"""Where evaluations run: in a thread of the program, or in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle
import torch

from swath import platforms
from swath.collectors.evaluation import Evaluation, EvaluationPlan
from swath.process import pickling
from swath.process.channel import Channel, pack, unpack
from swath.process.helper import Helper
from swath.process.owner import leave_with_owner
from swath.process.seeding import draw_base_seed, seed_process

Weights = Mapping[str, torch.Tensor]


class EvaluationBackend(Protocol):
    """One evaluation at a time; ``interrupt`` and ``kill`` may come from another thread meanwhile."""

    def run(self, weights: Weights | None) -> dict[str, Any]: ...

    def set_seed(self, seed: int, static_seed: bool) -> int | None: ...

    def interrupt(self) -> None:
        """Let the evaluation under way end soon, with an exception; there will be no other."""
        ...

    def kill(self) -> None:
        """``interrupt`` was not enough."""
        ...

    def close(self) -> None: ...


class ThreadBackend:
    """In this process, in whatever thread calls ``run``."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._stopped = threading.Event()
        self._evaluation = Evaluation(plan, self._stopped.is_set, has_own_process=False)
        self.run = self._evaluation.run
        self.set_seed = self._evaluation.set_seed
        self.close = self._evaluation.close

    def interrupt(self) -> None:
        self._stopped.set()

    def kill(self) -> None:
        """A thread cannot be killed; as a daemon, it does not keep the program."""


class ProcessBackend:
    """In a process of its own, where env and policy are made."""

    def __init__(self, plan: EvaluationPlan, init_fn: Callable[[], Any] | None) -> None:
        try:
            blueprint = pickling.dumps((plan, init_fn, draw_base_seed()))
        except Exception as error:
            raise TypeError(
                f"the Evaluator's env, policy_factory or another argument cannot be sent to a process: "
                f"{type(error).__name__}: {error}. Make what cannot be pickled inside of the factories"
            ) from error
        platforms.require("an Evaluator with backend='process'", (platforms.PROCESSES,), "use backend='thread'")
        self._helper = Helper(_main, "Evaluator")
        try:
            self._ask(blueprint)
        except BaseException:
            self._helper.kill()
            self.close()
            raise

    def _ask(self, message: bytes) -> Any:
        succeeded, content = self._helper.ask(message)
        if not succeeded:
            raise unpack(content, 0, self._helper.who)
        return content

    @property
    def pid(self) -> int:
        return self._helper.pid

    def run(self, weights: Weights | None) -> dict[str, Any]:
        on_cpu = None if weights is None else {name: tensor.cpu() for name, tensor in weights.items()}
        return self._ask(pickling.dumps(("run", on_cpu)))

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        return self._ask(pickling.dumps(("set_seed", seed, static_seed)))

    def interrupt(self) -> None:
        self._helper.tell_to_close()

    def kill(self) -> None:
        self._helper.kill()

    def close(self) -> None:
        self._helper.close(timeout_s=2.0)


def _main(connection: Connection) -> None:
    """The process."""
    leave_with_owner()
    channel = Channel(connection)
    try:
        evaluation = _prepare(channel, connection.recv_bytes())
        if evaluation is None:
            return
        try:
            while _serve(channel, evaluation):
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


def _serve(channel: Channel, evaluation: Evaluation) -> bool:
    """Do what the owner asks for; whether to go on."""
    order, *details = channel.receive()
    if order == "close":
        return False
    try:
        reply = pickling.dumps((True, getattr(evaluation, order)(*details)))
    except Exception as error:
        reply = pickling.dumps((False, pack(error)))
    channel.send_pickled(reply)
    return True

"""A Ray actor in which nothing is imported before the user's own first function was called: a simulator that has to be
there before torch is (Isaac Lab's ``AppLauncher``) decides what comes first."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from swath.errors import NodeLost
from swath.integrations.ray import import_ray, start_ray
from swath.process import pickling
from swath.process.channel import pack, unpack

_CONTROL = "control"


class LateActor:
    """The actor's side. It knows what it does once ``make`` was called; ``interrupt`` comes meanwhile."""

    def __init__(self) -> None:
        self._interrupted = threading.Event()
        self._thing: Any = None
        self._is_closed = False

    def make(self, init_fn: bytes, kind: tuple[str, str], plan: bytes) -> tuple[bool, Any]:
        """``kind`` is where its class is found: made of the plan, and of what tells it to stop."""
        return _answer(self._make, init_fn, kind, plan)

    def _make(self, init_fn: bytes, kind: tuple[str, str], plan: bytes) -> None:
        first = pickling.loads_with_path(init_fn)
        if first is not None:
            first()
        module, name = kind
        self._thing = getattr(importlib.import_module(module), name)(
            pickling.loads_with_path(plan), self._interrupted.is_set
        )

    def do(self, method: str, arguments: bytes) -> tuple[bool, Any]:
        if self._is_closed:  # it is about to be killed, and somebody else asks: who is told that it is gone
            os._exit(0)
        return _answer(lambda: getattr(self._thing, method)(*pickling.loads_with_path(arguments)))

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._is_closed = True
        if self._thing is not None:
            self._thing.close()


def _answer(call: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    try:
        return True, pickling.dumps_with_path(call(*args))
    except BaseException as error:  # an env may call sys.exit
        return False, pack(error)


class RayHelper:
    """The actor, as its owner holds it.

    Args:
        actor: a ``LateActor``.
        who: for messages.
        started_ray: whether Ray is to end with it.
    """

    def __init__(self, actor: Any, who: str, *, started_ray: bool = False) -> None:
        self._ray = import_ray()
        self._actor = actor
        self._who = who
        self._started_ray = started_ray

    @classmethod
    def launch(cls, who: str, options: Mapping[str, Any], init_fn: Any, kind: tuple[str, str], plan: Any) -> RayHelper:
        """Start an actor, with ``ray.remote``'s options, and wait until it is made."""
        with pickling.to_be_sent(f"an argument of {who}", "its Ray actor", pickling.INSIDE_OF_FACTORIES):
            first, content = pickling.dumps_with_path(init_fn), pickling.dumps_with_path(plan)
        ray = import_ray()
        started_ray = start_ray(None)
        helper: RayHelper | None = None
        try:
            options = with_gpus_that_exist(options)

            class SwathActor(LateActor):
                interrupt = ray.method(concurrency_group=_CONTROL)(LateActor.interrupt)

            remote = ray.remote(concurrency_groups={_CONTROL: 1}, max_restarts=0)(SwathActor)
            helper = cls(remote.options(**options).remote(), who, started_ray=started_ray)
            helper.result(helper._actor.make.remote(first, kind, content))
        except BaseException:
            if helper is not None:
                helper.close(0.0)
            elif started_ray:
                ray.shutdown()
            raise
        return helper

    @classmethod
    def named(cls, who: str, name: str) -> RayHelper:
        """An actor that was launched elsewhere, with this name."""
        start_ray(None)
        return cls(import_ray().get_actor(name), who)

    def start(self, method: str, *args: Any) -> Any:
        """Ask, and go on: the reference of the answer, for ``is_ready`` and ``result``."""
        return self._actor.do.remote(method, pickling.dumps_with_path(args))

    def is_ready(self, reference: Any, timeout_s: float | None) -> bool:
        return bool(self._ray.wait([reference], timeout=timeout_s)[0])

    def result(self, reference: Any) -> Any:
        """What was answered, or raises what was raised there.

        Raises:
            NodeLost: the actor is gone.
        """
        try:
            done, content = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            why = " ".join(line.strip() for line in str(error).splitlines()[:1])
            raise NodeLost(f"the Ray actor of {self._who} is gone: {why} Make a new one", 0) from error
        if not done:
            raise unpack(content, 0, f"the Ray actor of {self._who}")
        return pickling.loads_with_path(content)

    def interrupt(self) -> None:
        with contextlib.suppress(Exception):
            self._actor.interrupt.remote()

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # Ray, or the actor, has ended before
            self._ray.kill(self._actor, no_restart=True)

    def close(self, timeout_s: float) -> None:
        """Let it close what it has, then end it; harmless when it is gone."""
        if not self._ray.is_initialized():
            return
        if timeout_s:
            with contextlib.suppress(Exception):
                self._ray.wait([self._actor.close.remote()], timeout=timeout_s)
        self.kill()
        if self._started_ray:
            self._started_ray = False
            self._ray.shutdown()


def with_gpus_that_exist(options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse to wait for what the cluster does not have: Ray would, without an end.

    Raises:
        ValueError: no node has so many GPUs.
    """
    wanted = options.get("num_gpus") or 0
    there = import_ray().cluster_resources().get("GPU", 0)
    if wanted > there:
        raise ValueError(
            f"num_gpus={wanted:g}, and the Ray cluster has {there:g}: give num_gpus=0 to evaluate on the CPU, or start "
            "Ray with the GPUs first (ray.init(num_gpus=...), or the cluster's nodes)"
        )
    return dict(options)

"""RayInferenceServer: an inference server in a Ray actor, for clients anywhere in the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

from tensordict import TensorDictBase

from swath.integrations.ray import import_ray, start_ray
from swath.modules.inference_server.config import ServerSettings, check_settings
from swath.modules.inference_server.ray_client import RayClient, reply_from
from swath.modules.inference_server.replies import not_started, opened, was_shut_down
from swath.modules.inference_server.requests import asking_as
from swath.modules.inference_server.server import InferenceServer
from swath.modules.inference_server.service import ServedElsewhere, as_tensors
from swath.modules.inference_server.stamp import take_stamp
from swath.process import pickling
from swath.process.channel import pack
from swath.weight_update.weights import apply_weights

#: So many requests can be under way at a time: each has a thread of the actor, which sleeps.
_MOST_REQUESTS = 256


class RayInferenceServer(ServedElsewhere):
    """Serves a policy from a Ray actor, to clients in any process of the cluster.

    Args:
        policy_factory: makes the policy, in the actor.
        transport: "auto" or "ray": requests are calls of the actor.
        num_clients: how many requests can be under way at a time (256).
        ray_init_config: for ``ray.init``, where Ray is not running.
        remote_config: options of the actor: ``num_cpus``, ``num_gpus``, ``resources``, ...
        settings: all others of ``InferenceServer``.
    """

    _place = "actor"
    _owns = "an actor that answers"

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: str = "auto",
        *,
        num_clients: int | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        **settings: Unpack[ServerSettings],
    ) -> None:
        if not callable(policy_factory):
            raise TypeError(f"policy_factory must be a function, got {type(policy_factory).__name__}")
        if transport not in ("auto", "ray"):
            raise ValueError(
                f"a server in a Ray actor is asked by calls of the actor: transport='ray', not {transport!r}"
            )
        check_settings(RayInferenceServer, settings)
        self._ray = import_ray()
        self._started_ray = False
        self._settings = policy_factory, dict(settings)
        self._ray_init_config = ray_init_config
        self._options = {"max_concurrency": (num_clients or _MOST_REQUESTS) + 8, **(remote_config or {})}
        self._actor: Any = None
        self._is_closed = False

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> RayInferenceServer:
        """Start the actor, and wait until its policy is made."""
        if self._actor is not None:
            raise self._started_before()
        self._started_ray = start_ray(self._ray_init_config)
        # Not pickled by Ray, which takes a module for one that every process can import.
        plan = pickling.dumps_with_path(self._settings)
        self._actor = self._ray.remote(_ServingActor).options(**self._options).remote(plan)
        try:
            self._call("is_alive")
        except BaseException:
            self.shutdown()
            raise
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the actor; requests that were not answered fail."""
        if self._actor is None or self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(Exception):  # it is ended below
            self._ray.get(self._actor.shutdown.remote(timeout), timeout=timeout)
        self._ray.kill(self._actor)
        if self._started_ray:
            self._ray.shutdown()

    @property
    def was_started(self) -> bool:
        return self._actor is not None

    @property
    def is_alive(self) -> bool:
        if self._actor is None or self._is_closed:
            return False
        try:
            return bool(self._call("is_alive"))
        except Exception:
            return False

    # -- what it offers --------------------------------------------------------------------------------------------

    @property
    def service_backend(self) -> str:
        return "ray"

    @property
    def transport_kind(self) -> str:
        return "ray"

    def client(self) -> RayClient:
        """Something that asks this server, in any process of the cluster."""
        if self._actor is None:
            raise not_started()
        return RayClient(self._actor, self._call("in_keys"))

    def update_model_weights(self, weights: Any, *, mark_weight_update: bool = True) -> None:
        """As ``update_policy_weights_(weights)``, counted or not."""
        function = partial(apply_weights, source=as_tensors(weights))
        self._call("update_model", function, mark_weight_update=mark_weight_update)

    def stats(self, reset: bool = False) -> dict[str, Any]:
        """As ``InferenceServer.stats``."""
        return self._call("stats", reset)

    def health(self) -> dict[str, Any]:
        """``actor_alive``; never raises."""
        return {"actor_alive": self.is_alive}

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._actor is None:
            raise not_started()
        if self._is_closed:
            raise was_shut_down()
        return opened(*reply_from(lambda: self._ray.get(self._actor.call.remote(name, args, kwargs))))


# -- in the actor --------------------------------------------------------------------------------------------------


class _ServingActor:
    """An ``InferenceServer`` of threads; calls of the actor, each in a thread, are its clients."""

    def __init__(self, plan: bytes) -> None:
        policy_factory, settings = pickling.loads_with_path(plan)
        self._server = InferenceServer(policy_factory=policy_factory, **settings).start()
        self._transport = self._server.transport

    def ask(self, tensordict: TensorDictBase) -> tuple[str, Any]:
        asked, kind = take_stamp(tensordict)
        try:
            with asking_as(kind):
                future = self._transport.submit(asked)
            return "answer", future.result().exclude(*asked.keys(True, True))
        except Exception as error:
            return "failed", pack(error)

    def call(self, name: str, args: Any, kwargs: Any) -> tuple[str, Any]:
        try:
            found = getattr(self._server, name)
            return "answer", found(*args, **kwargs) if callable(found) else found
        except Exception as error:
            return "failed", pack(error)

    def shutdown(self, timeout: float) -> None:
        self._server.shutdown(timeout)

"""PolicyClientModule: a policy that is somewhere else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from time import sleep
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type as current_interaction_type

from swath.errors import PolicyOutputError
from swath.keys import as_key, show
from swath.modules.inference_server.client import InferenceClient
from swath.modules.inference_server.futures import InferenceFuture
from swath.modules.inference_server.requests import asking_as
from swath.modules.inference_server.service import PolicyService
from swath.modules.inference_server.stamp import stamped
from swath.modules.inference_server.transport import InferenceTransport


class PolicyClientModule(TensorDictModuleBase):
    """A module that asks an inference server: a policy for any collector, with any batch size.

    It can be pickled if its client can. The caller's interaction type (a collector's ``exploration_type``) is sent
    along.

    Args:
        client: made by ``server.client()``; or a server, or a transport, of which a client is taken; or any function of
            a TensorDict, or object with ``submit``.
        in_keys: what is sent, at most. By default all that the policy reads.
        out_keys: what is taken from the answers; ``"policy_version"`` can be among them. By default all that there is;
            but give them where the module is a collector's policy, which asks for ``in_keys`` and ``out_keys``.
        max_inflight: how many requests may be under way at a time; more wait. None: any number.
        interaction_type: how the policy is to choose, whatever the caller's type is.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from swath.modules import InferenceServer
    >>> with InferenceServer(lambda observation: observation.argmax(-1)) as server:
    ...     policy = PolicyClientModule(server.client(), ["observation"], ["action", "policy_version"])
    ...     result = policy(TensorDict(observation=torch.eye(3), batch_size=3))
    >>> result["action"], result["policy_version"]
    (tensor([0, 1, 2]), tensor([0, 0, 0]))
    """

    #: By key, the specs of what a recurrent policy remembers; for users to set.
    state_spec: Mapping[Any, Any] | None

    def __init__(
        self,
        client: Callable[[TensorDictBase], TensorDictBase] | InferenceTransport | PolicyService,
        in_keys: Sequence[Any] | None = None,
        out_keys: Sequence[Any] | None = None,
        max_inflight: int | None = None,
        interaction_type: InteractionType | str | None = None,
    ) -> None:
        super().__init__()
        if max_inflight is not None and max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, got {max_inflight}")
        self.client: Any = client.client() if isinstance(client, (InferenceTransport, PolicyService)) else client
        self.sends_all, self.takes_all = in_keys is None, out_keys is None
        self.in_keys = ["observation"] if in_keys is None else list(in_keys)
        self.out_keys = ["action"] if out_keys is None else list(out_keys)
        self.max_inflight = max_inflight
        self.interaction_type = None if interaction_type is None else InteractionType(interaction_type)
        self._start_over()

    def _start_over(self) -> None:
        self._under_way: deque[Any] = deque()
        self._lock = threading.Lock()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A new TensorDict: the given one, with ``out_keys``."""
        with self._asking():
            if self.max_inflight is None and callable(self.client):
                answer = self.client(self._asked(tensordict))
            else:
                answer = self._submit(self._asked(tensordict)).result()
        result = tensordict.copy()
        if self.takes_all:
            return result.update(answer)
        for key in self.out_keys:
            value = answer.get(key, None)
            if value is None:
                there = ", ".join(show(as_key(name)) for name in answer.keys(True, True))
                raise PolicyOutputError(
                    f"the inference server does not answer with {show(as_key(key))}; it has {there}"
                )
            result.set(key, value)
        return result

    def submit(self, tensordict: TensorDictBase) -> Future[TensorDictBase]:
        """Ask, and go on; waits while ``max_inflight`` requests are under way."""
        with self._asking():
            return self._submit(self._asked(tensordict))

    def _asking(self) -> AbstractContextManager[None]:
        return nullcontext() if self.interaction_type is None else asking_as(self.interaction_type)

    def _asked(self, tensordict: TensorDictBase) -> TensorDictBase:
        asked = tensordict if self.sends_all else tensordict.select(*self.in_keys, strict=False)
        if isinstance(self.client, InferenceClient) and self.client.carries_interaction_type:
            return asked
        if not hasattr(self.client, "submit"):  # a function of this process, which may write into what it gets
            return asked.copy()
        return stamped(asked, self.interaction_type or current_interaction_type())

    def _submit(self, asked: TensorDictBase) -> Any:
        if self.max_inflight is None:
            return self._start(asked)
        with self._lock:
            self._under_way = deque(future for future in self._under_way if not future.done())
            while len(self._under_way) >= self.max_inflight:
                # The oldest is the next one to be answered, also where nobody asks for its result.
                _wait_for(self._under_way.popleft())
            future = self._start(asked)
            self._under_way.append(future)
        return future

    def _start(self, asked: TensorDictBase) -> Any:
        if hasattr(self.client, "submit"):
            return self.client.submit(asked)
        future: Future[TensorDictBase] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self.client(asked))
        except Exception as error:
            future.set_exception(error)
        return future

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_under_way"], state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_over()


def _wait_for(future: Any) -> None:
    """Until it is done, whatever kind of future it is."""
    if isinstance(future, InferenceFuture):
        future.wait()
    elif isinstance(future, Future):
        wait([future])
    else:
        while not future.done():
            sleep(0.001)

"""PolicyClientModule: a policy that is somewhere else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from swath.errors import PolicyOutputError
from swath.keys import as_key, show
from swath.modules.inference.client import InferenceClient, InferenceFuture


class PolicyClientModule(TensorDictModuleBase):
    """A module that asks an inference server: a policy for any collector, with any batch size.

    It can be pickled if its client can. The caller's interaction type (a collector's ``exploration_type``) is sent
    along.

    Args:
        client: made by ``server.client()``.
        in_keys: what is sent, at most.
        out_keys: what is taken from the answers; ``"policy_version"`` can be among them.
        max_inflight: how many requests may be under way at a time; more wait. None: any number.

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
        client: InferenceClient,
        in_keys: Sequence[Any] = ("observation",),
        out_keys: Sequence[Any] = ("action",),
        max_inflight: int | None = None,
    ) -> None:
        super().__init__()
        if max_inflight is not None and max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, got {max_inflight}")
        self.client = client
        self.in_keys = list(in_keys)
        self.out_keys = list(out_keys)
        self.max_inflight = max_inflight
        self._start_over()

    def _start_over(self) -> None:
        self._under_way: deque[InferenceFuture] = deque()
        self._lock = threading.Lock()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A new TensorDict: the given one, with ``out_keys``."""
        asked = tensordict.select(*self.in_keys, strict=False)
        answer = self.client(asked) if self.max_inflight is None else self._submit(asked).result()
        result = tensordict.copy()
        for key in self.out_keys:
            value = answer.get(key, None)
            if value is None:
                there = ", ".join(show(as_key(name)) for name in answer.keys(True, True))
                raise PolicyOutputError(
                    f"the inference server does not answer with {show(as_key(key))}; it has {there}"
                )
            result.set(key, value)
        return result

    def submit(self, tensordict: TensorDictBase) -> InferenceFuture:
        """Ask, and go on; waits while ``max_inflight`` requests are under way."""
        asked = tensordict.select(*self.in_keys, strict=False)
        return self.client.submit(asked) if self.max_inflight is None else self._submit(asked)

    def _submit(self, asked: TensorDictBase) -> InferenceFuture:
        assert self.max_inflight is not None
        with self._lock:
            self._under_way = deque(future for future in self._under_way if not future.done())
            while len(self._under_way) >= self.max_inflight:
                # The oldest is the next one to be answered, also where nobody asks for its result.
                self._under_way.popleft().wait()
            future = self.client.submit(asked)
            self._under_way.append(future)
        return future

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_under_way"], state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start_over()

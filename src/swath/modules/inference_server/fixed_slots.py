"""Slots for requests and answers that are declared beforehand."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor

from swath.keys import Key, as_key, show
from swath.modules.inference_server.pipes import DEFAULT_CLIENTS
from swath.modules.inference_server.reception import Address
from swath.modules.inference_server.requests import Content, Request
from swath.modules.inference_server.slots import SlotTransport
from swath.process.channel import pack


class ProcessSlotTransport(SlotTransport):
    """For clients in any process of this machine, with requests and answers as declared; a slot for each client.

    Keys that are not declared are dropped; a request without one that is fails with a ``KeyError``, one of another
    shape or dtype with a ``ValueError``.

    Args:
        request_spec, response_spec: a request, and an answer, as they will be: keys, shapes, dtypes, in main memory.
            ``"policy_version"`` can be in the second.
        num_slots: how many clients there may be.
        ctx: accepted for compatibility, and not needed: a client connects by itself, whatever started its process.
        copy_result: accepted for compatibility: an answer is always the client's own for good.

    >>> from tensordict import TensorDict
    >>> from swath.modules import InferenceServer
    >>> answer = TensorDict(action=torch.zeros(2))
    >>> transport = ProcessSlotTransport(TensorDict(observation=torch.zeros(2)), answer, num_slots=4)
    >>> with InferenceServer(lambda observation: observation * 2, transport):
    ...     sorted(transport.client()(TensorDict(observation=torch.ones(2), other=torch.ones(1))).keys())
    ['action', 'observation', 'other']
    """

    def __init__(
        self,
        request_spec: TensorDictBase,
        response_spec: TensorDictBase,
        *,
        num_slots: int,
        ctx: BaseContext | None = None,
        copy_result: bool = True,
        address: Address | None = None,
    ) -> None:
        self._asked = _declared(type(self).__name__, "request_spec", request_spec)
        answered = _declared(type(self).__name__, "response_spec", response_spec)
        super().__init__(num_slots, request_spec=list(self._asked), address=address)
        self.response_keys = tuple(answered)
        self._specs = {"request_spec": request_spec.clone(), "response_spec": response_spec.clone()}

    def settings(self) -> dict[str, Any]:
        return {**self._specs, "num_slots": self.num_slots}

    def _reply_to(self, request: Request) -> tuple[Any, ...]:
        try:
            self._check(request.content)
        except (KeyError, ValueError) as error:
            return "failed", pack(error)
        return super()._reply_to(request)

    def _check(self, content: Content) -> None:
        given = dict(zip(content.keys, content.tensors, strict=True))
        for key, spec in self._asked.items():
            tensor = given.get(key)
            if tensor is None:
                raise KeyError(f"this request has no {show(key)}, which request_spec declares")
            if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
                raise ValueError(
                    f"{show(key)} of this request has shape {tuple(tensor.shape)} and {tensor.dtype}; request_spec "
                    f"declares {tuple(spec.shape)} and {spec.dtype}"
                )
            if tensor.device.type != "cpu":
                raise ValueError(f"{show(key)} of this request is on {tensor.device}; slots are in main memory: .cpu()")


class SharedMemoryTransport(ProcessSlotTransport):
    """As ``ProcessSlotTransport``, for any number of clients: memory is taken as they come, so nobody waits for a slot.

    >>> from tensordict import TensorDict
    >>> request, answer = TensorDict(observation=torch.zeros(4)), TensorDict(action=torch.zeros(2))
    >>> SharedMemoryTransport(request, answer, num_slots=8).transport_kind
    'shared_memory'
    """

    transport_kind = "shared_memory"

    def __init__(
        self,
        request_spec: TensorDictBase,
        response_spec: TensorDictBase,
        *,
        num_slots: int = 1,
        ctx: BaseContext | None = None,
        copy_result: bool = True,
        address: Address | None = None,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        super().__init__(request_spec, response_spec, num_slots=max(num_slots, DEFAULT_CLIENTS), address=address)


def _declared(who: str, which: str, spec: TensorDictBase) -> dict[Key, torch.Tensor]:
    if not isinstance(spec, TensorDictBase):
        raise TypeError(f"{who} needs a TensorDict as {which}, got {type(spec).__name__}")
    leaves = {as_key(key): leaf for key, leaf in spec.items(True, True, is_leaf=is_leaf_nontensor)}
    for key, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(f"{who}: {show(key)} of {which} is no tensor; use an MPTransport for such requests")
        if leaf.device.type != "cpu":
            raise ValueError(f"{who}: {show(key)} of {which} is on {leaf.device}; slots are in main memory")
    return leaves

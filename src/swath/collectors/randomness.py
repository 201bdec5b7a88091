"""A collector's own random stream, apart from the program's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

#: Torch has one generator for all threads: two collectors must not exchange it at the same time.
GENERATOR_LOCK = threading.RLock()


class RandomStream:
    """The torch generator state that policies and random actions draw from; also CUDA's, where a policy is there.

    Until it is seeded, it is the program's own: ``torch.manual_seed`` works as everywhere. Once seeded, the
    collector draws from a stream of its own, which nothing else in the program advances. (Torch has one generator for
    all threads, so another thread that draws from it while a batch is collected does both.)
    """

    def __init__(self, policy_device: torch.device | None = None) -> None:
        self._cuda = policy_device if policy_device is not None and policy_device.type == "cuda" else None
        self._states: list[torch.Tensor] | None = None

    def seed(self, seed: int) -> None:
        # The first child of the seed's tree; envs use the seed itself.
        child = np.random.SeedSequence(seed).spawn(1)[0]
        number = int(child.generate_state(1, np.uint64)[0] >> 1)
        devices = [torch.device("cpu")] + ([self._cuda] if self._cuda else [])
        self._states = [torch.Generator(device).manual_seed(number).get_state() for device in devices]

    def _get(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._cuda)] if self._cuda else states

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._cuda:
            torch.cuda.set_rng_state(states[1], self._cuda)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if self._states is None:
            yield
            return
        with GENERATOR_LOCK:
            outside = self._get()
            self._set(self._states)
            try:
                yield
            finally:
                self._states = self._get()
                self._set(outside)

    def state_dict(self) -> dict[str, Any]:
        return {"torch": [state.clone() for state in self._states or self._get()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = [state.clone() for state in state_dict["torch"]]
        if len(states) == len(self._get()):  # else the policy is on another kind of device now: go on with what is
            self._states = states
        else:
            self._states = [states[0], *self._get()[1:]]

"""Telling once that a policy is trained, and that nobody sends its weights to who collects with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from swath.rollout.torch_internals import changes_of
from swath.warn import warn_user

#: So many batches with other weights than before, and none was sent: nobody updates that rarely by intention.
_BATCHES = 10


class ForgottenWeights:
    """Looks at a policy's parameters between batches.

    Args:
        policy: as its user trains it; anything but a module has nothing to look at.
        was_sent: whether any weights ever reached who collects.
    """

    def __init__(self, policy: Any, was_sent: Callable[[], bool]) -> None:
        parameters = policy.parameters() if isinstance(policy, nn.Module) else []
        trained = [each for each in parameters if each.requires_grad and not is_lazy(each)]
        # An optimizer's step changes all of them; two will do.
        self._looked_at = [trained[0], trained[-1]] if trained else []
        self._was_sent = was_sent
        self.begin()

    def begin(self) -> None:
        """Who collects has the weights that there are now."""
        self._before = self._counts()
        self._num_changes = 0

    def _counts(self) -> list[int]:
        return [changes_of(parameter) for parameter in self._looked_at]

    def look(self) -> None:
        """When a batch has come, which was collected with other weights if they changed since the last one."""
        if not self._looked_at:
            return
        now = self._counts()
        self._num_changes += now != self._before
        self._before = now
        self._tell_of(_BATCHES)

    def look_back(self) -> None:
        """There is no other batch."""
        self._tell_of(1)

    def _tell_of(self, least: int) -> None:
        if self._looked_at and self._num_changes >= least:
            self._looked_at = []  # once
            if not self._was_sent():
                warn_user(
                    f"the policy's parameters changed {self._num_changes} times between batches, all of which were "
                    "collected with those of the beginning: call collector.update_policy_weights_() after "
                    "optimizer.step(), or make the collector with update_at_each_batch=True"
                )

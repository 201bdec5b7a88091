"""What a collector saves of its env and its policy, and loads as a whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swath.envs.base import EnvBase
from swath.errors import StateMismatch, add_note
from swath.states import mismatch, require_counters
from swath.weight_update.hidden import HiddenWeights
from swath.weight_update.strategy import WeightStrategy
from swath.weight_update.weights import load_own_policy, save_own_policy, saved_state

_HINT = "swath: nothing of this {} was changed; make it with the envs and the policy that the state was taken with"
_A_SINGLE = "the state of a single Collector"


@dataclass(frozen=True)
class SavedParts:
    """The env and the policy of a collector ``who``, which may refuse a state."""

    who: str
    env: EnvBase
    policy: Any

    def save(self) -> dict[str, Any]:
        return {"env_state_dict": self.env.state_dict(), **self._save_policy()}

    def _save_policy(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if isinstance(self.policy, torch.nn.Module):
            state["policy_state_dict"] = saved_state(self.policy)
        if hidden := HiddenWeights(self.policy).tensors:
            state["hidden_weights"] = {name: tensor.detach().clone() for name, tensor in hidden.items()}
        return state

    def check(self, state: Any, strict: bool) -> None:
        """Raise what ``load`` would raise, and change nothing."""
        self._put_policy(self._put(state, strict), strict=True)

    def load(self, state: Any, strict: bool) -> None:
        """All of it, or on any exception nothing."""
        before = self._put(state, strict)
        try:
            self.env.load_state_dict(state["env_state_dict"], strict)
        except BaseException:
            self._put_policy(before, strict=True)
            raise

    def _put(self, state: Any, strict: bool) -> dict[str, Any]:
        """Load the policy, if the env takes its part, too; what the policy was before."""
        self._require_kind(state)
        before = self._save_policy()
        try:
            self.env.check_state_dict(state["env_state_dict"], strict)
            self._put_policy(state, strict)
        except BaseException as error:
            self._put_policy(before, strict=True)
            add_note(error, _HINT.format(self.who))
            raise
        return before

    def _require_kind(self, state: Any) -> None:
        require_counters(self.who, state, _A_SINGLE)
        if not isinstance(state.get("env_state_dict"), Mapping) or "random_state" not in state:
            raise mismatch(self.who, state, _A_SINGLE)
        require_counters(self.who, state, _A_SINGLE, ("traj_pool",))
        _require_generators(self.who, state["random_state"])

    def _put_policy(self, state: Mapping[str, Any], strict: bool) -> None:
        has_weights = isinstance(self.policy, torch.nn.Module)
        hidden = HiddenWeights(self.policy).tensors
        if strict:
            self._require_same("policy_state_dict", "policy weights", state, has_weights)
            self._require_same("hidden_weights", "weights of networks that the policy hides", state, bool(hidden))
        if has_weights and "policy_state_dict" in state:
            self.policy.load_state_dict(state["policy_state_dict"], strict=strict)
        if hidden and "hidden_weights" in state:
            WeightStrategy().apply_weights(hidden, state["hidden_weights"])

    def _require_same(self, key: str, what: str, state: Mapping[str, Any], is_here: bool) -> None:
        if (key in state) != is_here:
            found = f"no {what}, but this policy needs them" if is_here else f"{what}, but this policy has none"
            raise StateMismatch(
                f"{self.who}.load_state_dict: the state has {found}; make the collector with the policy that it was "
                "taken with, or give strict=False to go on without"
            )


def _require_generators(who: str, state: Any) -> None:
    states = state.get("torch") if isinstance(state, Mapping) else None
    if not isinstance(states, list) or not states or not all(isinstance(each, torch.Tensor) for each in states):
        raise StateMismatch(f"{who}.load_state_dict: 'random_state' has no states of torch's generators")
    if states[0].dtype != torch.uint8 or states[0].shape != torch.get_rng_state().shape:
        raise StateMismatch(f"{who}.load_state_dict: 'random_state' is of another generator than torch's on the CPU")


def load_all_or_nothing(policy: Any, state: Mapping[str, Any], strict: bool) -> None:
    """As ``load_own_policy``; where it fails, the trainer's module is as it was."""
    before = save_own_policy(policy)
    try:
        load_own_policy(policy, state, strict)
    except BaseException:
        load_own_policy(policy, before, strict=True)
        raise

"""Who collects with a policy of the zoo: swath, torchrl, a loop; and whether all of them did what the policy says."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch.distributions import Categorical

import policy_zoo as zoo
from check import check, require
from contenders import CollectorContender, Contender, Transitions
from multi_contenders import StoppedBetween
from setting import ENV_SEED, Setting

Outputs = Mapping[str, torch.Tensor]
#: Of observations, and of whether an episode starts with them: what the policy writes, in the order of ``writes``.
Caller = Callable[[torch.Tensor, np.ndarray], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A policy, and how to use it."""

    title: str
    make: Callable[[], Any]
    #: How a loop calls it.
    caller: Callable[[Any, Setting], Caller]
    #: What is wrong with what was stored, if anything is: observations, what was written, ends of episodes.
    wrong: Callable[[torch.Tensor, Outputs, torch.Tensor], str | None]
    writes: tuple[str, ...] = ("action",)
    env_id: str = "CartPole-v1"
    frames_per_batch: int | None = None
    #: torchrl keeps a policy's state where the env has a primer for it.
    has_state: bool = False

    def setting(self, num_envs: int, frames_per_batch: int) -> Setting:
        return Setting.rounded_up(self.env_id, num_envs, self.frames_per_batch or frames_per_batch)


# -- how a loop calls it -----------------------------------------------------------------------------------------------


def network_of(policy: Any, setting: Setting) -> Caller:
    """The network of a TensorDictModule, without the TensorDict."""
    return function_itself(policy.module, setting)


def function_itself(function: Callable[..., Any], setting: Setting) -> Caller:
    def call(obs: torch.Tensor, starts: np.ndarray) -> tuple[torch.Tensor, ...]:
        result = function(obs)
        return result if isinstance(result, tuple) else (result,)

    return call


def with_tensordicts(policy: Any, setting: Setting, writes: tuple[str, ...] = ("action", "log_prob")) -> Caller:
    def call(obs: torch.Tensor, starts: np.ndarray) -> tuple[torch.Tensor, ...]:
        result = policy(TensorDict({"observation": obs}, batch_size=obs.shape[:1]))
        return tuple(result[key] for key in writes)

    return call


def with_state(policy: Any, setting: Setting) -> Caller:
    state = {key: torch.zeros(setting.num_envs, 1, zoo.HIDDEN) for key in ("h", "c")}

    def call(obs: torch.Tensor, starts: np.ndarray) -> tuple[torch.Tensor, ...]:
        if starts.any():
            for tensor in state.values():
                tensor[torch.from_numpy(starts)] = 0
        given = dict(state)
        result = policy(TensorDict({"observation": obs, **given}, batch_size=obs.shape[:1]))
        state.update({key: result["next", key] for key in state})
        return result["action"], given["h"], given["c"]

    return call


# -- whether it was done -----------------------------------------------------------------------------------------------


def not_greedy(logits: torch.Tensor, actions: torch.Tensor) -> str | None:
    chosen = logits.gather(-1, actions[..., None])[..., 0]
    if not torch.allclose(chosen, logits.amax(-1), atol=1e-4):  # near ties, rounding may decide
        return "an action is not the greedy one"
    return None


def wrong_greedy(obs: torch.Tensor, outputs: Outputs, ends: torch.Tensor) -> str | None:
    return not_greedy(zoo.mlp(4, 2)(obs), outputs["action"])


def wrong_cnn(obs: torch.Tensor, outputs: Outputs, ends: torch.Tensor) -> str | None:
    network: Any = zoo.cnn().module
    return not_greedy(network.logits(obs), outputs["action"])


def wrong_sample(obs: torch.Tensor, outputs: Outputs, ends: torch.Tensor) -> str | None:
    expected = Categorical(logits=zoo.mlp(4, 2)(obs))
    if not torch.allclose(outputs["log_prob"], expected.log_prob(outputs["action"]), atol=1e-4):
        return "a log-probability is not that of the action"
    if (outputs["action"].float().mean() - expected.probs[..., 1].mean()).abs() > 0.2:  # 1,000 samples: 12 deviations
        return "actions are not drawn from the distribution"
    return None


def wrong_agent(obs: torch.Tensor, outputs: Outputs, ends: torch.Tensor) -> str | None:
    if not torch.allclose(outputs["value"], zoo.mlp(4, 1)(obs), atol=1e-4):
        return "a value is not the critic's"
    return wrong_sample(obs, outputs, ends)


def wrong_lstm(obs: torch.Tensor, outputs: Outputs, ends: torch.Tensor) -> str | None:
    given = {"observation": obs, "h": outputs["h"], "c": outputs["c"]}
    result = zoo.lstm()(TensorDict({key: value.flatten(0, 1) for key, value in given.items()}, [ends.numel()]))
    for key in ("h", "c"):
        expected = result["next", key].unflatten(0, ends.shape)[:-1] * ~ends[:-1, :, None, None]
        if not torch.allclose(outputs[key][1:], expected, atol=1e-4):
            return f"the state {key} is not what the step before has left, or not zero at an episode's start"
    return not_greedy(result["logits"].unflatten(0, ends.shape), outputs["action"])


def wrong_sac(obs: torch.Tensor, outputs: Outputs, ends: torch.Tensor) -> str | None:
    expected = zoo.sac().get_dist(TensorDict({"observation": obs}, obs.shape[:2])).log_prob(outputs["action"])
    if not torch.allclose(outputs["log_prob"], expected, atol=1e-2, rtol=1e-2):
        return "a log-probability is not that of the action"
    return None


_SAMPLED: dict[str, Any] = {"writes": ("action", "log_prob"), "caller": with_tensordicts}
#: By the names of the command line and of the results.
CASES: dict[str, Case] = {
    "sequential": Case("nn.Sequential in a TensorDictModule", zoo.sequential, network_of, wrong_greedy),
    "forward": Case("a forward of its own", zoo.own_forward, network_of, wrong_greedy),
    "function": Case("a function around a module", zoo.function, function_itself, wrong_greedy),
    "agent": Case(
        "an agent as CleanRL writes it", zoo.agent, network_of, wrong_agent, writes=("action", "log_prob", "value")
    ),
    "probabilistic": Case("ProbabilisticTensorDictSequential", zoo.probabilistic, wrong=wrong_sample, **_SAMPLED),
    "actor": Case("torchrl's ProbabilisticActor(MLP)", zoo.probabilistic_actor, wrong=wrong_sample, **_SAMPLED),
    "cnn": Case("a small CNN", zoo.cnn, network_of, wrong_cnn, env_id=zoo.IMAGES, frames_per_batch=200),
    "lstm": Case("torchrl's LSTMModule", zoo.lstm, with_state, wrong_lstm, writes=("action", "h", "c"), has_state=True),
    "sac": Case("SAC's actor (TanhNormal)", zoo.sac, wrong=wrong_sac, env_id="Pendulum-v1", **_SAMPLED),
}


# -- contenders --------------------------------------------------------------------------------------------------------


class PolicyContender(Contender):
    """Also knows what else than the action was written."""

    case: Case

    def written(self) -> dict[str, torch.Tensor]:
        """``[T, E, ...]`` by key."""
        raise NotImplementedError

    def check(self, name: str) -> None:
        """Raise WrongData unless episodes hang together, steps are real and outputs the policy's."""
        data, setting = self.last_batch(), self.batches
        check(name, data, setting, by_network=False)
        obs, ends = torch.from_numpy(np.ascontiguousarray(data.obs)), torch.from_numpy(data.terminated | data.truncated)
        with torch.no_grad():
            problem = self.case.wrong(obs, self.written(), ends)
        require(problem is None, f"{name}, {self.case.title}", setting, problem or "")


class _Collected(PolicyContender, CollectorContender):
    def __init__(self, case: Case, batches: Setting, collector: Any, num_turns: int = 1) -> None:
        CollectorContender.__init__(self, batches, collector, num_turns)
        self.case = case

    def written(self) -> dict[str, torch.Tensor]:
        batch = self._batch.unsqueeze(0) if self._batch.dim() == 1 else self._batch
        return {key: batch[key].transpose(0, 1) for key in self.case.writes}

    def plan(self) -> str:
        return self.collector.policy_plan()


class _CollectedStopped(_Collected, StoppedBetween):
    """torchrl's async workers."""


def make_env(library: str, setting: Setting) -> Any:
    """Integer actions in both libraries: policies give what an env takes."""
    wrapper = import_module(f"{library}.envs").GymWrapper
    return wrapper(setting.make_env(), categorical_action_encoding=True)


def collector(library: str, case: Case, setting: Setting, **options: Any) -> PolicyContender:
    envs, policy = import_module(f"{library}.envs"), case.make()
    make = partial(make_env, library, setting)
    env = make() if setting.num_envs == 1 else envs.SerialEnv(setting.num_envs, make)
    if library == "torchrl":
        options["auto_register_policy_transforms"] = False  # as by default; said, it does not warn
        if case.has_state:
            from torchrl.modules.utils import get_primers_from_module

            env = envs.TransformedEnv(env, get_primers_from_module(policy))
    env.set_seed(ENV_SEED)
    make_collector = import_module(f"{library}.collectors").Collector
    made = make_collector(env, policy, frames_per_batch=setting.frames_per_batch, total_frames=-1, **options)
    return _Collected(case, setting, made)


def multi(library: str, kind: str, case: Case, setting: Setting, **options: Any) -> PolicyContender:
    """``kind`` "Sync": a batch has the same number of steps of every env. "Async": it is one env's."""
    if library == "torchrl":  # its own choice, unless somebody has used multiprocessing before it
        multiprocessing.set_start_method("spawn", force=True)
    is_async = kind == "Async"
    batches = Setting(setting.env_id, 1, setting.frames_per_batch) if is_async else setting
    made = getattr(import_module(f"{library}.collectors"), f"Multi{kind}Collector")(
        [partial(make_env, library, setting)] * setting.num_envs,
        case.make(),
        frames_per_batch=setting.frames_per_batch,
        total_frames=-1,
        **options,
    )
    contender = _CollectedStopped if is_async and library == "torchrl" else _Collected
    return contender(case, batches, made, num_turns=setting.num_envs if is_async else 1)


class PolicyLoop(PolicyContender):
    """``SyncVectorEnv`` (``SAME_STEP``, ``copy=False``); what the policy writes goes to arrays, too."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.case, self.batches = case, setting
        self.frames_per_round = setting.frames_per_batch
        self._call = case.caller(case.make(), setting)
        self._envs = SyncVectorEnv(
            [setting.make_env] * setting.num_envs, copy=False, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self._obs, _ = self._envs.reset(seed=ENV_SEED)
        self._starts = np.ones(setting.num_envs, np.bool_)
        self._stored = Transitions.empty(setting)
        self._more: list[np.ndarray] = []

    def collect(self, frames: int) -> int:
        delivered = 0
        with torch.no_grad():
            while delivered < frames:
                self._collect_batch()
                delivered += self.batches.frames_per_batch
        return delivered

    def _collect_batch(self) -> None:
        stored, envs, call, obs, starts = self._stored, self._envs, self._call, self._obs, self._starts
        for t in range(self.batches.steps_per_batch):
            stored.obs[t] = obs
            action, *more = call(torch.from_numpy(obs), starts)
            if not self._more:
                self._more = [np.empty((len(stored.obs), *value.shape), np.float32) for value in more]
            actions = stored.actions[t] = action.numpy()
            for array, value in zip(self._more, more, strict=True):
                array[t] = value
            obs, stored.rewards[t], stored.terminated[t], stored.truncated[t], infos = envs.step(actions)
            stored.next_obs[t] = obs
            starts = stored.terminated[t] | stored.truncated[t]
            if "final_obs" in infos:
                ended = infos["_final_obs"]
                stored.next_obs[t, ended] = np.stack(infos["final_obs"][ended])
        self._obs, self._starts = obs, starts

    def last_batch(self) -> Transitions:
        return self._stored

    def written(self) -> dict[str, torch.Tensor]:
        arrays = [self._stored.actions, *self._more]
        return dict(zip(self.case.writes, map(torch.from_numpy, arrays), strict=True))

    def close(self) -> None:
        self._envs.close()


#: By the names of the command line and of the results.
CONTENDERS: dict[str, Callable[[Case, Setting], PolicyContender]] = {
    "swath": partial(collector, "swath"),
    "swath-called": partial(collector, "swath", capture_policy=False),
    "torchrl": partial(collector, "torchrl"),
    "sync-vector": PolicyLoop,
}
MULTI_CONTENDERS: dict[str, Callable[[Case, Setting], PolicyContender]] = {
    "swath-sync": partial(multi, "swath", "Sync"),
    "swath-async": partial(multi, "swath", "Async"),
    "torchrl-sync": partial(multi, "torchrl", "Sync"),
    "torchrl-async": partial(multi, "torchrl", "Async"),
}

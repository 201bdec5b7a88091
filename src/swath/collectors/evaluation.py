"""An evaluation: a policy plays the same number of episodes in each env, and what it got is summed up.

Which episodes count is decided before they are played. To take those that end first would count short ones more
often: where a good episode is a long one, the policy would look worse than it is.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from swath.collectors.single import Collector
from swath.data.trajectories import TrajFormat, pad_trajectories
from swath.envs.base import EnvBase
from swath.envs.guest import GuestEnv
from swath.envs.making import make_env
from swath.envs.parallel import CrewEnv
from swath.envs.paths import parts_of
from swath.envs.serial import SerialGymEnv, SerialRowEnv
from swath.insight.publishing import part_of_another
from swath.weight_update.hidden import HiddenWeights

Key = str | tuple[str, ...]
#: By model id ("policy", or a path such as "env.transform[0]"); None: those that are there.
Weights = Mapping[str, Mapping[str, torch.Tensor]] | None

EPISODE_REWARD = ("next", "episode_reward")
STEP_COUNT = ("next", "step_count")
MASK = ("collector", "mask")


@dataclass(frozen=True)
class EvaluationPlan:
    """What is evaluated, and how; see ``Evaluator``."""

    env: Any
    policy: Any
    policy_factory: Callable[..., Any] | None
    num_trajectories: int
    max_steps: int | None
    frames_per_batch: int | None
    collector_cls: type[Collector]
    collector_kwargs: Mapping[str, Any]
    #: Of what ``metrics_fn`` gets.
    traj_format: TrajFormat
    reward_key: Key
    done_key: Key
    device: Any
    exploration_type: InteractionType | None
    metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None
    dump_video: bool


class Interrupted(Exception):
    """An evaluation was told to stop."""


class Evaluation:
    """Env and policy, ready to play; lives where evaluations run.

    Args:
        should_stop: asked after every step.
        has_own_process: whether nobody else in this process could be disturbed. If not, the policy is a copy, and the
            program's random generator is left alone.
    """

    def __init__(self, plan: EvaluationPlan, should_stop: Callable[[], bool], *, has_own_process: bool) -> None:
        self._plan = plan
        self._has_own_process = has_own_process
        self.collection_stopped = should_stop  # what a collector asks its interruptor
        env = make_env(plan.env)
        try:
            freeze_statistics(env)
            self._quotas = episode_quotas(plan.num_trajectories, env.batch_size.numel())
            with part_of_another():
                self._collector = self._make_collector(env)
        except BaseException:
            if env is not plan.env:
                env.close(raise_if_closed=False)
            raise

    def _make_collector(self, env: Any) -> Collector:
        plan = self._plan
        policy = plan.policy if plan.policy_factory is None else call_factory(plan.policy_factory, env)
        if isinstance(policy, nn.Module):
            if not self._has_own_process:
                policy = copy.deepcopy(policy)
            policy.eval()  # before the collector looks at it
        num_envs = len(self._quotas)
        frames_per_batch = plan.frames_per_batch or plan.max_steps or 1000
        return plan.collector_cls(
            env,
            policy,
            frames_per_batch=math.ceil(frames_per_batch / num_envs) * num_envs,
            max_frames_per_traj=plan.max_steps,
            exploration_type=plan.exploration_type,
            device=plan.device,
            interruptor=self,
            **plan.collector_kwargs,
        )

    def run(self, weights: Weights, step: int) -> dict[str, Any]:
        """Play all episodes with these weights; what came out. Videos are of this step.

        Raises:
            Interrupted: it was told to stop.
        """
        if weights:
            if "policy" in weights:
                self._require_own_weights()
            self._collector.update_policy_weights_(weights_dict=weights)
        started = time.perf_counter()
        self._collector.reset()
        episodes, num_frames = self._play()
        seconds = time.perf_counter() - started
        metrics = {**summarise(episodes, self._plan.reward_key), "fps": num_frames / seconds}
        if self._plan.metrics_fn is not None:
            metrics.update(self._plan.metrics_fn(self._together(episodes)))
        if self._plan.dump_video:
            dump_videos(self._collector.env, step)
        return metrics

    def _together(self, episodes: list[TensorDictBase]) -> TensorDictBase:
        if self._plan.traj_format == "cat":
            return torch.cat(episodes)  # type: ignore[arg-type]
        return pad_trajectories(episodes, MASK)

    def models(self, model_id: str) -> list[Any]:
        """What weights of this model go into."""
        return [self._collector.policy] if model_id == "policy" else parts_of(self._collector, model_id)

    def _require_own_weights(self) -> None:
        """What the policy finds by name was not copied with it: weights that are put there would be the trainer's."""
        if self._has_own_process or self._plan.policy is None:
            return
        trained = set(map(id, HiddenWeights(self._plan.policy).tensors.values()))
        for name, tensor in HiddenWeights(self._collector.policy).tensors.items():
            if id(tensor) in trained:
                raise RuntimeError(
                    f"the policy uses {name!r}, which cannot be copied with it, so that an evaluation in this process "
                    "would change the weights that are trained: register the network (self.net = net), or give "
                    "policy_factory and backend='process'"
                )

    def _play(self) -> tuple[list[TensorDictBase], int]:
        ledger = EpisodeLedger(self._quotas, self._plan.done_key)
        num_frames = 0
        while not ledger.is_full:
            batch = self._collector.rollout()
            if self.collection_stopped():
                raise Interrupted
            num_frames += batch.batch_size.numel()
            if self._plan.metrics_fn is None:  # observations may be large
                wanted = [self._plan.reward_key, self._plan.done_key, EPISODE_REWARD, STEP_COUNT]
                batch = batch.select(*wanted, strict=False)
            ledger.add(batch)
        return ledger.episodes(), num_frames

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        """Of the envs and, in a process of its own, of the policy's sampling."""
        if self._has_own_process:
            return self._collector.set_seed(seed, static_seed)
        return self._collector.env.set_seed(seed, static_seed)

    def close(self) -> None:
        self._collector.shutdown(raise_on_error=False)


def call_factory(policy_factory: Callable[..., Any], env: Any) -> Any:
    """With the env, if it has to be given something or calls it so; with nothing, as collectors do, if not.

    >>> call_factory(lambda env: env, "the env"), call_factory(lambda hidden=64: hidden, "the env")
    ('the env', 64)
    """
    try:
        parameters = inspect.signature(policy_factory).parameters.values()
    except ValueError:  # a builtin without a signature
        return policy_factory(env)
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if any(each.name == "env" and each.kind is each.KEYWORD_ONLY for each in parameters):
        return policy_factory(env=env)
    if positional and (positional[0].default is positional[0].empty or positional[0].name == "env"):
        return policy_factory(env)
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if takes_any and not positional and not isinstance(policy_factory, type):  # (a module's __init__ only seems to)
        return policy_factory(env)
    return policy_factory()


def episode_quotas(num_episodes: int, num_envs: int) -> list[int]:
    """How many episodes each env plays.

    >>> episode_quotas(10, 4)
    [3, 3, 2, 2]
    """
    each, more = divmod(num_episodes, num_envs)
    return [each + (env < more) for env in range(num_envs)]


class EpisodeLedger:
    """The first episodes of each env, put together from batches ``[*env.batch_size, T]``; others are not kept."""

    def __init__(self, quotas: list[int], done_key: Key) -> None:
        self._missing = list(quotas)
        self._done_key = done_key
        self._pieces: list[list[TensorDictBase]] = [[] for _ in quotas]
        self._episodes: list[list[TensorDictBase]] = [[] for _ in quotas]

    @property
    def is_full(self) -> bool:
        return not any(self._missing)

    def add(self, batch: TensorDictBase) -> None:
        num_envs, num_steps = len(self._missing), batch.shape[-1]
        rows = batch.reshape(num_envs, num_steps)
        rows.names = None
        done = rows.get(self._done_key).reshape(num_envs, num_steps, -1).any(-1)
        for env, missing in enumerate(self._missing):
            if missing:
                self._add_row(env, rows[env], done[env].nonzero().reshape(-1).tolist()[:missing])

    def _add_row(self, env: int, row: TensorDictBase, ends: list[int]) -> None:
        start = 0
        for end in ends:
            pieces = [*self._pieces[env], row[start : end + 1]]
            self._episodes[env].append(torch.cat(pieces))  # type: ignore[arg-type]
            self._pieces[env] = []
            self._missing[env] -= 1
            start = end + 1
        if self._missing[env] and start < row.shape[0]:
            self._pieces[env].append(row[start:])

    def episodes(self) -> list[TensorDictBase]:
        """Env after env."""
        return [episode for of_env in self._episodes for episode in of_env]


def summarise(episodes: list[TensorDictBase], reward_key: Key) -> dict[str, Any]:
    """Means over episodes. (The deviation is that of these episodes, no estimate for others: 0 for a single one.)"""
    rewards = torch.stack([_episode_reward(episode, reward_key) for episode in episodes])
    lengths = torch.stack([_episode_length(episode) for episode in episodes])
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "num_episodes": len(episodes),
        "episode_length": lengths.mean().item(),
    }


def _episode_reward(episode: TensorDictBase, reward_key: Key) -> torch.Tensor:
    """The env's own account of it, or the sum of rewards; over several agents, their mean."""
    own = episode.get(EPISODE_REWARD, None)
    total = episode.get(reward_key).double().sum(0) if own is None else own[-1].double()
    return total.mean().cpu()


def _episode_length(episode: TensorDictBase) -> torch.Tensor:
    own = episode.get(STEP_COUNT, None)
    return torch.tensor(float(episode.shape[0])).double() if own is None else own[-1].double().mean().cpu()


# -- what is in an env -------------------------------------------------------------------------------------------------


def freeze_statistics(env: EnvBase) -> None:
    """What normalises by what it has seen does not learn from evaluations: it may be the trainer's."""
    for part in _parts(env):
        if hasattr(part, "frozen") and callable(getattr(part, "freeze", None)):
            part.freeze()


def dump_videos(env: EnvBase, step: int) -> None:
    """Let what records videos, transforms or envs, write them; with the step, if they take one."""
    done: list[Any] = []
    for part in _parts(env):
        dump = getattr(part, "dump", None)
        owner = getattr(dump, "__self__", dump)  # an env may pass on what it does not have itself
        if callable(dump) and not any(owner is other for other in done):
            done.append(owner)
            if _takes_step(dump):
                dump(step=step)
            else:
                dump()


def _takes_step(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return False
    return "step" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _parts(env: Any) -> Iterator[Any]:
    """The env, the transforms around it, and those inside of it, as far as they are in this process."""
    if isinstance(env, CrewEnv):  # answers for what is in other processes
        return
    if isinstance(env, GuestEnv):
        env = env.guest
    yield env
    if "transform" in vars(env) or hasattr(type(env), "transform"):
        yield from _transforms(env.transform)
    if isinstance(env, (SerialGymEnv, SerialRowEnv)):
        for child in env.children:
            yield from _parts(child)
    if "base_env" in vars(env) or hasattr(type(env), "base_env"):
        yield from _parts(env.base_env)


def _transforms(transform: Any) -> Iterator[Any]:
    if isinstance(transform, Iterable):
        for each in transform:
            yield from _transforms(each)
    elif transform is not None:
        yield transform


def on_cpu(weights: Weights) -> Weights:
    """For another process."""
    if weights is None:
        return None
    return {model: {name: tensor.cpu() for name, tensor in own.items()} for model, own in weights.items()}

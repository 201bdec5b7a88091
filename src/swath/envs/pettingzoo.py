"""PettingZoo: several agents in one env, parallel or in turns (AEC), on rows.

The agents of a group lie side by side: ``("agent", "observation")`` is ``[n_agents, ...]``. An env has one episode,
that of all its agents; what became of each of them is data, under its group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from swath.envs.gym_spaces import (
    RESERVED_KEYS,
    ActionLeaf,
    ObservationLeaf,
    action_builder,
    action_leaves,
    observation_leaves,
)
from swath.envs.known import import_extra
from swath.envs.rows import WrappingEnv
from swath.errors import EnvDataError, EnvError, did_you_mean
from swath.keys import show
from swath.rollout.strip import Strip
from swath.specs import Categorical, Composite, OneHot, Unbounded, masked_rand

_FLAGS = ("done", "terminated", "truncated")
_LIST = "; see pettingzoo.pprint_registry()"
_ACTION_MASK = ("action_mask",)


def group_by_prefix(agents: Sequence[str]) -> dict[str, list[str]]:
    """Agents whose names differ by the number at their end, together.

    >>> group_by_prefix(["agent_0", "agent_1", "leader"])
    {'agent': ['agent_0', 'agent_1'], 'leader': ['leader']}
    """
    groups: dict[str, list[str]] = {}
    for agent in agents:
        prefix, _, number = str(agent).rpartition("_")
        groups.setdefault(prefix if prefix and number.isdigit() else str(agent), []).append(agent)
    return groups


@dataclass(frozen=True)
class _Group:
    """Agents of the same spaces."""

    name: str
    agents: list[str]
    observations: list[ObservationLeaf]
    actions: list[ActionLeaf]
    build_action: Callable[[list[np.ndarray], int], Any]


class PettingZooWrapper(WrappingEnv):
    """A PettingZoo ``ParallelEnv`` or ``AECEnv`` that you made.

    For each group of agents, ``[n_agents, ...]``: what its observation space says (``observation``, or the entries of a
    Dict), ``action``, ``reward``, ``mask`` (who acts in this step) and the agents' own ``done``, ``terminated`` and
    ``truncated``; an ``action_mask`` in the observation is bool. An agent that is not there (any more) has zeros. The
    episode is done when no agent is left: terminated if all agents were, else truncated.

    A ``ParallelEnv`` lets all agents act in every step. An ``AECEnv`` is stepped turn by turn: ``mask`` has the one
    agent whose turn it is, the actions of others are ignored, and each agent's reward is what that turn gave it. An
    agent that is done takes no turn.

    Args:
        env: the env.
        categorical_action_encoding: discrete actions as integers instead of one-hot vectors.
        group_map: the agents of each group; by default those whose names share a prefix ("agent_0", "agent_1").

    >>> env = PettingZooWrapper(simple_spread_v3.parallel_env())  # doctest: +SKIP
    >>> env.rollout(3)["agent", "observation"].shape  # doctest: +SKIP
    torch.Size([3, 3, 18])
    """

    def __init__(
        self,
        env: Any,
        categorical_action_encoding: bool = False,
        *,
        group_map: Mapping[str, Sequence[str]] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not hasattr(env, "possible_agents"):
            raise TypeError(f"PettingZooWrapper takes a ParallelEnv or an AECEnv, got {type(env).__name__}")
        super().__init__(device=device)
        self.env = env
        self.game: _ParallelGame | _TurnGame = _TurnGame(env) if hasattr(env, "agent_iter") else _ParallelGame(env)
        self.pending_seed: int | None = None
        agents = list(env.possible_agents)
        self.group_map = {
            name: list(own) for name, own in (group_by_prefix(agents) if group_map is None else group_map).items()
        }
        self._check_groups(agents)
        self.groups = [self._make_group(name, own, categorical_action_encoding) for name, own in self.group_map.items()]
        observation, action, reward = Composite(), Composite(), Composite()
        for group in self.groups:
            n = len(group.agents)
            for leaf in group.observations:
                spec = leaf.spec.expand((n, *leaf.spec.shape))
                if leaf.key == _ACTION_MASK:
                    spec = Categorical(2, spec.shape, torch.bool)
                observation[group.name, *leaf.key] = spec
            observation[group.name, "mask"] = Categorical(2, (n,), torch.bool)
            for flag in _FLAGS:
                observation[group.name, flag] = Categorical(2, (n, 1), torch.bool)
            for leaf in group.actions:
                action[group.name, *leaf.key] = leaf.spec.expand((n, *leaf.spec.shape))
            reward[group.name, "reward"] = Unbounded((n, 1))
        self.observation_spec = observation
        self.full_action_spec = action
        self.full_reward_spec = reward

    def _check_groups(self, agents: list[str]) -> None:
        grouped = [agent for own in self.group_map.values() for agent in own]
        if sorted(map(str, grouped)) != sorted(map(str, agents)):
            raise ValueError(f"{self}: group_map must have each agent once; it has {grouped}, the agents are {agents}")
        for name, own in self.group_map.items():
            if name in RESERVED_KEYS:
                raise ValueError(
                    f"{self}: the group {name!r} has the name of something else in the data; give another group_map"
                )
            first = own[0]
            for agent in own:
                for kind in ("observation_space", "action_space"):
                    mine, theirs = getattr(self.env, kind)(agent), getattr(self.env, kind)(first)
                    if mine != theirs:
                        raise EnvError(
                            f"{self}: {agent!r} and {first!r} are both in group {name!r}, but their {kind}s differ: "
                            f"{mine} against {theirs}; put them into different groups: group_map={{name: [agents]}}"
                        )

    def _make_group(self, name: str, agents: list[str], categorical: bool) -> _Group:
        observation_space: spaces.Space = self.env.observation_space(agents[0])
        action_space: spaces.Space = self.env.action_space(agents[0])
        observations = observation_leaves(observation_space, categorical)
        for leaf in observations:
            if leaf.key[0] == "mask":
                raise ValueError(f"{self}: the observation has an entry 'mask', which says who acts; rename it")
        actions = action_leaves(action_space, categorical)
        return _Group(name, agents, observations, actions, action_builder(action_space))

    def bind_rows(self, strip: Strip) -> PettingZooStepper:
        return PettingZooStepper(self, strip)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions, for each agent among those that its ``action_mask`` allows."""
        tensordict = super().rand_action(tensordict)
        for group in self.group_map:
            mask, spec = tensordict.get((group, "action_mask"), None), self.full_action_spec.get((group, "action"))
            if mask is not None and isinstance(spec, (OneHot, Categorical)):
                # Who may do nothing does not act: whatever is drawn is ignored.
                allowed = mask | ~mask.any(-1, keepdim=True)
                tensordict.set((group, "action"), masked_rand(spec, allowed))
        return tensordict

    def _set_seed(self, seed: int) -> None:
        self.pending_seed = seed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env})"


class PettingZooEnv(PettingZooWrapper):
    """A PettingZoo env by its id (see ``pettingzoo.pprint_registry()``; ``mpe/...`` are those of the package mpe2).

    Args:
        task: such as "butterfly/pistonball_v6" or "mpe/simple_spread_v3".
        parallel: the env's parallel form; False for its AEC form.

    Other keywords go to the function that makes the env.

    >>> PettingZooEnv("mpe/simple_spread_v3", N=2).rollout(3)["agent", "action"].shape  # doctest: +SKIP
    torch.Size([3, 2, 5])
    """

    def __init__(
        self,
        task: str,
        parallel: bool = True,
        categorical_action_encoding: bool = False,
        *,
        group_map: Mapping[str, Sequence[str]] | None = None,
        device: torch.device | str | None = None,
        **make_kwargs: Any,
    ) -> None:
        env = _make(task, parallel, **make_kwargs)
        super().__init__(env, categorical_action_encoding, group_map=group_map, device=device)
        self.task = task


def _make(task: str, parallel: bool, **kwargs: Any) -> Any:
    who = f"PettingZooEnv({task!r})"
    pettingzoo = import_extra("pettingzoo", "pettingzoo", who)
    namespace, _, name = task.partition("/")
    if namespace == "mpe":
        package = import_extra("mpe2", "pettingzoo", who)
        try:
            module = importlib.import_module(f"mpe2.{name}")
        except ModuleNotFoundError:
            known = importlib.import_module("mpe2.all_modules").mpe_environments
            raise ValueError(f"{package.__name__} has no env {task!r}{did_you_mean(task, known, _LIST)}") from None
        return (module.parallel_env if parallel else module.env)(**kwargs)
    kind, other = ("parallel", "aec") if parallel else ("aec", "parallel")
    registries = {"parallel": pettingzoo.parallel_registry, "aec": pettingzoo.aec_registry}
    # Its ids are written with a hyphen before the version, its modules with an underscore; it takes both.
    known = {registered.replace("-v", "_v") for registered in registries[kind]}
    if task.replace("-v", "_v") not in known:
        if task.replace("-v", "_v") in {registered.replace("-v", "_v") for registered in registries[other]}:
            raise ValueError(f"{task!r} has no {kind} form; give parallel={not parallel}")
        raise ValueError(f"PettingZoo has no env {task!r}{did_you_mean(task, known, _LIST)}")
    return pettingzoo.make(kind, task, **kwargs)


@dataclass
class _Outcome:
    """What a step gave to each agent that was there."""

    observations: dict[str, Any]
    rewards: dict[str, Any]
    terminated: dict[str, bool]
    truncated: dict[str, bool]


class _ParallelGame:
    """A ``ParallelEnv``: all agents that are left act in each step."""

    def __init__(self, env: Any) -> None:
        self._env = env
        #: Agents whose action the next step takes; none when the episode is over.
        self.acting: list[str] = []

    def reset(self, **kwargs: Any) -> dict[str, Any]:
        observations, _ = self._env.reset(**kwargs)
        self.acting = list(self._env.agents)
        return observations

    def step(self, actions: dict[str, Any]) -> _Outcome:
        observations, rewards, terminated, truncated, _ = self._env.step(actions)
        self.acting = [agent for agent in self._env.agents if not (terminated[agent] or truncated[agent])]
        return _Outcome(observations, rewards, terminated, truncated)


class _TurnGame:
    """An ``AECEnv``: one agent acts in each step."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.acting: list[str] = []

    def reset(self, **kwargs: Any) -> dict[str, Any]:
        self._env.reset(**kwargs)
        observations = self._observe()
        self._pass_dead_agents()
        return observations

    def step(self, actions: dict[str, Any]) -> _Outcome:
        env = self._env
        env.step(actions[env.agent_selection])
        # Before dead agents are passed over, which removes them from all of these.
        outcome = _Outcome(self._observe(), dict(env.rewards), dict(env.terminations), dict(env.truncations))
        self._pass_dead_agents()
        return outcome

    def _observe(self) -> dict[str, Any]:
        return {agent: self._env.observe(agent) for agent in self._env.agents}

    def _pass_dead_agents(self) -> None:
        env = self._env
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        self.acting = [env.agent_selection] if env.agents else []


class PettingZooStepper:
    """``PettingZooWrapper`` bound to a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: PettingZooWrapper, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._places = [_GroupRows(group, strip) for group in env.groups]
        self._place_of = {agent: (rows, i) for rows in self._places for i, agent in enumerate(rows.group.agents)}

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        seed, self._env.pending_seed = self._env.pending_seed, None
        if seed is not None:
            kwargs["seed"] = seed
        observations = self._env.game.reset(**kwargs)
        for rows in self._places:
            rows.clear(row)
        self._write(row, observations)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        game = self._env.game
        if not game.acting:
            raise EnvError(f"{self._env}: its episode is over; reset it first")
        actions = {}
        for agent in game.acting:
            rows, i = self._place_of[agent]
            actions[agent] = rows.action(t, i)
        outcome = game.step(actions)
        for rows in self._places:
            rows.go_on(t)
        for agent, reward in outcome.rewards.items():
            rows, i = self._place_of[agent]
            rows.rewards[t, 0, i, 0] = reward
        for agent in outcome.terminated:
            rows, i = self._place_of[agent]
            rows.mark(t + 1, i, outcome.terminated[agent], outcome.truncated[agent])
        self._write(t + 1, outcome.observations)
        if game.acting:
            return None
        self._end(t)
        return [0]

    def _write(self, row: int, observations: dict[str, Any]) -> None:
        for agent, observation in observations.items():
            rows, i = self._place_of[agent]
            try:
                rows.write(row, i, observation)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EnvDataError(f"{self._env}: agent {agent!r}: {error}") from error
        for agent in self._env.game.acting:
            rows, i = self._place_of[agent]
            rows.mask[row, 0, i] = True

    def _end(self, t: int) -> None:
        """The episode's flags: terminated if every agent that took part was, else truncated."""
        flags = {
            flag: np.concatenate([rows.flags[flag][t + 1, 0].reshape(-1) for rows in self._places]) for flag in _FLAGS
        }
        took_part = flags["done"]
        terminated = bool(took_part.any() and flags["terminated"][took_part].all())
        self._strip.terminated[t, 0] = terminated
        self._strip.truncated[t, 0] = bool(flags["truncated"].any()) or not terminated


class _GroupRows:
    """A group's columns; an agent's entries are ``[row, 0, i]``."""

    def __init__(self, group: _Group, strip: Strip) -> None:
        def carried(*key: str) -> np.ndarray:
            return strip.carried[group.name, *key].in_numpy

        self.group = group
        self.observations = [(leaf, carried(*leaf.key)) for leaf in group.observations]
        self.mask = carried("mask")
        self.flags = {flag: carried(flag) for flag in _FLAGS}
        self.rewards = strip.outcomes[group.name, "reward"].in_numpy
        self._actions = [(leaf.decode, strip.outputs[group.name, *leaf.key].in_numpy) for leaf in group.actions]

    def action(self, t: int, i: int) -> Any:
        return self.group.build_action([decode(array[t, 0, i : i + 1]) for decode, array in self._actions], 0)

    def clear(self, row: int) -> None:
        """Nobody is there, and nobody is done."""
        for _, array in self.observations:
            array[row] = 0
        self.mask[row] = False
        for array in self.flags.values():
            array[row] = False

    def go_on(self, t: int) -> None:
        """After step t nobody is there yet; who was done before still is."""
        self.clear(t + 1)
        for array in self.flags.values():
            array[t + 1] = array[t]
        self.rewards[t] = 0

    def mark(self, row: int, i: int, terminated: bool, truncated: bool) -> None:
        self.flags["terminated"][row, 0, i] |= bool(terminated)
        self.flags["truncated"][row, 0, i] |= bool(truncated)
        self.flags["done"][row, 0, i] |= bool(terminated or truncated)

    def write(self, row: int, i: int, observation: Any) -> None:
        for leaf, array in self.observations:
            value = np.asarray(leaf.pick(observation))
            if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
                assert leaf.prepare is not None
                value = leaf.prepare(value).reshape(array.shape[3:])
            elif leaf.key == _ACTION_MASK:
                value = value.astype(np.bool_)
            if value.shape != array.shape[3:] or not np.can_cast(value.dtype, array.dtype, "same_kind"):
                raise ValueError(
                    f"observation {show(leaf.key)} has shape {value.shape} and dtype {value.dtype}, its space says "
                    f"{array.shape[3:]} and {array.dtype}"
                )
            array[row, 0, i] = value


__all__ = ["PettingZooEnv", "PettingZooWrapper", "group_by_prefix"]

"""CollectorHost: the collectors of one worker or node, as who owns them asks for things. No pipes, blocks or payloads.

A host has one or more lanes. A lane is a ``Collector`` and the members (envs, as the owner counts them) that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from swath.envs.base import EnvBase
from swath.envs.paths import is_in_env, parts_of_env
from swath.errors import StateMismatch
from swath.paths import resolve_path
from swath.process.seeding import derived_seed, seed_process
from swath.rollout.boundaries import TrajectoryIds
from swath.rollout.control import Control
from swath.rollout.structure import Objects
from swath.states import numbered

if TYPE_CHECKING:  # the class comes from above: the spec of a worker brings it
    from swath.collectors.runner import Runner
    from swath.collectors.single import Collector


@dataclass
class Lane:
    """A collector, and the members of this host that it serves."""

    collector: Collector
    members: range
    ids: TrajectoryIds
    fragments_told: set[int] = field(default_factory=set)

    @property
    def runner(self) -> Runner:
        return self.collector.runner

    @property
    def num_envs(self) -> int:
        return self.collector.env.batch_size.numel()

    @property
    def objects(self) -> Objects:
        return self.collector.env.objects

    def first_env(self) -> EnvBase:
        env = self.collector.env
        return env.children[0] if len(self.members) > 1 else env

    def rows_of(self, members: Sequence[int]) -> list[int]:
        """Which of its envs are these members'."""
        each = self.num_envs // len(self.members)
        return [row for row in range(self.num_envs) if self.members[row // each] in members]


class CollectorHost:
    """Runs collectors, and answers: between two batches, but for weights, which come between two steps.

    Args:
        number: of the worker, or of the node.
        lanes: all alike, but for their members.
        envs: as they were made; several may share a lane.
        control: of all lanes' rollouts.
    """

    def __init__(self, number: int, lanes: list[Lane], envs: Sequence[EnvBase], control: Control) -> None:
        self.number = number
        self.lanes = lanes
        self._envs = envs
        self._control = control

    @property
    def _collectors(self) -> Iterator[Collector]:
        return (lane.collector for lane in self.lanes)

    @property
    def first(self) -> Collector:
        """Of what is the same in all of them."""
        return self.lanes[0].collector

    @property
    def num_envs(self) -> int:
        return sum(lane.num_envs for lane in self.lanes)

    @property
    def has_weights(self) -> bool:
        return isinstance(self.first.policy, torch.nn.Module)

    # -- weights ---------------------------------------------------------------------------------------------------

    def get_models(self, model_id: str) -> list[Any]:
        """The modules behind an id: "policy", or a path such as "env.transform[0]" in every collector."""
        if model_id == "policy":
            return list({id(each.policy): each.policy for each in self._collectors}.values())
        if model_id.startswith("env."):  # of each env by itself, also where several share a lane
            return [part for env in self._envs for part in parts_of_env(env, model_id)]
        return [resolve_path(each, model_id) for each in self._collectors]

    @property
    def policy_version(self) -> int:
        return self.first.runner.policy_version

    def weights_applied(self, model_id: str, version: int | None) -> None:
        """A model has other weights: what follows is of this version, or of the next."""
        control = self._control
        control.policy_version = control.policy_version + 1 if version is None else version
        for lane in self.lanes:
            lane.runner.policy_version = control.policy_version
            if model_id.startswith("env."):
                lane.runner.env_was_changed()

    # -- episodes --------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        following: int | None = seed
        for lane in self.lanes:
            following = lane.collector.set_seed(seed, static_seed)
            # Envs may be alike where that was asked for; what hosts draw by themselves may not.
            lane.runner.seed_random(derived_seed(seed, lane.members.start))
            seed = seed if following is None else following
        seed_process(seed, self.number)
        return following

    def reset(self, **kwargs: Any) -> None:
        """Start anew, in all envs."""
        for each in self._collectors:
            each.reset(**kwargs)

    def reset_members(self, members: Sequence[int], **kwargs: Any) -> list[int]:
        """Start anew in these; the ids of the trajectories that are cut by it."""
        cut: list[int] = []
        for lane in self.lanes:
            rows = lane.rows_of(members)
            if rows:
                cut += lane.runner.trajectories_of(rows)
                lane.collector.reset(None if len(rows) == lane.num_envs else rows, **kwargs)
        return cut

    def give_up(self) -> None:
        """Frames were collected that nobody got: the episodes that they are of do not go on."""
        for lane in self.lanes:
            lane.runner.give_up()

    def begin_ids_at(self, first: int) -> None:
        """Draw no trajectory id below this any more."""
        for lane in self.lanes:
            lane.runner.begin_ids_at(first)

    @property
    def next_id(self) -> int:
        """No trajectory has this id yet, or a higher one."""
        return max(lane.ids.next_id for lane in self.lanes)

    def new_fragments(self) -> list[int]:
        """Ids of trajectories that are no whole episodes; each is told once."""
        fragments: list[int] = []
        for lane in self.lanes:
            new = lane.runner.fragments - lane.fragments_told
            lane.fragments_told |= new
            fragments += new
        return fragments

    @property
    def seconds(self) -> tuple[float, float]:
        """What envs and policies took, of the steps that were timed."""
        each = [lane.runner.seconds for lane in self.lanes]
        return sum(env_s for env_s, _ in each), sum(policy_s for _, policy_s in each)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        states = [each.state_dict() for each in self._collectors]
        return states[0] if len(states) == 1 else {f"lane{i}": state for i, state in enumerate(states)}

    def check_state(self, state: Any, strict: bool) -> None:
        """Raise what ``load_state_dict`` would raise, and change nothing."""
        for lane, own in zip(self.lanes, self._by_lane(state), strict=True):
            lane.runner.check_state(own, strict)

    def _by_lane(self, state: Any) -> list[Any]:
        if len(self.lanes) == 1:
            return [state]
        names = numbered(state, "lane")
        if len(names) != len(self.lanes):
            raise StateMismatch(
                f"load_state_dict was given a worker's state of {len(names) or 1} batches of envs, and worker "
                f"{self.number} has {len(self.lanes)}; make the collector with the same envs and num_workers"
            )
        return [state[name] for name in names]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        for each, own in zip(self._collectors, self._by_lane(state), strict=True):
            each.load_state_dict(own, strict)
        self._control.policy_version = self.policy_version

    # -- looking into it -------------------------------------------------------------------------------------------

    def getattr_env(self, name: str) -> Any:
        return getattr(self.lanes[0].first_env(), name)

    def getattr_policy(self, name: str) -> Any:
        return getattr(self.first.policy, name)

    def get_distant_attr(self, path: str) -> list[Any]:
        """For whom this is one of several places: the answer in a list; of several lanes' envs, it is a list."""
        if not is_in_env(path) or len(self.lanes) == 1:
            return [self.first.get_distant_attr(path)]
        return [[each.get_distant_attr(path) for each in self._collectors]]

    def cascade_execute(self, path: str, *args: Any, **kwargs: Any) -> Any:
        results = [each.cascade_execute(path, *args, **kwargs) for each in self._collectors]
        return results[0] if len(results) == 1 else results

    def close(self, timeout_s: float | None = None) -> None:
        for each in self._collectors:
            each.shutdown(timeout_s, raise_on_error=False)

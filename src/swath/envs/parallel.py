"""ParallelEnv: envs in worker processes, stepped together, as one batched env.

The rows of a step are written by the workers, in shared memory; here they are only put side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from swath import platforms
from swath.copying import NotCopied
from swath.envs.making import OF_BUFFERS, MakesInThreads, make_env_beside, refuse_unknown, resolve_factories
from swath.envs.rows import RowEnv, specs_of_all
from swath.envs.serial import side_by_side
from swath.errors import EnvClosed, EnvError
from swath.keys import show
from swath.paths import Parts
from swath.process.start import check_start_method
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Layout
from swath.rollout.strip import Strip
from swath.states import count, mismatch, numbered
from swath.stepping.env_crew import EnvCrew, Group
from swath.stepping.env_hosts import ProcessHosts
from swath.stepping.shared_steps import BUSY, ENDED, FAILED, RESET, STEP, STEP_AND_RESET, SharedSteps
from swath.workers.layout import WorkerLayout, available_cores
from swath.workers.pool import WorkerPool

#: Arguments of the reference whose only sensible value here is what always happens.
_MEANINGLESS = (*OF_BUFFERS, "non_blocking", "consolidate")


def make_crew(
    factories: Sequence[Any], kwargs: Sequence[Mapping[str, Any]], num_workers: int, start_method: Any, **options: Any
) -> EnvCrew:
    """Envs, side by side in so many workers."""
    layout, method = WorkerLayout.spread(len(factories), num_workers), check_start_method(start_method)
    make_env = MakesInThreads() if options.get("threads") else make_env_beside
    return EnvCrew(factories, kwargs, layout, make_env=make_env, join=side_by_side, method=method, **options)


class CrewEnv(NotCopied, RowEnv):
    """What ``ParallelEnv`` and ``AsyncEnvPool`` have in common: envs elsewhere, of which this one tells."""

    _owns = "workers of its own"
    _instead_of_a_copy = "give the function that makes it, or make another one with the same arguments"

    def __init__(
        self, crew: EnvCrew, device: torch.device | str | None = None, envs_per_group: int | None = None
    ) -> None:
        self._crew = crew
        #: None: all envs of a worker are stepped together.
        self._envs_per_group = envs_per_group
        about = crew.about
        num_envs = crew.worker_layout.num_members
        super().__init__(batch_size=(num_envs, *about.env_size), device=device if device is not None else about.device)
        self.full_specs = specs_of_all(about.specs, num_envs)
        if self.device is not None:
            self.full_specs = {kind: spec.to(self.device) for kind, spec in self.full_specs.items()}

    is_given_actions_only = True

    @property
    def crew(self) -> EnvCrew:
        """Who steps the envs."""
        return self._crew

    def row_layout(self) -> Layout:
        structure = self._crew.about.layout.structure
        if structure is not None and structure.has_objects:
            raise EnvError(
                f"{show(min(structure.things))} is no tensor of a fixed shape, which envs of a {type(self).__name__} "
                "cannot give; use a Collector or a MultiCollector, without it"
            )
        return self.layout_around(self._crew.about.layout)

    @property
    def num_envs(self) -> int:
        return self._crew.worker_layout.num_members

    @property
    def num_workers(self) -> int:
        """As many as there are envs, for users of the reference; see ``num_processes``."""
        return self.num_envs

    @property
    def num_processes(self) -> int:
        return self._crew.worker_layout.num_workers

    @property
    def worker_pools(self) -> Sequence[WorkerPool]:  # type: ignore[override]
        hosts = self._crew.hosts
        return [hosts.workers] if isinstance(hosts, ProcessHosts) else []

    @property
    def num_busy_processes(self) -> int:
        """Processes that need a core while envs are stepped."""
        return self.num_processes if isinstance(self._crew.hosts, ProcessHosts) else 0

    @property
    def resets_single_envs(self) -> bool:
        return self._crew.about.resets_single_envs

    @property
    def steps_stay_in_episodes(self) -> bool:  # type: ignore[override]
        return self._crew.about.steps_stay_in_episodes

    def __getattr__(self, name: str) -> Any:
        """An attribute of every env, as a list; a method calls every env's and returns a list."""
        if name.startswith("_") or "_crew" not in self.__dict__ or self.__dict__.get("is_closed", True):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.at_each([name], name)

    def at_each(self, parts: Parts, path: str) -> Any:
        """What a path leads to in each env (``swath/paths.py``): values as a list, or a function that calls each."""
        self._assert_open()
        found = self._crew.hosts.call("child_attributes", parts, path)
        if all(is_method for is_method, _ in found):

            def call(*args: Any, **kwargs: Any) -> list[Any]:
                self._assert_open()
                results = self._crew.hosts.call("call_children", parts, path, args, kwargs)
                return [result for of_worker in results for result in of_worker]

            return call
        return [value for _, values in found for value in values]

    def __len__(self) -> int:
        return self.num_envs

    def update_kwargs(self, kwargs: Any) -> None:
        name = type(self).__name__
        raise EnvError(f"the envs of a {name} are made at once; give create_env_kwargs to {name} instead")

    def bind_rows(self, strip: Strip) -> Stepper:
        return ParallelStepper(self, self._crew, strip, self._envs_per_group)

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        """Seed every env; each seed follows from the one before. Returns the one for the next env."""
        self._assert_open()
        self._crew.reset_ahead.clear()  # those resets were made without it
        for worker in range(self.num_processes):
            if seed is not None:
                (seed,) = self._crew.hosts.call("set_seed", int(seed), static_seed, workers=[worker])
        return seed

    def state_dict(self) -> dict[str, Any]:
        self._assert_open()
        return {f"worker{i}": state for i, state in enumerate(self._crew.hosts.call("state_dict"))}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """As many workers as the state is of; one that it is not of is an error, and nothing is changed."""
        self.check_state_dict(state_dict, strict)
        self._crew.reset_ahead.clear()
        self._give_workers("load_state_dict", state_dict, strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        # Where the envs are, in one go: they may be in a step that resets them.
        self._assert_open()
        if strict and len(numbered(state_dict, "worker")) != self.num_processes:
            expected = f"the state of envs in {count(self.num_processes, 'worker')} (strict=False takes what fits)"
            raise mismatch(type(self).__name__, state_dict, expected)
        self._give_workers("check_state_dict", state_dict, strict)

    def _give_workers(self, method: str, state_dict: dict[str, Any], strict: bool) -> None:
        for worker in range(self.num_processes):
            if f"worker{worker}" in state_dict:
                self._crew.hosts.call(method, state_dict[f"worker{worker}"], strict, workers=[worker])

    def _close(self) -> None:
        self._crew.shutdown()

    def __del__(self) -> None:
        if not self.__dict__.get("is_closed", True):
            self.close(raise_if_closed=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._crew.about.env}, {self._crew.worker_layout}, device={self.device})"


class ParallelEnv(CrewEnv):
    """``num_envs`` envs in worker processes as one env of batch size ``(num_envs, *child)``.

    Args:
        num_envs: how many envs.
        create_env_fn: a function that makes one (or its Gymnasium id), or one for each env.
        num_workers: how many processes; by default as many as envs, but no more than cores. Envs that share a process
            step one after the other.
        create_env_kwargs: for the functions; one mapping, or one for each env.
        device: where data goes; None for where the envs say.
        num_sub_threads: threads of torch in each process.
        serial_for_single: make a ``SerialEnv`` where there is only one env.
        mp_start_method: "forkserver" (default), "spawn" or "fork".
        step_timeout_s: raise ``WorkerHangs`` if a step takes longer.

    Raises:
        WorkerDied: a process was killed, or left.

    >>> from swath.envs import GymEnv
    >>> env = ParallelEnv(4, lambda: GymEnv("CartPole-v1"), num_workers=2)
    >>> env.rollout(5, break_when_any_done=False)["observation"].shape
    torch.Size([4, 5, 4])
    >>> env.close()
    """

    def __new__(cls, num_envs: int | None = None, create_env_fn: Any = None, **kwargs: Any) -> Any:
        count = num_envs if num_envs is not None else kwargs.get("num_workers")
        if kwargs.get("serial_for_single") and count == 1:
            from swath.envs.serial import SerialEnv

            return SerialEnv(1, create_env_fn, create_env_kwargs=kwargs.get("create_env_kwargs"))
        return super().__new__(cls)

    def __init__(
        self,
        num_envs: int | None = None,
        create_env_fn: Callable[..., Any] | str | Sequence[Any] | None = None,
        *,
        num_workers: int | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        mp_start_method: str | None = None,
        step_timeout_s: float | None = None,
        **others: Any,
    ) -> None:
        self.is_closed = True  # until there is something to close
        if num_envs is None:  # as the reference calls it
            num_envs, num_workers = num_workers, None
        if create_env_fn is None or num_envs is None:
            raise TypeError("ParallelEnv needs a number of envs and create_env_fn: ParallelEnv(4, make_env)")
        refuse_unknown(ParallelEnv, others, _MEANINGLESS)
        factories, kwargs = resolve_factories("ParallelEnv", num_envs, create_env_fn, create_env_kwargs)
        if num_workers is not None and not 1 <= num_workers <= num_envs:
            raise ValueError(f"ParallelEnv: num_workers={num_workers} for {num_envs} envs; give 1 to {num_envs}")
        platforms.require(
            type(self).__name__,
            platforms.STEPPING_WORKERS,
            "use a SerialEnv, or an AsyncEnvPool with backend='threading'",
        )
        processes = min(num_envs, available_cores()) if num_workers is None else num_workers
        options = {"step_timeout_s": step_timeout_s, "num_threads": num_sub_threads}
        super().__init__(make_crew(factories, kwargs, processes, mp_start_method, **options), device)


class _Part:
    """One group's envs in the rows of a strip: what is copied where."""

    def __init__(self, strip: Strip, stage: SharedSteps, group: Group) -> None:
        layout = replace(stage.plan.layout, batch_size=torch.Size([len(group.rows)]))
        own = self.own = stage.strip.part(group.local, layout)
        self.group = group.number
        self.worker = group.worker
        self.first = group.rows.start
        self.stop = group.rows.stop
        #: From the number of a row among all to that among its worker's.
        self.shift = group.local.start - group.rows.start

        def pairs(mine: Mapping, theirs: Mapping) -> list[tuple[Any, Any]]:
            """The memory of the strip and of the stage; as NumPy sees it, where it does."""
            both = [(mine[key], column) for key, column in theirs.items()]
            return [
                (a.array, b.array) if a.array is not None and b.array is not None else (a.tensor, b.tensor)
                for a, b in both
            ]

        self.actions = [(ours, theirs[0]) for ours, theirs in pairs(strip.outputs, own.outputs)]
        self.carried = [(ours, theirs[0], theirs[1]) for ours, theirs in pairs(strip.carried, own.carried)]
        self.outcomes = [(ours, theirs[0]) for ours, theirs in pairs(strip.outcomes, own.outcomes)]
        self.last = [
            (ours, column.tensor[0] if isinstance(ours, torch.Tensor) else column.in_numpy[0])
            for (ours, _, _), column in zip(self.carried, [c.part(group.local) for c in stage.last], strict=True)
        ]

    def copy_first(self, row: int, env_ids: list[int], theirs: int) -> None:
        """First observations, from row ``theirs`` of the stage."""
        local = [env_id - self.first for env_id in env_ids]
        for ours, before, after in self.carried:
            ours[row, env_ids] = (before, after)[theirs][local]


class ParallelStepper:
    """The envs of a ``ParallelEnv`` on the rows of a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: CrewEnv, crew: EnvCrew, strip: Strip, envs_per_group: int | None) -> None:
        self._env = env
        self._envs_per_group = envs_per_group
        self._crew = crew
        self._strip = strip
        self._actions = {key: column.field for key, column in strip.outputs.items()}
        self._generation = -1
        self._operation = STEP
        self._bind()

    def _bind(self) -> None:
        crew = self._crew
        crew.lay_out(1, self._actions, self._envs_per_group)
        self._generation = crew.generation
        self._parts = [_Part(self._strip, crew.stages[group.worker], group) for group in crew.groups]

    def expect_resets(self) -> None:
        """Whoever steps will always reset the envs that are done: their workers can do it at once."""
        self._operation = STEP_AND_RESET

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        if self._generation != self._crew.generation:
            self._bind()
        if env_ids is not None:
            return self._step_some(t, env_ids)
        crew, operation = self._crew, self._operation
        self._let_finish()
        for part in self._parts:
            first, stop = part.first, part.stop
            for ours, theirs in part.actions:
                theirs[...] = ours[t, first:stop]
            crew.order(part.group, operation, 0)
        self._await_all()
        outcomes = crew.outcomes
        ended: list[int] | None = None
        for part in self._parts:
            outcome = outcomes[part.group]
            if outcome == FAILED:
                self._fail()
            first, stop = part.first, part.stop
            for ours, _, theirs in part.carried:
                ours[t + 1, first:stop] = theirs
            for ours, theirs in part.outcomes:
                ours[t, first:stop] = theirs
            if outcome == ENDED:
                ended = [*(ended or ()), *self._end(part, t)]
        return ended

    def _let_finish(self) -> None:
        """A step that was interrupted (Ctrl-C) goes on: what comes of it must not be taken for the next order's."""
        for part in self._parts:
            if self._crew.outcomes[part.group] == BUSY:
                self._crew.drain()
                return

    def _await_all(self) -> None:
        crew = self._crew
        for _ in self._parts:
            crew.wait()
        for part in self._parts:  # a wait that was interrupted (Ctrl-C) has left posts behind
            while crew.outcomes[part.group] == BUSY:
                crew.wait()

    def _end(self, part: _Part, t: int) -> list[int]:
        """Take over flags; where the envs were reset already, their last observations."""
        own = part.own
        over = (own.terminated[0] | own.truncated[0]).nonzero()[0].tolist()
        ended = [part.first + env for env in over]
        self._strip.terminated[t, ended] = own.terminated[0, over]
        self._strip.truncated[t, ended] = own.truncated[0, over]
        own.terminated[:] = False
        own.truncated[:] = False
        if self._operation == STEP_AND_RESET:
            for ours, last in part.last:
                ours[t + 1, ended] = last[over]
            self._crew.reset_ahead.update(ended)
        return ended

    def _forget_ends(self) -> None:
        for part in self._parts:
            part.own.terminated[:] = False
            part.own.truncated[:] = False

    def _fail(self) -> None:
        self._forget_ends()
        self._crew.reset_ahead.clear()
        self._crew.raise_failures()

    def _step_some(self, t: int, env_ids: list[int]) -> list[int] | None:
        ended: list[int] = []
        for part in self._parts:
            mine = [env_id for env_id in env_ids if part.first <= env_id < part.stop]
            if not mine:
                continue
            local = [env_id - part.first for env_id in mine]
            for ours, theirs in part.actions:
                theirs[...] = ours[t, part.first : part.stop]
            self._crew.hosts.call("step", 0, [env_id + part.shift for env_id in mine], workers=[part.worker])
            own = part.own
            for ours, _, theirs in part.carried:
                ours[t + 1, mine] = theirs[local]
            for ours, theirs in part.outcomes:
                ours[t, mine] = theirs[local]
            ended += self._end_some(own, t, part.first, local)
        return ended or None

    def _end_some(self, own: Strip, t: int, first: int, local: list[int]) -> list[int]:
        over = [env for env in local if own.terminated[0, env] or own.truncated[0, env]]
        ended = [first + env for env in over]
        self._strip.terminated[t, ended] = own.terminated[0, over]
        self._strip.truncated[t, ended] = own.truncated[0, over]
        own.terminated[:] = False
        own.truncated[:] = False
        return ended

    def reset(self, row: int, env_ids: list[int], *, list_of_kwargs: Any = None, **kwargs: Any) -> None:
        if self._env.is_closed:
            raise EnvClosed(f"{type(self._env).__name__} was closed; make a new one")
        if self._generation != self._crew.generation:
            self._bind()
        self._let_finish()
        if row == 0:  # a step whose end nobody took over (Ctrl-C) has left its flags: they are not the next step's
            self._forget_ends()
        ahead = self._crew.reset_ahead
        is_plain = not kwargs and list_of_kwargs is None
        if is_plain and ahead and (done_already := [env_id for env_id in env_ids if env_id in ahead]):
            self._copy(row, done_already, theirs=1)
            if rest := [env_id for env_id in env_ids if env_id not in ahead]:
                self._reset_some(row, rest, None, {})
        elif is_plain and len(env_ids) == self._strip.num_envs:
            for part in self._parts:
                self._crew.order(part.group, RESET, 0)
            self._await_all()
            if any(self._crew.outcomes[part.group] == FAILED for part in self._parts):
                self._fail()
            self._copy(row, env_ids, theirs=0)
        else:
            self._reset_some(row, env_ids, list_of_kwargs, kwargs)
        ahead.difference_update(env_ids)

    def _reset_some(self, row: int, env_ids: list[int], list_of_kwargs: Any, kwargs: dict[str, Any]) -> None:
        for part in self._parts:
            local = [env_id + part.shift for env_id in env_ids if part.first <= env_id < part.stop]
            if local:
                own = dict(kwargs)
                if list_of_kwargs is not None:  # of all envs of the worker
                    members = self._crew.worker_layout.members[part.worker]
                    own["list_of_kwargs"] = list_of_kwargs[members.start : members.stop]
                self._crew.hosts.call("reset", 0, local, own, workers=[part.worker])
        self._copy(row, env_ids, theirs=0)

    def _copy(self, row: int, env_ids: list[int], theirs: int) -> None:
        for part in self._parts:
            mine = [env_id for env_id in env_ids if part.first <= env_id < part.stop]
            if mine:
                part.copy_first(row, mine, theirs)


__all__ = ["CrewEnv", "ParallelEnv"]

"""SerialEnv: several envs side by side in this process, as one batched env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from swath.envs.base import EnvBase
from swath.envs.gym import GymWrapper
from swath.envs.gym_rows import GymRowEnv
from swath.envs.making import OF_BUFFERS, innermost, make_env, refuse_unknown, resolve_factories
from swath.envs.rows import RowEnv, specs_of_all
from swath.errors import EnvError, add_note
from swath.hints import wrapped
from swath.paths import Parts, follow
from swath.rollout.boundaries import Stepper
from swath.rollout.layout import Layout
from swath.rollout.strip import Column, Strip
from swath.states import count, mismatch, numbered

#: What users of ParallelEnv pass to either; there are no processes here, so there is nothing to do.
_FOR_PROCESSES = (
    "num_threads",
    "num_sub_threads",
    "serial_for_single",
    "mp_start_method",
    *OF_BUFFERS,
)


class SerialEnv:
    """``num_workers`` envs as one env of batch size ``(num_workers, *child)``.

    >>> from swath.envs import GymEnv
    >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    >>> env.rollout(5, break_when_any_done=False)["observation"].shape
    torch.Size([3, 5, 4])
    """

    def __new__(
        cls,
        num_workers: int,
        create_env_fn: Callable[..., Any] | str | Sequence[Any],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> Any:
        refuse_unknown(SerialEnv, others, _FOR_PROCESSES)
        factories, kwargs = resolve_factories("SerialEnv", num_workers, create_env_fn, create_env_kwargs)
        children: list[Any] = [make_env(factory, own) for factory, own in zip(factories, kwargs, strict=True)]
        if len({id(innermost(child)) for child in children}) < len(children):
            raise ValueError(
                f"SerialEnv({num_workers}): some of these envs are one and the same, which would be stepped twice in "
                "each step; let create_env_fn be a function that makes a new one at each call"
            )
        if all(isinstance(child, GymWrapper) for child in children) and same_spaces(children):
            return SerialGymEnv(children, device)
        return SerialRowEnv(children, device)


def side_by_side(envs: Sequence[EnvBase]) -> Any:
    """Envs that were made already, as one."""
    return SerialEnv(len(envs), [lambda env=env: env for env in envs])


def same_spaces(children: Sequence[GymWrapper]) -> bool:
    """Whether these can be stepped in one loop."""
    first = children[0]
    return all(
        not child.has_steps_of_its_own
        and child.env.observation_space == first.env.observation_space
        and child.env.action_space == first.env.action_space
        and [leaf.key for leaf in child.info_leaves] == [leaf.key for leaf in first.info_leaves]
        and child.categorical_action_encoding == first.categorical_action_encoding
        for child in children
    )


class _Children:
    """What a batched env says of its children: attributes as lists, resets with a list of arguments."""

    children: list[Any]

    @property
    def num_workers(self) -> int:
        return len(self.children)

    def __getattr__(self, name: str) -> list[Any]:
        return [getattr(child, name) for child in wrapped(self, "children", name)]

    def at_each(self, parts: Parts, path: str) -> list[Any]:
        """What a path leads to in each of them (``swath/paths.py``)."""
        return [follow(child, parts, path) for child in self.children]

    def __len__(self) -> int:
        return len(self.children)

    def __repr__(self) -> str:
        return f"SerialEnv({len(self.children)}, {self.children[0]})"

    def update_kwargs(self, kwargs: Any) -> None:
        raise EnvError("the children of a SerialEnv are made at once; give create_env_kwargs to SerialEnv instead")


class SerialGymEnv(_Children, GymRowEnv):
    """Gymnasium envs of the same spaces: one loop over all of them, one decoding of all actions."""

    def __init__(self, children: Sequence[GymWrapper], device: torch.device | str | None) -> None:
        self.children = list(children)
        first = children[0]
        GymRowEnv.__init__(
            self,
            [child.env for child in children],
            batch_size=(len(children),),
            device=device if device is not None else first.device,
            categorical_action_encoding=first.categorical_action_encoding,
            info_keys=first.info_leaves,
        )
        for index, child in enumerate(children):  # seeded before they were handed over
            self.pending_seeds[index] = child.pending_seeds[0]


class SerialRowEnv(_Children, RowEnv):
    """Any envs of the same layout, each stepped on its own and copied into the common rows.

    Envs with the same transforms are stepped together, and transformed at once, where that is the same.
    """

    def __init__(self, children: Sequence[EnvBase], device: torch.device | str | None) -> None:
        self.children = list(children)
        first = children[0]
        for index, child in enumerate(children):
            if getattr(child, "has_fillers", False):
                raise EnvError(
                    f"SerialEnv: env {index} is a vector env in NEXT_STEP mode, whose filler steps cannot be left out "
                    "here; make it with AutoresetMode.DISABLED or SAME_STEP"
                )
        layouts = [child.row_layout() for child in children]
        for index, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise EnvError(
                    f"SerialEnv: env {index} has another layout than env 0: {_difference(layouts[0], layout)}"
                )
        super().__init__(
            batch_size=(len(children), *first.batch_size),
            device=device if device is not None else first.device,
        )
        if layouts[0].structure is not None:
            self.objects = first.objects
            for child in children:  # numbered together
                child.objects = self.objects
        from swath.envs.hoisting import Hoisted  # which is made of such envs

        self._hoisted = Hoisted()
        self.full_specs = specs_of_all(first.full_specs, len(children))

    def plan(self) -> str:
        if (env := self._hoisted.of(self.children)) is not None:
            return env.plan()
        plans = [child.plan() for child in self.children]
        same = all(plan == plans[0] for plan in plans)
        return f"{len(plans)} in turn, each: {plans[0]}" if same else "; ".join(plans)

    def complete_policy(self, policy: Any) -> None:
        self.children[0].complete_policy(policy)

    def limit_episodes(self, max_steps: int) -> bool:
        limited = [child.limit_episodes(max_steps) for child in self.children]
        self.full_specs = specs_of_all(self.children[0].full_specs, len(self.children))
        return all(limited)

    def row_layout(self) -> Layout:
        return self.layout_around(self.children[0].row_layout())

    @property
    def resets_single_envs(self) -> bool:
        return all(child.resets_single_envs for child in self.children)

    @property
    def steps_stay_in_episodes(self) -> bool:  # type: ignore[override]
        return all(child.steps_stay_in_episodes for child in self.children)

    def bind_rows(self, strip: Strip) -> Stepper:
        if (env := self._hoisted.of(self.children)) is not None:
            env.base_env.first_index = self.first_index
            return env.bind_rows(strip)
        return _SerialStepper(self.children, strip, self.first_index)

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        for child in self.children:
            seed = child.set_seed(seed, static_seed)
        return seed

    def state_dict(self) -> dict[str, Any]:
        return {f"env{i}": child.state_dict() for i, child in enumerate(self.children)}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self._give_children("load_state_dict", state_dict, strict)

    def check_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self._give_children("check_state_dict", state_dict, strict)

    def _give_children(self, method: str, state_dict: dict[str, Any], strict: bool) -> None:
        if strict and len(numbered(state_dict, "env")) != len(self.children):
            raise mismatch(
                type(self).__name__, state_dict, f"the state of a SerialEnv of {count(len(self.children), 'env')}"
            )
        for i, child in enumerate(self.children):
            getattr(child, method)(state_dict.get(f"env{i}", {}), strict)

    def _close(self) -> None:
        for child in self.children:
            child.close(raise_if_closed=False)


def _difference(mine: Layout, theirs: Layout) -> str:
    for kind in ("carried", "outputs", "outcomes"):
        for a, b in zip(getattr(mine, kind), getattr(theirs, kind), strict=False):
            if a != b:
                return f"{a} against {b}"
    return "another number of keys, or another batch size"


class _SerialStepper:
    """Each child steps on a strip of its own, one step long."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, children: Sequence[EnvBase], strip: Strip, first_index: int) -> None:
        self._strip = strip
        self._first_index = first_index
        self._rows_per_child = children[0].batch_size.numel()
        self._steppers: list[tuple[Strip, Stepper]] = []
        written = {key: column.field for key, column in strip.outputs.items()}
        for child in children:
            layout = child.row_layout()
            # A guest is given all that the policy writes, others their actions.
            wanted = written if not layout.has_flags else [field.key for field in layout.outputs]
            given = {"primed": strip.layout.primed, "overridden": strip.layout.overridden}
            own = Strip(replace(layout, outputs=tuple(written[key] for key in wanted), **given), 1)
            self._steppers.append((own, child.bind(own)))

    def prepare(self) -> None:
        """Before a batch."""
        for _, stepper in self._steppers:
            if hasattr(stepper, "prepare"):
                stepper.prepare()  # type: ignore[attr-defined]

    def settle(self) -> None:
        """After a batch."""
        for _, stepper in self._steppers:
            if hasattr(stepper, "settle"):
                stepper.settle()  # type: ignore[attr-defined]

    def resume(self, row: int) -> None:
        """Go on from a row that was written by others."""
        n = self._rows_per_child
        for index, (own, stepper) in enumerate(self._steppers):
            for key, column in own.carried.items():
                column.tensor[0] = self._strip.carried[key].tensor[row, index * n : (index + 1) * n]
            if hasattr(stepper, "resume"):
                stepper.resume(0)  # type: ignore[attr-defined]

    def _copy(self, own: dict, common: dict, own_row: int, row: int, first: int) -> None:
        column: Column
        for key, column in own.items():
            common[key].tensor[row, first : first + self._rows_per_child] = column.tensor[own_row]

    def reset(self, row: int, env_ids: list[int], *, list_of_kwargs: Any = None, **kwargs: Any) -> None:
        n = self._rows_per_child
        for index in sorted({env_id // n for env_id in env_ids}):
            own, stepper = self._steppers[index]
            mine = [env_id - index * n for env_id in env_ids if env_id // n == index]
            for key, column in own.carried.items():
                column.tensor[0] = self._strip.carried[key].tensor[row, index * n : (index + 1) * n]
            with _named(self._first_index + index):
                stepper.reset(0, mine, **kwargs, **(list_of_kwargs[index] if list_of_kwargs else {}))
            self._copy(own.carried, self._strip.carried, 0, row, index * n)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        n, strip = self._rows_per_child, self._strip
        ended: list[int] = []
        for index, (own, stepper) in enumerate(self._steppers):
            first = index * n
            if env_ids is not None and not set(env_ids) & set(range(first, first + n)):
                continue
            for key, column in own.outputs.items():
                column.tensor[0] = strip.outputs[key].tensor[t, first : first + n]
            for key, column in own.carried.items():
                column.tensor[0] = strip.carried[key].tensor[t, first : first + n]
            for key in own.layout.primed:
                own.carried[key].tensor[1] = strip.carried[key].tensor[t + 1, first : first + n]
            own.terminated[:] = False
            own.truncated[:] = False
            with _named(self._first_index + index):
                over = stepper.step(0)
            self._copy(own.carried, strip.carried, 1, t + 1, first)
            self._copy(own.outcomes, strip.outcomes, 0, t, first)
            if over:
                strip.terminated[t, first : first + n] = own.terminated[0]
                strip.truncated[t, first : first + n] = own.truncated[0]
                ended += [first + env_id for env_id in over]
        return ended or None


class _named:
    """Adds which child of a SerialEnv an exception came from."""

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            add_note(error, f"swath: in env {self._index} of a SerialEnv")

"""A guest on the rows of a strip: stepped as it is, or its own envs on rows for as long as that is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tensordict import TensorDictBase

from swath.errors import EnvDataError, EnvError
from swath.keys import Key, show
from swath.rollout.strip import Column, Strip
from swath.rollout.tensordict_internals import put

if TYPE_CHECKING:
    from swath.envs.guest import GuestEnv


class GuestStepper:
    """A guest on the rows of a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: GuestEnv, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._num_envs = strip.num_envs
        own = {field.key for field in env.keys.carried}
        self._carried = [(key, column) for key, column in strip.carried.items() if key in own]
        # All that the policy writes: transforms may read more than the action.
        self._outputs = list(strip.outputs.items())
        self._overridden = [(key, strip.carried[key]) for key in strip.layout.overridden if key in own]
        self._written = [*self._outputs, *self._overridden]
        self._primed = [(("next", *key), strip.carried[key]) for key in strip.layout.primed if key in own]
        self._root_only = env.keys.root_only
        self._structure = env.keys.structure
        self._is_plain = not (self._structure.stacks or self._structure.classes or self._structure.has_objects)
        self._says_terminated = ("terminated",) in env.keys.ends
        self._is_flat = self._is_plain and all(len(key) == 1 for key in (*own, *strip.outputs, *strip.outcomes))
        self._quick_steps: Any = None
        self._quick: Any = None
        #: Envs that the guest has reset by itself, after its last step.
        self._reset_already: list[int] = []

    def prepare(self) -> None:
        """Before a batch: its user may have changed something."""
        if self._is_flat and self._env.steps_quickly:
            if self._quick_steps is None:
                from swath.envs.quick_guest import QuickSteps

                self._quick_steps = QuickSteps(self._env.guest, self._strip)
            self._quick = self._quick_steps.find()

    def resume(self, row: int) -> None:
        """Go on from a row that was written without the guest."""
        env = self._env
        leaves = {key: column.rows[row].clone() for key, column in self._carried}
        env.root = self._structure.build(leaves, env.batch_size, device=env.device)

    def _values(self, data: TensorDictBase) -> Any:
        """Key by key, what a TensorDict of the guest has."""
        if self._is_plain:
            plain: Any = data
            return lambda key: plain.get(key, None)
        leaves = self._structure.flatten(data, self._env.objects, len(self._env.batch_size))
        return leaves.get

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        env = self._env
        due = env_ids if kwargs else [env_id for env_id in env_ids if env_id not in self._reset_already]
        if due:
            if env.root is None and len(due) < self._num_envs:
                self.resume(row)
            env.root = self._reset(due, kwargs)
        self._reset_already = []
        root: Any = env.root
        value_of = self._values(root)
        for key, column in self._carried:
            value = value_of(key)
            if value is None and key in self._root_only:
                env.written_by_steps.add(key)
                column.tensor[row, env_ids] = 0
                continue
            if value is None or column.rows[row].shape != value.shape or column.field.dtype != value.dtype:
                self._refuse(key, value, column, "a reset")
            if len(env_ids) == self._num_envs:
                column.rows[row].copy_(value)
            else:
                column.tensor[row, env_ids] = value.reshape(column.tensor.shape[1:])[env_ids]

    def _reset(self, env_ids: list[int], kwargs: dict[str, Any]) -> TensorDictBase:
        env = self._env
        if env.root is None or len(env_ids) == self._num_envs:
            return env.guest.reset(**kwargs)
        request = env.root.copy()
        chosen = torch.zeros(self._num_envs, dtype=torch.bool, device=env.device)
        chosen[env_ids] = True
        for group, reset_key in zip(env.guest.done_keys_groups, env.guest.reset_keys, strict=True):
            like = request.get(group[0])
            mask = chosen.view(*env.batch_size, *[1] * (like.ndim - len(env.batch_size)))
            request.set(reset_key, mask.expand_as(like).clone())
        return env.guest.reset(request, **kwargs)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        env, strip = self._env, self._strip
        if env_ids is not None and len(env_ids) < self._num_envs:
            raise EnvError(f"{env} is stepped as a whole; {len(env_ids)} of its {self._num_envs} envs were to step")
        if env.root is None:  # the first reset was made on rows
            self.resume(t)
        root: Any = env.root
        self._write_outputs(root, t)
        for key, column in self._primed:
            root.set(key, column.rows[t + 1].clone())
        quick = None if self._quick is None else self._quick(root)
        if quick is not None:
            values, env.root = quick
            return self._take_flat(t, values)
        stepped, env.root = env.guest.step_and_maybe_reset(root)
        after = stepped.get("next")
        value_of = self._values(after)
        following = self._values(env.root) if self._root_only else None
        for key, column in self._carried:
            if key in env.written_by_steps:
                self._take_written(t, key, stepped.get(key, None), column)
                continue
            value = value_of(key) if following is None or key not in self._root_only else following(key)
            if value is None or column.rows[t + 1].shape != value.shape or column.field.dtype != value.dtype:
                self._refuse(key, value, column, f"step {t}")
            column.rows[t + 1].copy_(value)
        for key, column in strip.outcomes.items():
            column.rows[t].copy_(value_of(key))
        flags = [after.get(key) for key in env.keys.ends]
        return self._ended(flags, after.get("terminated") if self._says_terminated else None, t)

    def _take_written(self, t: int, key: Key, value: Any, column: Column) -> None:
        """What a step has put beside the action; zeros, as in TorchRL, where it has not."""
        column.rows[t + 1].zero_()
        if value is None:
            return
        if self._strip.num_steps == 1:  # others have read this row already
            raise EnvError(
                f"{type(self._env.guest).__name__}: a step writes {show(key)} beside the action; it is delivered only "
                "where TorchRL's env is given to a Collector or MultiCollector as it is, with two steps or more in a "
                "batch; put the transform that writes it into a torchrl.envs.Compose, to do without"
            )
        column.rows[t].copy_(value)

    def _take_flat(self, t: int, values: dict[str, Any]) -> list[int] | None:
        """Write what a quick step gave."""
        for key, column in self._carried:
            value = values.get(key[0])
            row = column.rows[t + 1]
            if value is None or row.shape != value.shape or row.dtype != value.dtype:
                self._refuse(key, value, column, f"step {t}")
            row.copy_(value)
        for key, column in self._strip.outcomes.items():
            column.rows[t].copy_(values[key[0]])
        flags = [values[key[0]] for key in self._env.keys.ends]
        if self._num_envs == 1 and not any(map(bool, flags)):
            return None
        return self._ended(flags, values["terminated"] if self._says_terminated else None, t)

    def _write_outputs(self, root: TensorDictBase, t: int) -> None:
        # Copies: an env may keep what it is given, or change it.
        written = self._written
        if self._is_flat:
            for key, column in written:
                put(root, key[0], column.rows[t].clone())
            return
        if self._is_plain:
            for key, column in written:
                root.set(key, column.rows[t].clone())
            return
        env = self._env
        leaves = {key: column.rows[t].clone() for key, column in written}
        root.update(self._structure.build(leaves, env.batch_size, device=env.device))

    def _ended(self, flags: Sequence[torch.Tensor], terminated: torch.Tensor | None, t: int) -> list[int] | None:
        """The envs of which any flag is set, which the guest has reset."""
        over = None
        for flag in flags:
            flag = flag.reshape(self._num_envs, -1)
            flag = flag[:, 0] if flag.shape[1] == 1 else flag.any(1)
            over = flag if over is None else over | flag
        assert over is not None
        if not bool(over.any()):
            return None
        self._reset_already = over.nonzero().reshape(-1).tolist()
        # For those who look there for episodes that are over; not delivered.
        strip, ended = self._strip, over.cpu().numpy()
        strip.terminated[t] = ended if terminated is None else terminated.cpu().numpy().reshape(-1)
        strip.truncated[t] = ended & ~strip.terminated[t]
        return self._reset_already

    def _refuse(self, key: Key, value: torch.Tensor | None, column: Column, where: str) -> NoReturn:
        if value is None:
            raise EnvDataError(
                f"{type(self._env.guest).__name__}: {where} gives no {show(key)}, which was in its specs when the "
                "collector was made"
            )
        raise EnvDataError(
            f"{type(self._env.guest).__name__}: {show(key)} after {where} has shape {tuple(value.shape)} and dtype "
            f"{value.dtype}; its specs say {(*self._env.batch_size, *column.field.shape)} and {column.field.dtype}"
        )

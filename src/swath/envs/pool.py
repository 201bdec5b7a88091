"""AsyncEnvPool: envs that are stepped one by one, and received as they get ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from swath import platforms
from swath.envs.making import resolve_factories
from swath.envs.parallel import CrewEnv, make_crew
from swath.envs.step import complete_flags
from swath.errors import EnvBusy, NothingSent, require_one_of
from swath.keys import as_key, nested, show
from swath.rollout.structure import maybe_dense_stack
from swath.stepping.shared_steps import BUSY, ENDED, FAILED, RESET, STEP, STEP_AND_RESET
from swath.workers.layout import available_cores

_STACKS = ("dense", "maybe_dense", "lazy")
_NAMES = {RESET: "async_reset", STEP: "async_step", STEP_AND_RESET: "async_step_and_maybe_reset"}
#: How long one thread waits for all before another may.
_SECONDS_TO_LEAD = 0.2


class AsyncEnvPool(CrewEnv):
    """Envs that take single steps, each at its own pace: send actions to some, receive whichever are ready.

    Args:
        env_makers: a function (or Gymnasium id) for every env.
        backend: "threading" (default) or "multiprocessing".
        stack: how several results are put together: "dense", "maybe_dense" (lazily, if shapes differ) or "lazy".
        create_env_kwargs: for the functions; one mapping, or one for each env.
        num_workers, envs_per_worker: how envs share threads or processes; by default each has its own.
        max_steps: truncate episodes after so many steps.
        step_timeout_s: raise ``WorkerHangs`` if a step takes longer.

    Data has ``env_index``, which says whose it is. ``reset``, ``step`` and ``rollout`` are those of any env: they wait
    for all. Also goes into a ``Collector``.

    >>> from swath.envs import GymEnv
    >>> pool = AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * 3)
    >>> roots = pool.reset()
    >>> pool.async_step_send(pool.rand_action(roots))
    >>> first = pool.async_step_recv(min_get=1)
    >>> later = pool.async_step_recv(min_get=3 - len(first)) if len(first) < 3 else None
    >>> pool.close()
    """

    #: As users of the reference know it.
    min_get = 1
    _threads = True

    def __new__(cls, env_makers: Any = None, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if cls is AsyncEnvPool:
            kinds: dict[str | None, Any] = {
                None: ThreadingAsyncEnvPool,
                "threading": ThreadingAsyncEnvPool,
                "multiprocessing": ProcessorAsyncEnvPool,
            }
            if backend not in kinds:
                raise NotImplementedError(
                    f"AsyncEnvPool has no backend {backend!r}; there are 'threading' and 'multiprocessing'"
                )
            return super().__new__(kinds[backend])
        return super().__new__(cls)

    def __init__(
        self,
        env_makers: Sequence[Callable[..., Any] | str] | Callable[..., Any],
        *,
        backend: str | None = None,
        stack: str = "dense",
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers: int | str | None = None,
        envs_per_worker: int | None = None,
        device: torch.device | str | None = None,
        mp_start_method: str | None = None,
        num_sub_threads: int = 1,
        max_steps: int | None = None,
        step_timeout_s: float | None = None,
    ) -> None:
        self.is_closed = True  # until there is something to close
        require_one_of("stack", stack, _STACKS)
        if callable(env_makers) or isinstance(env_makers, str):
            env_makers = [env_makers]
        factories, kwargs = resolve_factories(type(self).__name__, len(env_makers), env_makers, create_env_kwargs)
        count = len(factories)
        if num_workers == "cores":
            num_workers = min(count, available_cores())
        if num_workers is None:
            num_workers = count if envs_per_worker is None else -(-count // envs_per_worker)
        if not isinstance(num_workers, int) or not 1 <= num_workers <= count:
            raise ValueError(f"{type(self).__name__}: num_workers={num_workers} for {count} envs; give 1 to {count}")
        if not self._threads:
            platforms.require(type(self).__name__, platforms.STEPPING_WORKERS, "use backend='threading'")
        crew = make_crew(
            factories,
            kwargs,
            num_workers,
            mp_start_method,
            threads=self._threads,
            max_steps=max_steps,
            step_timeout_s=step_timeout_s,
            num_threads=num_sub_threads,
        )
        super().__init__(crew, device, envs_per_group=1)
        self._stack = stack
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._someone_leads = False
        #: What was sent to each env that was not received: the operation, and the root.
        self._sent: dict[int, tuple[int, TensorDictBase | None]] = {}
        self._dtypes: dict[Any, torch.dtype] = {}
        self._actions = {as_key(key): spec for key, spec in self.full_action_spec.items(True, True)}

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each env."""
        return [self.batch_size[1:]] * self.num_envs

    def shutdown(self) -> None:
        """As ``close``."""
        self.close()

    # -- sending -----------------------------------------------------------------------------------------------------

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: Any = None) -> None:
        """Let these envs (all by default) start new episodes."""
        envs = self._which(tensordict, env_index)
        self._send(RESET, envs, None)

    def async_step_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """Let envs take a step: those of ``env_index``, or of the data's own, or all."""
        self._send(STEP, self._which(tensordict, env_index), tensordict)

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: Any = None) -> None:
        """As ``async_step_send``; envs that are done are reset, without being asked again."""
        self._send(STEP_AND_RESET, self._which(tensordict, env_index), tensordict)

    def _which(self, tensordict: TensorDictBase | None, env_index: Any) -> list[int]:
        if env_index is None and tensordict is not None:
            env_index = tensordict.get("env_index", None)
        if env_index is None:
            return list(range(self.num_envs))
        envs = torch.as_tensor(env_index).reshape(-1).tolist()
        for env in envs:
            if not 0 <= env < self.num_envs:
                raise IndexError(f"there is no env {env}: there are {self.num_envs}, counted from 0")
        if len(set(envs)) < len(envs):
            raise EnvBusy(f"env_index {envs} names an env twice; it takes one step at a time")
        return envs

    def _send(self, operation: int, envs: list[int], tensordict: TensorDictBase | None) -> None:
        self._assert_open()
        roots: Sequence[TensorDictBase | None] = [None] * len(envs)
        if tensordict is not None:
            roots = self._apart(tensordict, len(envs))
        with self._lock:
            busy = [env for env in envs if env in self._sent]
            if busy:
                raise EnvBusy(
                    f"env {busy[0]} has not been received since {_NAMES[self._sent[busy[0]][0]]}_send; call "
                    f"{_NAMES[self._sent[busy[0]][0]]}_recv first"
                )
            self._lay_out(roots[0])
            for env, root in zip(envs, roots, strict=True):
                if root is not None:
                    self._write_action(env, root)
                self._sent[env] = operation, root
                self._crew.order(env, operation, 0)

    def _apart(self, tensordict: TensorDictBase, count: int) -> list[TensorDictBase]:
        """A root for each env."""
        size = self.batch_size[1:]
        if tensordict.batch_size == size and count == 1:
            return [tensordict]
        if tensordict.batch_size != (count, *size):
            raise RuntimeError(
                f"{count} envs of batch size {tuple(size)} were sent a TensorDict of {tuple(tensordict.batch_size)}"
            )
        return list(tensordict.unbind(0))

    def _write_action(self, env: int, root: TensorDictBase) -> None:
        group = self._crew.groups[env]
        columns = self._crew.stages[group.worker].strip.outputs
        for key, spec in self._actions.items():
            action = root.get(key, None)
            if action is None:
                raise KeyError(f"the data for env {env} has no {show(key)}")
            if action.shape != spec.shape[1:]:
                raise RuntimeError(
                    f"{show(key)} for env {env} has shape {tuple(action.shape)}, expected {tuple(spec.shape[1:])}"
                )
            row = columns[key].tensor[0, group.local.start : group.local.stop]
            row.copy_(action.reshape(row.shape))

    def _lay_out(self, root: TensorDictBase | None) -> None:
        """Have memory for actions of the dtype that is sent: a policy may give floats for a one-hot."""
        fields = {field.key: field for field in self.row_layout().outputs}
        for key, field in fields.items():
            action = None if root is None else root.get(key, None)
            if action is not None:
                self._dtypes[key] = action.dtype
            fields[key] = replace(field, dtype=self._dtypes.get(key, field.dtype))
        if self._crew.is_laid_out(1, fields, 1):
            return
        if self._sent:
            raise EnvBusy(
                f"actions of another dtype ({self._dtypes}) than before were sent while envs are under way; receive "
                "all of them first, or send the same dtype"
            )
        self._crew.lay_out(1, fields, 1)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def async_reset_recv(
        self, min_get: int = 1, env_index: Any = None, *, max_get: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """First observations of at least ``min_get`` envs, or of those of ``env_index``."""
        return self._receive(RESET, min_get, env_index, max_get, timeout)[0]

    def async_step_recv(
        self, min_get: int = 1, env_index: Any = None, *, max_get: int | None = None, timeout: float | None = None
    ) -> TensorDictBase:
        """What was sent to at least ``min_get`` envs, with what came ``next``."""
        return self._receive(STEP, min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_recv(
        self, min_get: int = 1, env_index: Any = None, *, max_get: int | None = None, timeout: float | None = None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """The steps, and the roots of the following ones."""
        return self._receive(STEP_AND_RESET, min_get, env_index, max_get, timeout)

    def _receive(
        self, operation: int, min_get: int, env_index: Any, max_get: int | None, timeout: float | None
    ) -> tuple[Any, Any]:
        self._assert_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if env_index is not None:
                wanted = torch.as_tensor(env_index).reshape(-1).tolist()
                min_get = len(wanted)
            else:
                wanted = [env for env, (sent, _) in self._sent.items() if sent == operation]
            missing = [env for env in wanted if self._sent.get(env, (None,))[0] != operation]
            if missing:
                raise NothingSent(f"nothing was sent to env {missing[0]} with {_NAMES[operation]}_send")
            if min_get > len(wanted):
                raise NothingSent(
                    f"{_NAMES[operation]}_recv waits for {min_get} envs, but {len(wanted)} are under way; send first"
                )
            if max_get is not None and not max_get >= 1:
                raise ValueError(f"max_get must be at least 1, got {max_get}")
            ready = self._await(wanted, max(min_get, 1), deadline)
            if max_get is not None:
                ready = ready[:max_get]
            taken = {env: self._sent.pop(env) for env in sorted(ready)}
            self._crew.take_posts(len(taken))
            failed = [self._crew.groups[env] for env in taken if self._crew.outcomes[env] == FAILED]
            if failed:
                self._crew.raise_failures(failed)
            results = [self._result(operation, env, root) for env, (_, root) in taken.items()]
        if isinstance(env_index, int):
            return results[0]
        return self._together([first for first, _ in results]), self._together([second for _, second in results])

    def _await(self, envs: list[int], count: int, deadline: float | None) -> list[int]:
        """Envs that are done, at least so many. Several threads may wait: one for all of them at a time."""
        outcomes = self._crew.outcomes
        while len(ready := [env for env in envs if outcomes[env] != BUSY]) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{len(ready)} of {count} envs were ready in time")
            slice_s = _SECONDS_TO_LEAD if left is None else min(left, _SECONDS_TO_LEAD)
            if self._someone_leads:
                self._changed.wait(slice_s)
                continue
            self._someone_leads = True
            self._lock.release()
            try:
                self._crew.wait_until(time.monotonic() + slice_s)
            finally:
                self._lock.acquire()
                self._someone_leads = False
                self._changed.notify_all()
        return ready

    def _result(self, operation: int, env: int, root: TensorDictBase | None) -> tuple[Any, Any]:
        """What an env's step gave, and the root of the following one."""
        group = self._crew.groups[env]
        stage = self._crew.stages[group.worker]
        where = slice(group.local.start, group.local.stop)
        size = self.batch_size[1:]
        strip = stage.strip

        def rows(columns: Mapping[Any, Any], row: int) -> dict[Any, torch.Tensor]:
            return {
                key: column.tensor[row, where].clone().view(*size, *column.field.shape)
                for key, column in columns.items()
            }

        number = torch.full(size, env, dtype=torch.int64)
        if operation == RESET:
            fresh = self._data({**rows(strip.carried, 0), ("env_index",): number}, size, fresh=True)
            return fresh, fresh
        was_reset = operation == STEP_AND_RESET and self._crew.outcomes[env] == ENDED
        last = dict(zip(strip.carried, stage.last, strict=True))
        after = {**rows(last if was_reset else strip.carried, 0 if was_reset else 1), **rows(strip.outcomes, 0)}
        flags = {"terminated": strip.terminated, "truncated": strip.truncated}
        for name, flag in flags.items():
            if name in self.done_keys:
                after[name,] = torch.from_numpy(flag[0, where].copy()).view(*size, 1)
            flag[0, where] = False
        assert root is not None
        step = root.copy().set("env_index", number)
        step.set("next", self._data(after, size, fresh=False))
        if operation == STEP:
            return step, None
        following = self.step_mdp(step)
        if was_reset:
            fresh = self._data({**rows(strip.carried, 1), ("env_index",): number}, size, fresh=True)
            following = following.update(fresh)
        return step, following

    def _data(self, leaves: dict[Any, torch.Tensor], size: torch.Size, *, fresh: bool) -> TensorDict:
        data = TensorDict(nested(leaves), batch_size=size, device=self.device)
        spec = self._crew.about.specs["done"]
        complete_flags(data, spec, fresh=fresh, who=type(self).__name__)
        return data

    def _together(self, results: list[Any]) -> Any:
        if results[0] is None:
            return None
        if self._stack == "lazy":
            return LazyStackedTensorDict.lazy_stack(results, 0)
        if self._stack == "maybe_dense":
            return maybe_dense_stack(results)
        return torch.stack(results, 0)

    # -- the API of any env ------------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._require_idle("reset")
        return super().reset(tensordict, **kwargs).set("env_index", self._numbers())

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._require_idle("step")
        return super().step(tensordict).set("env_index", self._numbers())

    def _numbers(self) -> torch.Tensor:
        numbers = torch.arange(self.num_envs).view(-1, *[1] * (len(self.batch_size) - 1))
        return numbers.expand(self.batch_size).clone()

    def _require_idle(self, what: str) -> None:
        if self._sent:
            env = next(iter(self._sent))
            raise EnvBusy(f"{what}: env {env} has not been received since {_NAMES[self._sent[env][0]]}_send")

    @property
    def has_steps_of_its_own(self) -> bool:
        return False  # the two above only add the numbers


class ThreadingAsyncEnvPool(AsyncEnvPool):
    """An ``AsyncEnvPool`` in threads: for envs that wait for something outside."""


class ProcessorAsyncEnvPool(AsyncEnvPool):
    """An ``AsyncEnvPool`` in processes."""

    _threads = False


__all__ = ["AsyncEnvPool", "ProcessorAsyncEnvPool", "ThreadingAsyncEnvPool"]

"""EnvPool: many envs in C++, stepped by threads of its own, as one batched env.

By itself a pool resets an env on the step after an episode's last, and ignores that step's action: a filler. Here envs
that ended are reset on their own before the next step, which a pool in sync mode can do, so there are no fillers.

A pool in async mode (``batch_size`` smaller than ``num_envs``) hands out rows in parts of a fixed size, so it cannot
reset just those that ended. A collector needs the rows of all envs before its next step anyway; such a pool is made
anew in sync mode, with the same envs and seeds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from swath.envs.known import import_extra
from swath.envs.vector import VectorEnv
from swath.errors import EnvClosed, EnvError, did_you_mean

#: A pool takes seeds below this.
_SEEDS = 2**31


class EnvPoolWrapper(VectorEnv):
    """A pool that ``envpool.make(..., env_type="gymnasium")`` made, as an env of batch size ``(num_envs,)``.

    EnvPool fixes its seeds when a pool is made: after ``set_seed``, the next reset makes the pool anew, with one seed
    for each env.

    Args:
        pool: in sync or in async mode; either is stepped as a whole.
        categorical_action_encoding: discrete actions as integers instead of one-hot vectors.

    >>> pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8)  # doctest: +SKIP
    >>> EnvPoolWrapper(pool).rollout(3)["observation"].shape  # doctest: +SKIP
    torch.Size([8, 3, 4])
    """

    def __init__(
        self,
        pool: Any,
        categorical_action_encoding: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(_WholePool(pool), categorical_action_encoding, device=device)

    def as_seed(self, seeds: list[int | None] | None) -> Any:
        return seeds


class EnvPoolEnv(EnvPoolWrapper):
    """A pool from its task's id; other keywords go to ``envpool.make``.

    Without a seed, one is drawn from PyTorch's generator, so that the pools of several workers differ. (EnvPool's own
    default is the same seed for every pool.)

    >>> EnvPoolEnv("CartPole-v1", num_envs=8).rollout(3)["observation"].shape  # doctest: +SKIP
    torch.Size([8, 3, 4])
    """

    def __init__(
        self,
        task_id: str,
        categorical_action_encoding: bool = False,
        *,
        num_envs: int = 1,
        seed: int | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        **make_kwargs: Any,
    ) -> None:
        envpool = import_extra("envpool", "envpool", f"EnvPoolEnv({task_id!r})")
        known = envpool.list_all_envs()
        if task_id not in known:
            hint = did_you_mean(str(task_id), known, "; see envpool.list_all_envs()")
            raise ValueError(f"EnvPool has no task {task_id!r}{hint}")
        if seed is None:
            seed = int(torch.randint(_SEEDS, ()))
        pool = envpool.make(task_id, env_type="gymnasium", num_envs=num_envs, seed=seed, **make_kwargs)
        super().__init__(pool, categorical_action_encoding, device=device)
        self.task_id = task_id


class _WholePool(GymnasiumVectorEnv):
    """A pool as Gymnasium has vector envs that are reset one by one: what comes back always has a row for each env."""

    def __init__(self, pool: Any) -> None:
        if not isinstance(pool, GymnasiumVectorEnv):
            raise TypeError(
                f"{type(pool).__name__} speaks another interface than Gymnasium's; make the pool with "
                'envpool.make(..., env_type="gymnasium")'
            )
        self.num_envs = pool.config["num_envs"]
        if pool.config["max_num_players"] > 1:
            raise EnvError(f"{type(pool).__name__}: pools with several players in an env are not supported")
        if pool.is_async:
            pool = _anew(pool, batch_size=self.num_envs)
        self._pool: Any = pool
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that bounds are rounded to float32
            self.single_observation_space = pool.observation_space
            self.single_action_space = pool.action_space
        self.action_space = self.single_action_space
        self.metadata = {**pool.metadata, "autoreset_mode": AutoresetMode.DISABLED}

    @property
    def pool(self) -> Any:
        """EnvPool's own object."""
        if self._pool is None:
            raise EnvClosed("the pool was closed; make a new one")
        return self._pool

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool = _anew(self.pool, seed=0, env_seed=[int(own) % _SEEDS for own in seed])
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return self.pool.reset()
        env_ids = np.flatnonzero(mask).astype(np.int32)
        observation, info = self.pool.reset(env_ids)
        return _spread(observation, env_ids, self.num_envs), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return self.pool.step(actions)

    def close(self, **kwargs: Any) -> None:
        """Its threads end when nobody refers to the pool any more."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __str__(self) -> str:
        return "closed" if self._pool is None else type(self._pool).__name__


def _anew(pool: Any, **changes: Any) -> Any:
    """A pool like this one, but for some of its configuration."""
    new = type(pool)(type(pool.spec)(pool.spec.config._replace(**changes)))
    for name, value in vars(pool).items():
        if name.startswith("_render"):  # what it was told about rendering, which is not in its configuration
            setattr(new, name, value)
    return new


def _spread(rows: Any, env_ids: np.ndarray, num_envs: int) -> Any:
    """Rows of some envs in a place for each env; the others' are zero."""
    if isinstance(rows, dict):
        return {name: _spread(own, env_ids, num_envs) for name, own in rows.items()}
    if isinstance(rows, tuple):
        return tuple(_spread(own, env_ids, num_envs) for own in rows)
    whole = np.zeros((num_envs, *rows.shape[1:]), rows.dtype)
    whole[env_ids] = rows
    return whole


__all__ = ["EnvPoolEnv", "EnvPoolWrapper"]

"""Steps of an env one after the other, as TensorDicts: what ``EnvBase.rollout`` puts side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import TensorDictBase

if TYPE_CHECKING:
    from swath.envs.base import EnvBase


def play(
    env: EnvBase,
    act: Callable[[TensorDictBase], Any],
    root: TensorDictBase,
    max_steps: int,
    until: Literal["any done", "all done"] | None,
    callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
    policy_device: torch.device | None = None,
) -> list[TensorDictBase]:
    """Up to ``max_steps`` steps from ``root``, each with its ``next``.

    ``until``: when to stop before that. With "all done", envs that are done wait for the others; with None, they are
    reset. ``policy_device``: where ``act`` is given the data, and whence it is taken back.
    """
    steps: list[TensorDictBase] = []
    finished = torch.zeros(env.batch_size, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(max_steps):
            if policy_device is None:
                root = act(root)
            else:
                root = act(root.to(policy_device)).to(env.device or "cpu")
            if until == "all done" and bool(finished.any()):
                root.set("_step", ~finished)
            stepped = env.step(root)
            stepped.pop("_step", None)
            steps.append(stepped.clone(recurse=False))
            if callback is not None:
                callback(env, stepped)
            done = stepped.get(("next", "done")).reshape(env.batch_size).cpu()
            finished = finished | done
            if (until == "any done" and bool(done.any())) or (until == "all done" and bool(finished.all())):
                break
            root = env.step_mdp(stepped)
            if until is None:
                root = env.maybe_reset(root)
    return steps

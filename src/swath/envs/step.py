"""Steps as TensorDicts: the root of the next step, episode flags, steps put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from swath.errors import EnvDataError, EnvError
from swath.keys import as_key, show
from swath.specs import Composite, NestedKey


def check_step_input(env: Any, given: Any) -> None:
    """Refuse what ``env.step`` cannot take, an action as Gymnasium's envs do above all."""
    who = type(env).__name__
    if not isinstance(given, TensorDictBase):
        raise TypeError(
            f"{who}.step takes a TensorDict, got {type(given).__name__}: td = env.reset(), then "
            'env.step(td.set("action", action)), whose "next" has observation, reward and done'
        )
    if env.batch_locked and given.batch_size != env.batch_size:
        raise RuntimeError(
            f"{who} has batch size {tuple(env.batch_size)}, but step got a TensorDict of {tuple(given.batch_size)}"
        )


def step_mdp(
    tensordict: TensorDictBase,
    *,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: Sequence[NestedKey] = ("reward",),
    done_keys: Sequence[NestedKey] = ("done", "terminated", "truncated"),
    action_keys: Sequence[NestedKey] = ("action",),
) -> TensorDictBase:
    """What comes ``next`` in a step, as the root of the following one.

    >>> from tensordict import TensorDict
    >>> step = TensorDict(observation=torch.zeros(1), action=torch.ones(1),
    ...                   next=TensorDict(observation=torch.ones(1), reward=torch.ones(1)))
    >>> sorted(step_mdp(step).keys())
    ['observation']
    """
    after = tensordict.get("next")
    root = tensordict.exclude("next", "_reset", *reward_keys, *done_keys) if keep_other else tensordict.empty()
    if exclude_action:
        root = root.exclude(*action_keys)
    dropped = [*(reward_keys if exclude_reward else ()), *(done_keys if exclude_done else ())]
    return root.update(after.exclude(*dropped))


def next_root(
    tensordict: TensorDictBase, reward_keys: Sequence[NestedKey], done_keys: Sequence[NestedKey]
) -> TensorDictBase:
    """``step_mdp`` as an env does it: the action stays at the root."""
    return step_mdp(tensordict, exclude_action=False, reward_keys=reward_keys, done_keys=done_keys)


def complete_flags(data: TensorDictBase, done_spec: Composite, *, fresh: bool, who: str) -> None:
    """Derive the flags that an env left out: done is terminated or truncated; after a reset none is set."""
    if "done" not in done_spec:  # around an env of TorchRL, whose flags are data like any other
        return
    shape = done_spec["done"].shape
    flags = {name: data.get(name, None) for name in ("done", "terminated", "truncated")}
    flags = {
        name: flag.reshape(shape) if flag is not None and flag.numel() == shape.numel() else flag
        for name, flag in flags.items()
    }
    done, terminated, truncated = flags["done"], flags["terminated"], flags["truncated"]
    if terminated is None:
        if done is not None and truncated is not None:
            raise EnvError(
                f"{who} returned done and truncated without terminated, so it cannot be told why an episode ended; "
                "return terminated as well"
            )
        terminated = done if done is not None else torch.zeros(shape, dtype=torch.bool, device=data.device)
    if truncated is None and "truncated" in done_spec:
        # An episode that is done but not terminated was cut short.
        truncated = torch.zeros_like(terminated) if done is None else done & ~terminated
    if done is None:
        done = terminated.clone() if truncated is None else terminated | truncated
    if fresh and bool(done.any()):
        raise EnvError(f"{who}: an env is done right after its reset")
    data.set("done", done)
    data.set("terminated", terminated.clone() if terminated is done else terminated)
    if truncated is not None:
        data.set("truncated", truncated)


def require_as_specified(data: TensorDictBase, specs: Composite, lead: int, what: str) -> None:
    """That each leaf is there, with the dtype and (behind ``lead`` dimensions) the shape that its spec says."""
    for key, spec in specs.items(True, True):
        value = data.get(key, None)
        problem = None
        if value is None:
            problem = "is missing"
        elif value.dtype != spec.dtype:
            problem = f"has dtype {value.dtype}, its spec says {spec.dtype}"
        elif value.shape[len(data.batch_size) :] != spec.shape[lead:]:
            problem = f"has shape {tuple(value.shape)}, its spec says {tuple(spec.shape)}"
        if problem:
            raise EnvDataError(f"{what} {show(as_key(key))} {problem}")


def hold_others(after: TensorDictBase, root: TensorDictBase, stepped: torch.Tensor) -> None:
    """Let the envs that were not ``stepped`` be after the step as they were at its root, with a reward of zero."""
    for key in after.keys(True, True):
        value, before = after.get(key), root.get(key, None)
        where = stepped.reshape(*stepped.shape, *[1] * (value.ndim - stepped.ndim))
        after.set(key, torch.where(where, value, torch.zeros_like(value) if before is None else before))


def stack_steps(
    steps: Sequence[TensorDictBase],
    batch_size: torch.Size,
    device: torch.device | str | None,
    *,
    dense: bool,
) -> TensorDictBase:
    """Steps side by side in a last dimension named "time"."""
    if device is not None:
        steps = [step.to(device) for step in steps]
    dim = len(batch_size)
    stacked = torch.stack(list(steps), dim) if dense else LazyStackedTensorDict.lazy_stack(list(steps), dim)
    stacked.names = [None] * dim + ["time"]
    return stacked


__all__ = ["complete_flags", "hold_others", "next_root", "require_as_specified", "stack_steps", "step_mdp"]

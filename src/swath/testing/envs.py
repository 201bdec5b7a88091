"""The contract of an env."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from swath.collectors.single import Collector
from swath.envs.base import EnvBase


def check_env(env: EnvBase, *, num_steps: int = 100, seed: int = 0) -> None:
    """Raise ``AssertionError`` at the first rule that ``env`` breaks; ends with new episodes in it.

    Checked: specs start with the batch size; reset and step give just the keys, shapes and dtypes of the specs; no
    flag is set after a reset; done is terminated or truncated; observations at the root are those that came next
    before; a partial reset leaves the other envs alone; a seed gives the same data again; a collector delivers
    exactly what was asked for, with the true last observation of each episode.
    """
    _check_specs(env)
    root = env.reset()
    _check_against_specs(env, root, ("observation", "done"), "reset()")
    _require(not bool(root["done"].any()), "a flag is set right after reset()")
    stepped = env.rand_step(root)
    _check_against_specs(env, stepped["next"], ("observation", "reward", "done"), "step()")
    _check_against_specs(env, stepped, ("action",), "rand_action()")
    fake = env.fake_tensordict()
    _require(fake["next"].batch_size == env.batch_size, "fake_tensordict() has another batch size than the env")
    if env.batch_size.numel() > 1 and env.resets_single_envs:
        _check_partial_reset(env)
    _check_collected(env, num_steps, seed)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise AssertionError(f"check_env: {rule}")


def _check_specs(env: EnvBase) -> None:
    for kind in ("observation", "action", "reward", "done"):
        spec = getattr(env, f"full_{kind}_spec")
        _require(len(spec.keys(True, True)) > 0, f"full_{kind}_spec is empty")
        for key, leaf in spec.items(True, True):
            _require(
                leaf.shape[: len(env.batch_size)] == env.batch_size,
                f"the {kind} spec of {key!r} has shape {tuple(leaf.shape)}, which does not start with the batch size "
                f"{tuple(env.batch_size)}",
            )
    drawn = env.rand_action()
    for key, leaf in env.full_action_spec.items(True, True):
        _require(leaf.is_in(drawn.get(key)), f"a random action {key!r} is not in its own spec: {drawn.get(key)}")


def _check_against_specs(env: EnvBase, data: TensorDictBase, kinds: tuple[str, ...], where: str) -> None:
    _require(data.batch_size == env.batch_size, f"{where} has batch size {tuple(data.batch_size)}")
    for kind in kinds:
        for key, leaf in getattr(env, f"full_{kind}_spec").items(True, True):
            value = data.get(key, None)
            _require(value is not None, f"{where} lacks {key!r}")
            assert value is not None
            _require(
                value.shape == leaf.shape and value.dtype == leaf.dtype,
                f"{where}: {key!r} has shape {tuple(value.shape)} and dtype {value.dtype}, its spec says "
                f"{tuple(leaf.shape)} and {leaf.dtype}",
            )


def _check_partial_reset(env: EnvBase) -> None:
    root = env.step_mdp(env.rand_step(env.reset()))
    mask = torch.zeros_like(root["done"])
    mask.view(-1)[0] = True
    again = env.reset(root.clone().set("_reset", mask))
    _require("_reset" not in again, "'_reset' is still there after a partial reset")
    for key in env.observation_keys:
        before, after = (td.get(key).flatten(0, len(env.batch_size) - 1) for td in (root, again))
        _require(torch.equal(before[1:], after[1:]), f"a partial reset changed {key!r} of an env that was not reset")


def _check_collected(env: EnvBase, num_steps: int, seed: int) -> None:
    first = _collect(env, num_steps, seed)
    again = _collect(env, num_steps, seed)
    time = len(env.batch_size)
    _require(first.shape == (*env.batch_size, num_steps), f"a batch has shape {tuple(first.shape)}")
    for key in first.keys(True, True):
        if key == ("collector", "traj_ids"):
            continue
        same = torch.equal(first.get(key).nan_to_num(), again.get(key).nan_to_num())
        _require(
            same, f"the same seed gives other data: {key!r} differs; does the env draw from a generator of its own?"
        )
    after = first["next"]
    over = after["done"]
    reasons = after["terminated"] | after.get("truncated", torch.zeros_like(over))
    _require(torch.equal(over, reasons), "done is not terminated or truncated")
    same_episode = ~over.squeeze(-1).narrow(time, 0, num_steps - 1)
    for key in env.observation_keys:
        came = after.get(key).narrow(time, 0, num_steps - 1)[same_episode]
        stands = first.get(key).narrow(time, 1, num_steps - 1)[same_episode]
        _require(torch.equal(came.nan_to_num(), stands.nan_to_num()), f"{key!r} at a root is not what came next before")
    ids = first["collector", "traj_ids"]
    changed = ids.narrow(time, 1, num_steps - 1) != ids.narrow(time, 0, num_steps - 1)
    _require(torch.equal(changed, ~same_episode), "a trajectory id changes elsewhere than at an episode's end")


def _collect(env: EnvBase, num_steps: int, seed: int) -> Any:
    collector = Collector(env, frames_per_batch=num_steps * env.batch_size.numel())
    try:
        collector.set_seed(seed)
        return collector.rollout()
    finally:
        collector.shutdown(close_env=False)

"""RayEvalWorker: one rollout at a time in a Ray actor, with its frames where the env renders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from swath.collectors.evaluation import call_factory, freeze_statistics
from swath.collectors.numbers import positive_int
from swath.copying import NotCopied
from swath.envs.making import make_env
from swath.errors import CollectorClosed
from swath.process.late_actor import RayHelper
from swath.rollout.exploration import exploring
from swath.weight_update.weights import apply_weights, flat_weights

_WHO = "a RayEvalWorker"
_SECONDS_TO_CLOSE = 5.0


class RayEvalWorker(NotCopied):
    """Has an env and a policy in a Ray actor, and plays one rollout after another there.

    (An ``Evaluator`` with ``backend="ray"`` plays a number of whole episodes instead.)

    Args:
        init_fn: called first in the actor, before torch, or anything else, is imported; or None.
        env_maker: makes the env, in the actor. Where it renders (``render_mode="rgb_array"``), each step is.
        policy_maker: makes the policy from the env.
        num_gpus: of the actor.
        reward_keys: where rewards are.
        name: for ``from_name``, by which other programs of the cluster use the same actor. It then stays until
            somebody's ``shutdown()``.
        remote_kwargs: further options of ``ray.remote``: ``num_cpus``, ``runtime_env``, …

    >>> worker = RayEvalWorker(None, make_env, make_policy, num_gpus=0)  # doctest: +SKIP
    >>> worker.submit(policy, max_steps=500)  # doctest: +SKIP
    >>> worker.poll(timeout=60)["reward"]  # doctest: +SKIP
    10.0
    """

    _owns = "an actor that evaluates"
    _instead_of_a_copy = "give it a name, and others RayEvalWorker.from_name(name)"

    def __init__(
        self,
        init_fn: Callable[[], Any] | None,
        env_maker: Callable[[], Any],
        policy_maker: Callable[[Any], Any],
        *,
        num_gpus: float = 1,
        reward_keys: str | tuple[str, ...] = ("next", "reward"),
        name: str | None = None,
        **remote_kwargs: Any,
    ) -> None:
        options = {"num_gpus": num_gpus, **remote_kwargs}
        if name is not None:
            options.update(name=name, lifetime="detached")
        self._set_up(
            RayHelper.launch(_WHO, options, init_fn, (__name__, "RolloutPlayer"), (env_maker, policy_maker)),
            reward_keys,
        )

    @classmethod
    def from_name(cls, name: str, *, reward_keys: str | tuple[str, ...] = ("next", "reward")) -> Self:
        """The worker of that name, which another program of this cluster has made.

        Raises:
            ValueError: there is none.
        """
        worker = cls.__new__(cls)
        worker._set_up(RayHelper.named(_WHO, name), reward_keys)
        return worker

    def _set_up(self, helper: RayHelper, reward_keys: str | tuple[str, ...]) -> None:
        self._helper: RayHelper | None = helper
        self._reward_key = reward_keys
        self._rollout: Any = None

    def submit(
        self, weights: Any, max_steps: int, *, deterministic: bool = True, break_when_any_done: bool = True
    ) -> None:
        """Start a rollout. One that is under way, or was not polled, is forgotten.

        Args:
            weights: a module's, a TensorDict's, a state dict's; None for those that were there last.
            max_steps: how long it may be.
            deterministic: how probabilistic policies choose.
            break_when_any_done: whether it ends with the first episode. If not, envs begin new ones.
        """
        max_steps = positive_int("max_steps", max_steps)
        sent = None
        if weights is not None:
            tensors = flat_weights(weights).items()
            sent = {name: tensor.detach().cpu() for name, tensor in tensors if isinstance(tensor, torch.Tensor)}
        self._rollout = self._open().start(
            "play", sent, max_steps, self._reward_key, bool(deterministic), bool(break_when_any_done)
        )

    def poll(self, timeout: float | None = 0) -> dict[str, Any] | None:
        """What came of the rollout, once: None if nothing was submitted, or it is not over within ``timeout`` seconds.

        ``"reward"`` is the mean sum of an episode's rewards, ``"frames"`` a video ``[1, time, channels, height,
        width]`` of bytes, or None. Raises what the rollout raised.

        Args:
            timeout: None waits until it is over.

        Raises:
            NodeLost: the actor is gone.
        """
        helper = self._open()
        if self._rollout is None or not helper.is_ready(self._rollout, timeout):
            return None
        rollout, self._rollout = self._rollout, None
        return helper.result(rollout)

    def _open(self) -> RayHelper:
        if self._helper is None:
            raise CollectorClosed("this RayEvalWorker was shut down; make a new one")
        return self._helper

    def shutdown(self) -> None:
        """Close the env, and end the actor, for all who use it; harmless when called again."""
        helper, self._helper, self._rollout = self._helper, None, None
        if helper is not None:
            helper.close(_SECONDS_TO_CLOSE)


class RolloutPlayer:
    """In the actor."""

    def __init__(self, plan: tuple[Callable[[], Any], Callable[[Any], Any]], should_stop: Callable[[], bool]) -> None:
        env_maker, policy_maker = plan
        self._env = make_env(env_maker)
        freeze_statistics(self._env)
        self._policy = call_factory(policy_maker, self._env)
        if isinstance(self._policy, nn.Module):
            self._policy.eval()

    def play(
        self, weights: Any, max_steps: int, reward_key: Any, deterministic: bool, break_when_any_done: bool
    ) -> dict[str, Any]:
        if weights is not None:
            apply_weights(self._policy, weights)
        frames: list[torch.Tensor] = []

        def film(env: Any, data: TensorDictBase) -> None:
            frame = rendered(self._env)
            if frame is not None:
                frames.append(frame)

        kind = InteractionType("deterministic" if deterministic else "random")
        with exploring(kind), torch.no_grad():
            data = self._env.rollout(max_steps, self._policy, film, break_when_any_done=break_when_any_done)
        video = torch.stack(frames).unsqueeze(0) if frames else None
        return {"reward": mean_return(data, reward_key), "frames": video}

    def close(self) -> None:
        self._env.close(raise_if_closed=False)


def mean_return(data: TensorDictBase, reward_key: Any) -> float:
    """Over envs, of what each got: in the mean of its episodes that ended, or so far if none did."""
    num_steps = data.shape[-1]
    rewards = data.get(reward_key).double().reshape(-1, num_steps, data.get(reward_key).shape[data.ndim :].numel())
    done = data.get(("next", "done")).reshape(rewards.shape[0], num_steps, -1).any(-1)
    each = []
    for of_env, ends in zip(rewards.mean(-1), done, strict=True):
        last = ends.nonzero().reshape(-1).tolist()
        each.append(of_env[: last[-1] + 1].sum() / len(last) if last else of_env.sum())
    return torch.stack(each).mean().item()


def rendered(env: Any) -> torch.Tensor | None:
    """The picture ``[channels, height, width]`` of an env that renders pictures."""
    while getattr(env, "base_env", None) is not None or hasattr(env, "guest"):
        env = env.guest if hasattr(env, "guest") else env.base_env
    for renders in (getattr(env, "env", None), getattr(env, "_env", None), env):
        render = getattr(renders, "render", None)
        if getattr(renders, "render_mode", None) == "rgb_array" and callable(render):
            picture = torch.as_tensor(np.array(render()))
            if picture.ndim == 3 and picture.shape[-1] in (3, 4):
                picture = picture[..., :3].permute(2, 0, 1)
            return picture.to(torch.uint8)
    return None

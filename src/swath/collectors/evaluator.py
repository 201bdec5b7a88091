"""Evaluator: how good the policy is by now, found out beside training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from swath.collectors.devices import DeviceLike
from swath.collectors.evaluation import EvaluationPlan, Key
from swath.collectors.evaluation_backends import EvaluationBackend, ProcessBackend, ThreadBackend
from swath.collectors.evaluation_ray import RayBackend
from swath.collectors.evaluation_schemes import check_schemes, require_model
from swath.collectors.evaluation_thread import EvaluationThread, Result, result_of
from swath.collectors.numbers import positive_int, seed_number
from swath.collectors.single import Collector
from swath.copying import NotCopied
from swath.data.trajectories import TrajFormat
from swath.envs.making import is_env
from swath.errors import require_one_of
from swath.hints import ExplainsGuesses, explains_unknown
from swath.states import require_counters
from swath.weight_update.scheme import WeightSyncScheme
from swath.weight_update.weights import flat_weights, weights_for_part

BusyPolicy = Literal["error", "skip", "queue"]

_BACKENDS = ("thread", "process", "ray")
_BUSY_POLICIES = ("error", "skip", "queue")
#: Of a collector, what is the evaluator's own business.
_NOT_FOR_COLLECTORS = (
    *("create_env_fn", "policy", "policy_factory", "frames_per_batch", "total_frames", "max_frames_per_traj"),
    *("exploration_type", "device", "interruptor", "replay_buffer", "split_trajs", "trajs_per_batch"),
)
#: … and what an evaluation has no place for: episodes are neither postprocessed, nor random, nor cut at batches.
_WITHOUT_EFFECT = (
    *("postproc", "init_random_frames", "set_truncated", "reset_at_each_iter", "return_same_td", "extend_buffer"),
    *("pre_collect_hook", "post_collect_hook", "weight_updater", "num_collectors", "backend", "backend_options"),
    *("sync", "worker_idx", "traj_pool", "control"),
)


class Evaluator(NotCopied, ExplainsGuesses):
    """Lets a policy play whole episodes, and tells what it got.

    ``evaluate`` waits for the result. ``trigger_eval`` does not: training goes on, and ``poll`` or ``wait`` give
    results in the order in which they were triggered. The weights are those of the moment of the call.

    Each env plays a fixed share of the episodes, its first ones; so that the result does not depend on which end
    first.

    Args:
        env: an env, or a function that makes one. Several play at a time if it is a ``SerialEnv`` or ``ParallelEnv``.
        policy: what is trained; a copy of it is evaluated, in eval mode, and its own mode is left alone.
        policy_factory: a function of the env that makes the policy, instead of ``policy``.
        num_trajectories: how many episodes.
        max_steps: truncate them after this many steps.
        frames_per_batch: how many frames to play between two looks at which episodes are over; ``max_steps`` or 1000.
        collector_cls, collector_kwargs: ``Collector`` or a subclass (or its name), and further arguments for it;
            ``traj_format="cat"`` is for what ``metrics_fn`` gets.
        weight_sync_schemes: evaluate in a process, and have weights brought there by these, by model id: "policy",
            or a path such as "env.transform[0]". Without, all weights that are given are sent with the order.
        log_prefix: what names in results begin with.
        reward_keys, done_keys: where rewards are, and what ends an episode.
        device: of policy and env.
        exploration_type: how probabilistic policies choose.
        metrics_fn: from all episodes ``[num_trajectories, longest]``, padded with zeros, with a
            ``("collector", "mask")``, to further entries of the result; or, with ``traj_format="cat"``, from episodes
            one behind the other, told apart by ``("collector", "traj_ids")``. Called where the evaluation is done.
        dump_video: call ``dump(step=...)`` of the env, and of its transforms, after each evaluation: of those that have
            it, and without the step if they take none.
        on_result: called with each result as a flat TensorDict, in the evaluator's thread. What it raises is logged.
        busy_policy: when one is triggered while another runs: "skip" returns False, "error" raises, "queue" waits.
        backend: "thread"; or "process", or "ray" (an actor), in which env and policy are made: ``env`` must be a
            function then, and ``policy_factory`` be given.
        init_fn: called first in the process; in an actor, before anything is imported.
        num_gpus, ray_kwargs: of the actor, and further options of ``ray.remote`` for it.

    Raises:
        ValueError: an unknown ``backend`` or ``busy_policy``, both or neither of ``policy`` and ``policy_factory``, or
            what cannot be made in a process.

    >>> from swath.collectors import RandomPolicy
    >>> with Evaluator("CartPole-v1", RandomPolicy(), num_trajectories=5, max_steps=3) as evaluator:
    ...     result = evaluator.evaluate(step=1000)
    >>> result["eval/reward"], result["eval/num_episodes"], result["eval/step"]
    (3.0, 5, 1000)
    """

    _owns = "a thread or a process that evaluates"

    @explains_unknown
    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        collector_cls: type[Collector] | str | None = None,
        collector_kwargs: Mapping[str, Any] | None = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        log_prefix: str = "eval",
        reward_keys: Key = ("next", "reward"),
        done_keys: Key = ("next", "done"),
        device: DeviceLike = None,
        exploration_type: InteractionType | str | None = InteractionType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDictBase], Any] | None = None,
        busy_policy: BusyPolicy = "skip",
        backend: str = "thread",
        init_fn: Callable[[], Any] | None = None,
        num_gpus: float = 1,
        ray_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        require_one_of("busy_policy", busy_policy, _BUSY_POLICIES)
        if weight_sync_schemes is not None and backend == "ray":
            raise TypeError(
                "weight_sync_schemes are for a process; to a Ray actor Ray brings the weights: leave them out"
            )
        schemes = None if weight_sync_schemes is None else check_schemes(weight_sync_schemes)
        if schemes is not None and backend == "thread":  # as in TorchRL
            backend = "process"
        _check_sources(backend, env, policy, policy_factory)
        settings = dict(collector_kwargs or {})
        traj_format = _check_format(settings.pop("traj_format", None))
        plan = EvaluationPlan(
            env=env,
            policy=policy,
            policy_factory=policy_factory,
            num_trajectories=positive_int("num_trajectories", num_trajectories),
            max_steps=None if max_steps is None else positive_int("max_steps", max_steps),
            frames_per_batch=None if frames_per_batch is None else positive_int("frames_per_batch", frames_per_batch),
            collector_cls=_check_collector(collector_cls, settings),
            collector_kwargs=settings,
            traj_format=traj_format,
            reward_key=reward_keys,
            done_key=done_keys,
            device=device,
            exploration_type=None if exploration_type is None else InteractionType(exploration_type),
            metrics_fn=metrics_fn,
            dump_video=dump_video,
        )
        #: Whose weights are evaluated where none are given.
        self._policy = policy
        self._busy_policy = busy_policy
        self._num_own_steps = 0
        self._lock = threading.Lock()
        #: Those of ``trigger_eval`` that were not read, in order.
        self._triggered: deque[Future[Result]] = deque()
        #: The models that weights can be given for; None: the policy, and what any path leads to.
        self._models = None if schemes is None else tuple(schemes)
        self._backend: EvaluationBackend
        if backend == "ray":
            self._backend = RayBackend(plan, init_fn, {"num_gpus": num_gpus, **(ray_kwargs or {})})
        elif backend == "process":
            self._backend = ProcessBackend(plan, init_fn, schemes)
        else:
            self._backend = ThreadBackend(plan)
        self._thread = EvaluationThread(self._backend, log_prefix, on_result)

    # -- evaluating ------------------------------------------------------------------------------------------------

    def evaluate(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> Result:
        """Evaluate, after whatever was triggered before, and return the result.

        Args:
            weights: a module's, a TensorDict's, a state dict's. Without, those that the trained ``policy`` has now; if
                there was a ``policy_factory``, those that were evaluated last.
            step: for the result's ``step``; without, evaluations are counted.
            weights_dict: weights by model: ``"policy"`` (if they are not given as ``weights``), and paths such as
                ``"env.transform[0]"``, whose weights are all that the transform's state has.
        """
        sources = self._choose_weights(weights, weights_dict)
        self._thread.require_other("evaluate")
        with self._lock:
            future = self._submit(sources, step)
        return result_of(future)

    def trigger_eval(
        self, weights: Any = None, step: int | None = None, *, weights_dict: Mapping[str, Any] | None = None
    ) -> bool:
        """Start an evaluation, with arguments as those of ``evaluate``; False if it was skipped."""
        sources = self._choose_weights(weights, weights_dict)
        with self._lock:
            if self._thread.is_busy and self._busy_policy == "skip":
                return False
            if self._thread.is_busy and self._busy_policy == "error":
                raise RuntimeError(
                    "an evaluation is under way: wait() for it, ask `pending` first, or make the Evaluator with "
                    "busy_policy='skip' or 'queue'"
                )
            self._triggered.append(self._submit(sources, step))
        return True

    def _choose_weights(self, weights: Any, weights_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        sources = {name: source for name, source in (weights_dict or {}).items() if source is not None}
        for name in sources:
            require_model(name)
        if weights is not None and "policy" in sources:
            raise ValueError("give the policy's weights as weights or in weights_dict, not both")
        if weights is not None:
            sources["policy"] = weights
        for name in sources:
            if self._models is not None and name not in self._models:
                known = ", ".join(map(repr, self._models)) or "none"
                raise KeyError(f"weight_sync_schemes has no scheme for {name!r}; it has {known}")
        return sources

    def _submit(self, sources: dict[str, Any], step: int | None) -> Future[Result]:
        if "policy" not in sources and isinstance(self._policy, nn.Module):
            sources["policy"] = self._policy
        weights = {name: _snapshot(name, source) for name, source in sources.items()}
        future = self._thread.submit(weights, self._num_own_steps if step is None else step)
        if step is None:
            self._num_own_steps += 1
        return future

    def poll(self, timeout: float = 0) -> Result | None:
        """The oldest result of ``trigger_eval`` that was not read, if there is one within ``timeout`` seconds.

        Raises what the evaluation raised.
        """
        return self._next_result(timeout)

    def wait(self, timeout: float | None = None) -> Result | None:
        """As ``poll``, but waits until the evaluation is over; None at once if nothing was triggered."""
        return self._next_result(timeout)

    def _next_result(self, timeout: float | None) -> Result | None:
        with self._lock:
            if not self._triggered:
                return None
            oldest = self._triggered[0]
        if timeout is None and not oldest.done():
            self._thread.require_other("wait")
        try:
            oldest.exception(timeout)
        except TimeoutError:
            return None
        except CancelledError:  # by shutdown()
            pass
        with self._lock:
            if not self._triggered or self._triggered[0] is not oldest:  # another thread has read it
                return None
            self._triggered.popleft()
        return None if oldest.cancelled() else oldest.result()

    def stats(self) -> dict[str, Any]:
        """How many evaluations there were, whether one is under way, the numbers of the last result; never blocks."""
        last = {name: _as_number(value) for name, value in self._thread.last.items()}
        numbers = {name: value for name, value in last.items() if value is not None}
        return {"evaluations": self._thread.num_done, "pending": self.pending, **numbers}

    @property
    def pending(self) -> bool:
        """Whether an evaluation is under way, or waits for its turn."""
        return self._thread.is_busy

    @staticmethod
    def extract_weights(module: nn.Module) -> TensorDict:
        """A copy of a module's weights and buffers, in main memory.

        >>> sorted(Evaluator.extract_weights(nn.Linear(1, 1)).keys())
        ['bias', 'weight']
        """
        weights = TensorDict({}, batch_size=[], device="cpu")
        for name, tensor in flat_weights(module).items():
            weights[tuple(name.split("."))] = tensor.detach().clone().cpu()
        return weights

    # -- state -----------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed the envs and, in a process, the policy's sampling: the same evaluations follow as after the last time.

        (A thread leaves torch's generator alone, from which training draws as well.)

        Raises:
            RuntimeError: an evaluation is under way.
        """
        with self._lock:
            if self._thread.is_busy:
                raise RuntimeError("set_seed while an evaluation is under way: wait() for it first")
            backend = self._backend
            future = self._thread.call(lambda: backend.set_seed(seed_number(seed), static_seed))
        return result_of(future)

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations were counted.

        Raises:
            RuntimeError: an evaluation is under way, or a result was not read.
        """
        with self._lock:
            self._require_nothing_unread("state_dict")
            return {"step": self._num_own_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        with self._lock:
            self._require_nothing_unread("load_state_dict")
            require_counters("Evaluator", state_dict, "the state of an Evaluator", ("step",))
            self._num_own_steps = state_dict["step"]

    def _require_nothing_unread(self, what: str) -> None:
        if self._triggered or self._thread.is_busy:
            raise RuntimeError(f"{what} while a result is pending or unread: wait() for it first")

    # -- life ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float = 5) -> None:
        """Stop what is under way, and close the env; harmless when called again. Results that are there stay."""
        self._thread.shut_down(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        thread = self.__dict__.get("_thread")
        if thread is not None:
            thread.shut_down(2.0)

    def __repr__(self) -> str:
        return f"Evaluator({type(self._backend).__name__}, pending={self.pending})"


# -- arguments -------------------------------------------------------------------------------------------------------


def _check_sources(backend: str, env: Any, policy: Any, policy_factory: Any) -> None:
    require_one_of("backend", backend, _BACKENDS)
    if (policy is None) == (policy_factory is None):
        raise ValueError("an Evaluator needs either policy or policy_factory, and not both")
    if backend == "thread":
        return
    if is_env(env) or not (callable(env) or isinstance(env, str)):
        raise ValueError(
            f"backend={backend!r} makes the env elsewhere: give a function that makes it (a callable), not an env"
        )
    if policy_factory is None:
        raise ValueError(
            f"backend={backend!r} makes the policy elsewhere: give policy_factory, and weights to evaluate"
        )


def _check_format(traj_format: Any) -> TrajFormat:
    if traj_format not in (None, "padded", "cat"):
        raise ValueError(f"collector_kwargs: traj_format must be 'padded' or 'cat', got {traj_format!r}")
    return traj_format or "padded"


def _check_collector(collector_cls: Any, collector_kwargs: Mapping[str, Any]) -> type[Collector]:
    for name in collector_kwargs:
        if name in _NOT_FOR_COLLECTORS:
            raise ValueError(f"collector_kwargs: {name} is for the Evaluator to set; it has arguments of its own")
        if name in _WITHOUT_EFFECT and collector_kwargs[name]:
            raise ValueError(
                f"collector_kwargs: {name} has no effect on whole episodes that are summed up; metrics_fn sees them all"
            )
    if collector_cls is None:
        return Collector
    if isinstance(collector_cls, str):
        from swath import collectors  # which has this class, too

        collector_cls = getattr(collectors, collector_cls, collector_cls)
    if not (isinstance(collector_cls, type) and issubclass(collector_cls, Collector)):
        raise TypeError(
            f"collector_cls must be Collector or a subclass, got {collector_cls!r}; for several envs at a time, let "
            "the env be a SerialEnv or a ParallelEnv"
        )
    return collector_cls


def _snapshot(model_id: str, source: Any) -> Mapping[str, torch.Tensor]:
    """A copy that training does not change."""
    tensors = flat_weights(source if model_id == "policy" else weights_for_part(source)).items()
    return {name: tensor.detach().clone() for name, tensor in tensors if isinstance(tensor, torch.Tensor)}


def _as_number(value: Any) -> float | None:
    """Of an entry of a result, which may be anything that ``metrics_fn`` returns; None for what is no number."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, (int, float)) else None

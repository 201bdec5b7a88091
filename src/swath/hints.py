"""What people guess, from other libraries or from last year's names, and what it is called here: one sentence each.

A table for each family of classes: arguments of constructors, and attributes. A class has those of its bases, too, by
their names, so that this module imports none of them. Each sentence is tried by ``tests/test_hints.py``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_SEVERAL = "a Collector has one env: put several into SerialEnv(n, make_env), or use MultiCollector([make_env] * n)"
_LIST = "give a list with a factory for each env, [make_env] * n; num_workers= is how many processes share them"
_LEARNER = "a collector only collects; the learner, with its settings, is yours"
_LOGGING = "log what you like of each batch in your own loop; stats() has the rates"
_SPACES = "leave it out: the first frames say what is stored"
_FRAMES = "frames_per_batch=, of all envs together"
_TURNS = "frames_per_batch=, and how often your loop trains; or, after start(), the buffer's rate_limiter="
_PLACES = "a SerialEnv steps envs in turns, a ParallelEnv in processes; a MultiCollector takes the policy to them"

#: By the name of a class: guesses, and what to say.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "BaseCollector": {
        "seed": "call set_seed(seed) on what is made, before the first batch",
        "env env_fn env_fns env_id env_name env_creator make_env create_env envs": "create_env_fn=, the first argument",
        "agent actor model policy_fn act algo module": "policy=, the second argument",
        "n_steps num_steps steps rollout_length rollout_steps rollout_fragment_length": _FRAMES,
        "batch_size train_batch_size steps_per_batch frames_per_batch_": _FRAMES,
        "total_timesteps num_timesteps timesteps max_frames num_frames n_frames train_for_env_steps": "total_frames=",
        "n_timesteps num_env_steps": "total_frames=",
        "max_episode_steps max_episode_length max_steps time_limit horizon episode_length": "max_frames_per_traj=",
        "learning_starts warmup_steps random_steps start_steps initial_random_steps": "init_random_frames=",
        "n_workers workers num_env_runners num_rollout_workers num_processes n_jobs": "num_workers= of MultiCollector",
        "num_envs_per_env_runner num_envs_per_worker n_envs_per_worker": "envs_per_worker= of a MultiCollector",
        "policy_kwargs net_arch": "make the policy with them; a collector takes it as it is",
        "train_freq gradient_steps": _TURNS,
        "vec_env_cls vectorization_mode": _PLACES,
        "verbose progress_bar": _LOGGING,
        "gamma learning_rate lr n_epochs gae_lambda ent_coef clip_range optimizer loss_module loss": _LEARNER,
        "callback callbacks on_batch": "post_collect_hook= is called with each batch",
        "logger log_dir tensorboard_log": _LOGGING,
        "buffer rb memory": "replay_buffer=",
        "buffer_size capacity": "replay_buffer=, a ReplayBuffer(storage=LazyTensorStorage(size))",
        "deterministic explore exploration_mode": "exploration_type=",
        "env_kwargs env_config": "create_env_kwargs=",
        "passing_device": "env_device=, and storing_device= for what is delivered",
        "render render_mode": "make the env with it: GymEnv(name, render_mode=...)",
        "wrapper_class wrappers": "let create_env_fn= be a function that makes the env and wraps it",
        "norm_obs norm_reward transforms": "put the env into a TransformedEnv(env, transform)",
        "num_episodes n_episodes episodes": "trajs_per_batch=, whole episodes; total_frames= is when to stop",
    },
    "Collector": {"n_envs num_envs num_workers envs_per_worker": _SEVERAL},
    "MultiCollector": {"n_envs num_envs": _LIST},
    "AsyncBatchedCollector": {"n_envs num_envs": _LIST},
    "NodesCollector": {
        "n_envs num_envs": "create_env_fn= is a list with an env for each node; a SerialEnv there has several",
        "num_nodes n_nodes num_workers n_workers": "num_collectors=, if create_env_fn= is no list with one for each",
    },
    "EnvBase": {
        "seed": "call set_seed(seed) on what is made",
        "n_envs num_envs": "their number comes first: SerialEnv(n, make_env), ParallelEnv(n, make_env)",
        "env_fn env_fns env_id env make_env": "create_env_fn=, the second argument: a function, an id, or a list",
        "env_kwargs": "create_env_kwargs=",
        "start_method context": "mp_start_method=",
        "wrapper_class wrappers": "let create_env_fn= be a function that makes the env and wraps it",
    },
    "GymWrapper": {
        "n_envs": "num_envs=, for several in one process",
        "num_workers": "their number comes first: ParallelEnv(n, lambda: GymEnv(name)) steps them in processes",
        "transform transforms": "put the env into a TransformedEnv(env, transform)",
        "monitor_dir": "RewardSum and StepCounter count returns and lengths; so do the batches' own episodes",
    },
    "ReplayBuffer": {
        "capacity buffer_size size max_size maxlen max_len": "storage=LazyTensorStorage(size)",
        "device": "storage=LazyTensorStorage(size, device=device)",
        "observation_space action_space observation_shape action_shape obs_shape obs_dim act_dim": _SPACES,
        "n_envs num_envs": "leave it out: frames that collectors write keep their envs apart by themselves",
        "optimize_memory_usage": "leave it out; compact_obs= of collectors leaves out what is there twice",
        "handle_timeout_termination": "leave it out: terminated and truncated are stored apart",
        "alpha beta": "sampler=PrioritizedSampler(size, alpha, beta)",
        "n_step n_steps gamma": "transform=MultiStepTransform(n_steps, gamma)",
        "seed": "generator=torch.Generator().manual_seed(seed)",
        "transforms": "transform=",
        "sequence_length seq_len slice_len": "sampler=SliceSampler(slice_len=)",
    },
    "Storage": {
        "capacity buffer_size size maxlen max_len": "max_size=, the first argument",
        "path folder dir directory filename": "scratch_dir= of a LazyMemmapStorage",
    },
    "Sampler": {
        "sequence_length seq_len slice_length batch_length": "slice_len= of a SliceSampler",
        "batch_size": "batch_size= of the ReplayBuffer, or sample(batch_size)",
        "seed": "generator= of the ReplayBuffer",
        "capacity size buffer_size max_size": "max_capacity= of a PrioritizedSampler; others need none",
        "priority_alpha": "alpha= of a PrioritizedSampler",
        "priority_beta": "beta= of a PrioritizedSampler",
    },
    "Evaluator": {
        "create_env_fn env_fn eval_env make_env env_id": "env=, the first argument",
        "agent actor model": "policy=, the second argument",
        "n_eval_episodes num_episodes n_episodes episodes eval_episodes num_trajs": "num_trajectories=",
        "max_episode_steps max_frames_per_traj time_limit": "max_steps=",
        "eval_freq eval_interval every": "call trigger_eval() when it is time for one",
        "deterministic": "exploration_type=",
        "seed": "call set_seed(seed) on what is made",
        "n_envs num_envs": "env=SerialEnv(n, make_env) lets several play at a time",
        "callback callbacks callback_on_new_best callback_after_eval": "on_result= is called with each result",
        "logger log_path best_model_save_path": "on_result= is called with each result: log, or save, there",
        "render": "make the env with it: GymEnv(name, render_mode=...)",
    },
    "PolicyService": {
        "policy agent actor module network": "model=, the first argument, or policy_factory=",
        "batch_size": "max_batch_size=",
        "max_wait batch_timeout wait_ms timeout_ms": "timeout=, in seconds",
        "num_actors num_workers n_clients num_envs": "num_clients=",
        "backend": "service_backend=",
        "host port address": "service_backend='ray' serves clients of other machines",
        "seed": "call torch.manual_seed(seed) before",
    },
}
_ARGUMENTS["SerialEnv"] = _ARGUMENTS["EnvBase"]  # which makes one, and is none itself
#: What is meant by arguments that are given by position, where these have names only.
_BY_NAME = dict.fromkeys(["ReplayBuffer", "TensorDictReplayBuffer"], "storage=LazyTensorStorage(size), batch_size=256")
_ATTRIBUTES: dict[str, dict[str, str]] = {
    "BaseCollector": {
        "learn train fit optimize train_step": "a collector only collects: train on each batch of `for batch in "
        "collector`, then call update_policy_weights_()",
        "collect collect_rollouts sample get_batch run step fetch": "iterate over it, or call next()",
        "seed": "set_seed(seed)",
        "close stop terminate": "shutdown()",
        "update_weights sync_weights set_policy load_policy sync_policy update_policy": "update_policy_weights_()",
        "save checkpoint save_checkpoint get_state": "torch.save(collector.state_dict(), file)",
        "load load_checkpoint set_state restore": "load_state_dict(torch.load(file))",
        "num_timesteps frames num_frames timesteps total_steps global_step n_frames": 'stats()["frames"]',
        "buffer rb memory": "replay_buffer",
        "predict eval evaluate evaluate_policy": "swath.Evaluator plays whole episodes; the policy itself is yours",
        "get_attr": "getattr_env(name)",
        "env_method set_attr": "map_fn(function) calls it with every env's collector",
        "update_policy_weights load_weights": "update_policy_weights_()",
        "get_weights": "state_dict() of the policy, which is yours",
        "next_batch get_rollout": "iterate over it, or call next()",
        "reset_env reset_envs": "reset()",
        "logger": _LOGGING,
        "resume": "start() goes on in the background after pause(); iterating goes on by itself",
    },
    "Collector": {"set_weights": "update_policy_weights_()"},
    "WorkerBatches": {"env envs": 'they are in the workers: get_distant_attr("env.batch_size") asks each'},
    "Dataset": {
        "observations actions rewards terminations truncations data transitions": 'frames["observation"], '
        'frames["action"], frames["next", "reward"]',
        "get_dataset iterate_episodes sample_episodes": "episodes says where each one starts, and how long it is",
        "columns keys": "frames.keys()",
    },
    "EnvBase": {
        "seed": "set_seed(seed)",
        "observation_space single_observation_space": "observation_spec",
        "action_space single_action_space": "action_spec",
        "sample_action random_action": "rand_action()",
        "num_envs n_envs": "batch_size",
        "terminate stop shutdown": "close()",
        "step_async step_wait": "AsyncEnvPool has async_step_send() and async_step_recv()",
    },
    "ReplayBuffer": {
        "push append store put store_transition insert add_transition": "add(frame), or extend(batch) for many",
        "add_batch extend_batch": "extend(batch)",
        "sample_batch get_batch": "sample(batch_size)",
        "size pos full ptr num_frames": "len(buffer)",
        "capacity buffer_size max_size": "storage.max_size",
        "clear reset": "empty()",
        "checkpoint": "dumps(folder), or state_dict()",
        "update_priorities": "update_priority(index, priority)",
    },
    "Evaluator": {
        "eval run evaluate_policy rollout": "evaluate()",
        "result get get_result results": "poll(), or wait()",
        "close stop terminate": "shutdown()",
        "trigger submit evaluate_async": "trigger_eval()",
        "seed": "set_seed(seed)",
    },
    "PolicyService": {
        "close stop terminate": "shutdown()",
        "predict infer act forward submit": "make a client() and call it: client(tensordict)",
        "update_weights load_state_dict sync_weights set_weights": "update_policy_weights_(module)",
        "get_client make_client connect": "client()",
        "run serve": "start()",
    },
    "InferenceClient": {"predict infer act get_action forward": "call it: client(tensordict)"},
    "Spec": {
        "space": "it is the spec itself that has n, how many choices there are, or low and high, the bounds",
        "sample": "rand()",
        "contains": "is_in(value)",
    },
}


def argument_hint(kind: type, name: str) -> str | None:
    """What an argument is called here."""
    return _look_up(_ARGUMENTS, kind, name)


def attribute_hint(kind: type, name: str) -> str | None:
    """What an attribute is called here."""
    return _look_up(_ATTRIBUTES, kind, name)


def _look_up(tables: Mapping[str, Mapping[str, str]], kind: type, name: str) -> str | None:
    for base in kind.__mro__:
        for guesses, sentence in tables.get(base.__name__, {}).items():
            if name in guesses.split():
                return sentence
    return None


def explains_unknown(
    init: Callable[P, R], without: Callable[[type, dict[str, Any]], Mapping[str, Any]] | None = None
) -> Callable[P, R]:
    """A constructor whose caller is told what was probably meant by a name that it does not know.

    (Without ``**kwargs`` in its signature, which would keep type checkers from seeing a misspelt name.) ``without``
    says which of the unknown ones are to be refused; the others are left out.
    """
    parameters = inspect.signature(init).parameters
    known = frozenset(parameters)
    by_position = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(by_position) and not takes_any:
            raise _too_many(type(self), by_position, [name for name in parameters if name not in by_position][1:])
        if not kwargs.keys() <= known:
            unknown = {name: kwargs.pop(name) for name in list(kwargs) if name not in known}
            refused = unknown if without is None else without(type(self), unknown)
            if refused:
                raise unknown_arguments(type(self), refused)
        return init(self, *args, **kwargs)  # type: ignore[call-arg]

    return cast("Callable[P, R]", checked)


def _too_many(kind: type, by_position: list[str], by_name: list[str]) -> TypeError:
    """The error of a call with more arguments than have a place."""
    taken = f"only {' and '.join(by_position)}" if by_position else "nothing"
    rest = _BY_NAME.get(kind.__name__) or ", ".join(f"{name}=" for name in by_name[:4]) + ", ..."
    return TypeError(f"{kind.__name__} takes {taken} by position; say the names of the others: {rest}")


def unknown_arguments(kind: type, names: Iterable[str], known: Iterable[str] | None = None) -> TypeError:
    """The error that says what was probably meant by each."""
    told = []
    known = list(parameters_of(kind) if known is None else known)
    for name in names:
        near = difflib.get_close_matches(name, known, n=1)
        hint = argument_hint(kind, name) or (f"did you mean {near[0]!r}?" if near else None)
        told.append(repr(name) + (f" ({hint})" if hint else ""))
    return TypeError(f"{kind.__name__} got an unknown argument: {', '.join(told)}")


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """What a class can be made with: of its constructor, and of those that it hands further names on to."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        found = {**{each.name: each for each in own if each.kind is not each.VAR_KEYWORD}, **found}
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            break
    return found


def no_attribute(thing: Any, name: str, inner: str | None = None) -> AttributeError:
    """The error that says what an attribute is called here, if people guess it; ``inner`` has not got it either."""
    kind, hint = type(thing), attribute_hint(type(thing), name)
    who = f"{kind.__name__} has no" if inner is None else f"neither {kind.__name__} nor {inner} has an"
    return AttributeError(f"{who} attribute {name!r}" + (f": {hint}" if hint else ""), name=name, obj=thing)


class ExplainsGuesses:
    """Whose missing attributes say what they are called here, and whose completion shows what is for users."""

    #: What is named without an underscore because other modules of swath use it: neither shown nor documented.
    _inner: ClassVar[tuple[str, ...]] = ()

    def __dir__(self) -> list[str]:
        hidden = inner_names(type(self))
        return [name for name in super().__dir__() if name not in hidden]

    if not TYPE_CHECKING:  # for whom every attribute would be there

        def __getattr__(self, name: str) -> Any:
            if inspect.getattr_static(type(self), name, None) is not None:
                return object.__getattribute__(self, name)  # a property that raised: say what it said
            raise no_attribute(self, name)


def inner_names(kind: type) -> frozenset[str]:
    """What a class has for other modules of swath only."""
    return frozenset(name for base in kind.__mro__ for name in vars(base).get("_inner", ()))


def wrapped(thing: Any, where: str, name: str) -> Any:
    """What has an attribute that ``thing`` has not: what it wraps. Nothing has a private one, nor any too early."""
    if name.startswith("_") or where not in thing.__dict__:
        raise AttributeError(f"{type(thing).__name__} has no attribute {name!r}")
    return thing.__dict__[where]


def forwarded(thing: Any, inner: Any, name: str) -> Any:
    """An attribute of what is wrapped."""
    try:
        return getattr(inner, name)
    except AttributeError:
        raise no_attribute(thing, name, type(inner).__name__) from None

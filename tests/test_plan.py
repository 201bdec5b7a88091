"""The plan test: for every kind of policy, the fast path gives what ``policy(tensordict)`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn

from counting import CountingEnv
from policies_for_tests import GRUNet, actor_critic, deterministic, mlp, recurrent, stochastic
from swath.collectors import Collector
from swath.envs import EnvBase, GymWrapper, SerialEnv, Unbounded
from swath.errors import PolicyInputError, PolicyOutputError
from swath.rollout.plan import PolicyPlan
from swath.rollout.policies import SampleCall, TensorCall, TensorDictCall
from swath.rollout.strip import Strip


class PixelEnv(gymnasium.Env):
    """Small pictures."""

    observation_space = spaces.Box(0, 1, (3, 8, 8), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.random((3, 8, 8), dtype=np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.np_random.random((3, 8, 8), dtype=np.float32), 0.0, False, False, {}


class MaskEnv(CountingEnv):
    """Says which actions are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(observation=self.observation_space, action_mask=spaces.MultiBinary(3))

    def _observe(self, action: float) -> Any:
        mask = self.np_random.integers(0, 2, 3).astype(np.int8)
        mask[self.np_random.integers(3)] = 1
        return {"observation": super()._observe(action), "action_mask": mask}


class Custom(nn.Module):
    """A module of one's own, with a parameter named after the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(observation)))


class AsksForFlag(Custom):
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, observation: torch.Tensor, done: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(observation) * ~done


class MutatesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation.mul_(0.5))


class Wrapped(TensorDictModuleBase):
    """Overrides forward."""

    in_keys: Any = ["observation"]  # noqa: RUF012
    out_keys: Any = ["action", "extra"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = self.net(tensordict["observation"])
        tensordict["extra"] = tensordict["action"].sum(-1)
        return tensordict


class RecurrentOnTensorDicts(TensorDictModuleBase):
    """Can start without its state."""

    in_keys: Any = ["observation", "hidden"]  # noqa: RUF012
    out_keys: Any = ["action", ("next", "hidden")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.net = GRUNet()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        hidden = tensordict.get("hidden", None)
        if hidden is None:
            hidden = torch.zeros((*tensordict.batch_size, 8))
        tensordict["action"], tensordict["next", "hidden"] = self.net(tensordict["observation"], hidden)
        return tensordict


class LSTMNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 8), nn.Linear(8, 3)

    def forward(self, observation: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, c = self.cell(observation, (h, c))
        return self.head(h), h, c


def normal_actor() -> ProbabilisticTensorDictSequential:
    class LocAndScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(4, 6)

        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loc, scale = self.net(observation).chunk(2, -1)
            return loc, scale.exp()

    return ProbabilisticTensorDictSequential(
        [
            TensorDictModule(LocAndScale(), in_keys=["observation"], out_keys=["loc", "scale"]),
            ProbabilisticTensorDictModule(
                in_keys=["loc", "scale"],
                out_keys=["action"],
                distribution_class=torch.distributions.Normal,
                distribution_kwargs={"validate_args": False},
                return_log_prob=True,
            ),
        ]
    )


def masked() -> TensorDictModule:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, observation: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
            return self.net(observation).masked_fill(action_mask == 0, -torch.inf)

    return TensorDictModule(Masked(), in_keys=["observation", "action_mask"], out_keys=["action"])


def hooked() -> TensorDictModule:
    policy: Any = deterministic()
    policy.module[0].register_forward_hook(lambda module, args, output: output + 1)
    return policy


def module_on_tensordict_with_hook() -> TensorDictModule:
    policy = deterministic()

    def add_one(module: nn.Module, args: Any, output: TensorDictBase) -> TensorDictBase:
        return output.set("action", output["action"] + 1)

    policy.register_forward_hook(add_one)
    return policy


def writes_a_dictionary() -> TensorDictModule:
    net = mlp()
    return TensorDictModule(
        lambda observation: {"action": net(observation), "value": observation.sum(-1)},
        in_keys=["observation"],
        out_keys=["action", "value"],
    )


def stack(*layers: nn.Module) -> Callable[[], TensorDictModule]:
    return lambda: TensorDictModule(nn.Sequential(*layers), in_keys=["observation"], out_keys=["action"])


def convolutional() -> TensorDictModule:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(-3), nn.LayerNorm(64), nn.Linear(64, 3)
    )
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def select_outputs() -> TensorDictSequential:
    return actor_critic().select_out_keys("action")


def function_of_observation() -> Callable:
    net = mlp()
    return lambda observation: net(observation)


def function_with_extras() -> Callable:
    net = mlp()
    return lambda observation: (net(observation), observation.sum(-1), observation * 2)


def on_tensordict_in_place() -> Callable:
    net = mlp()

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"] = net(tensordict["observation"])
        tensordict["nested", "value"] = tensordict["observation"].sum(-1)
        return tensordict

    return policy


def on_tensordict_new() -> Callable:
    net = mlp()

    def policy(td: TensorDictBase) -> TensorDictBase:
        return TensorDict({"action": net(td["observation"])}, batch_size=td.batch_size)

    return policy


def annotated() -> Callable:
    net = mlp()

    def policy(data: TensorDictBase) -> TensorDictBase:
        return data.set("action", net(data["observation"]))

    return policy


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.Sigmoid(), nn.ELU(0.7), nn.SELU(), nn.SiLU(), nn.GELU(),
    nn.GELU("tanh"), nn.LeakyReLU(0.2), nn.Softplus(), nn.Hardtanh(-0.5, 0.5), nn.Mish(), nn.ELU(inplace=True),
    nn.Softmax(-1), nn.Identity(), nn.Dropout(0.5),
]  # fmt: skip

KINDS: dict[str, Callable[[], Any]] = {
    "one layer": stack(nn.Linear(4, 3)),
    "no bias": stack(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)),
    "activation first": stack(nn.ReLU(inplace=True), nn.Linear(4, 3)),
    "activation last": stack(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh()),
    "identity last": stack(nn.Linear(4, 3), nn.Identity()),
    "nested stacks": stack(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU())), nn.Linear(8, 3)),
    "custom layer inside": stack(nn.Linear(4, 4), Custom(), nn.Tanh()),
    **{f"activation {layer}": stack(nn.Linear(4, 8), layer, nn.Linear(8, 3)) for layer in ACTIVATIONS},
    "deterministic": deterministic,
    "sequence": actor_critic,
    "nested sequence": lambda: TensorDictSequential(
        [actor_critic(), TensorDictModule(torch.tanh, ["action"], ["tanh"])]
    ),
    "sequence, outputs selected": select_outputs,
    "probabilistic": stochastic,
    "probabilistic, normal": normal_actor,
    "hook on a layer": hooked,
    "hook on the module": module_on_tensordict_with_hook,
    "forward overridden": Wrapped,
    "returns a dictionary": writes_a_dictionary,
    "inputs by keyword": lambda: TensorDictModule(Custom(), {"observation": "observation"}, ["action"]),
    "plain module": Custom,
    "bare nn.Linear": lambda: nn.Linear(4, 3),
    "function": function_of_observation,
    "function, extra outputs": function_with_extras,
    "function of a TensorDict": on_tensordict_in_place,
    "function, new TensorDict": on_tensordict_new,
    "function, annotated": annotated,
    "changes its input": lambda: TensorDictModule(MutatesItsInput(), ["observation"], ["action"]),
    "recurrent": recurrent,
    "recurrent, LSTM": lambda: TensorDictModule(
        LSTMNet(), in_keys=["observation", "h", "c"], out_keys=["action", ("next", "h"), ("next", "c")]
    ),
    "recurrent, on TensorDicts": RecurrentOnTensorDicts,
    "asks for a flag": lambda: TensorDictModule(
        AsksForFlag(), in_keys=["observation", "done"], out_keys=["action"]
    ),
    "action mask": masked,
    "convolutional": convolutional,
}  # fmt: skip


def make_env(kind: str, num_envs: int | None) -> EnvBase:
    gym_env = {"convolutional": PixelEnv, "action mask": MaskEnv}.get(kind, CountingEnv)
    if num_envs is None:
        return GymWrapper(gym_env())
    return SerialEnv(num_envs, lambda: GymWrapper(gym_env()))


def reference(policy: Any, root: TensorDict) -> TensorDictBase:
    """The ordinary call."""
    if isinstance(policy, TensorDictModuleBase):
        return policy(root)
    from swath.rollout.policies import TensorDictCall, policy_calls

    (call,) = policy_calls(policy, make_env("", None))
    if isinstance(call, TensorDictCall):
        return policy(root)
    result = policy(root["observation"])
    results = result if isinstance(result, tuple) else (result,)
    for key, value in zip(["action", "output1", "output2"], results, strict=False):
        root[key] = value
    return root


def compare(policy: Any, env: EnvBase, exploration: Any = InteractionType.RANDOM) -> PolicyPlan:
    """Three steps on rows against three ordinary calls, with the same random numbers."""
    first = {
        key: torch.rand((*env.batch_size, *field.shape)).to(field.dtype)
        if field.dtype.is_floating_point
        else torch.ones((*env.batch_size, *field.shape), dtype=field.dtype)
        for key, field in ((f.key, f) for f in env.row_layout().carried)
    }
    with torch.no_grad(), set_interaction_type(exploration):
        torch.manual_seed(0)
        plan = PolicyPlan.resolve(policy, env, first)
        strip = Strip(plan.layout, 3)
        bound = plan.bind(strip)
        bound.prepare()
        for row in range(3):
            for key in first:
                strip.carried[key].rows[row].copy_(first[key] * (row + 1 if first[key].is_floating_point() else 1))
        states = {key: torch.zeros_like(strip.carried[key].rows[0]) for key in plan.layout.policy_state}
        before = {key: column.tensor.clone() for key, column in strip.carried.items() if key in first}
        for row in range(3):
            root = TensorDict(
                {key: strip.carried[key].rows[row].clone() for key in first}, batch_size=env.batch_size
            ).update(states)
            root.update({flag: torch.zeros((*env.batch_size, 1), dtype=torch.bool) for flag in env.done_keys})
            given = root.clone()
            torch.manual_seed(row)
            expected = reference(policy, given)
            torch.manual_seed(row)
            bound.act(row)
            written = {key: column.rows[row] for key, column in strip.outputs.items()}
            written |= {("next", *key): strip.carried[key].rows[row + 1] for key in plan.layout.policy_state}
            new = {
                key if isinstance(key, tuple) else (key,)
                for key in expected.keys(True, True)
                if key not in root.keys(True)
            }
            assert set(written) == new
            for key, value in written.items():
                assert torch.equal(value, expected.get(key)), (key, value, expected.get(key))
                assert value.dtype == expected.get(key).dtype
            states = {key: expected.get(("next", *key)).clone() for key in states}
        for key, column in strip.carried.items():
            if key in before:
                assert torch.equal(column.tensor, before[key]), "the policy changed the env's observation"
    return plan


@pytest.mark.parametrize("num_envs", [None, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_plan_gives_what_the_policy_gives(kind: str, num_envs: int | None) -> None:
    torch.manual_seed(0)
    compare(KINDS[kind](), make_env(kind, num_envs))


@pytest.mark.parametrize(
    ("make", "exploration"),
    [(stochastic, kind) for kind in (InteractionType.RANDOM, InteractionType.MODE, InteractionType.DETERMINISTIC)]
    + [(normal_actor, kind) for kind in InteractionType.__members__.values() if kind is not InteractionType.MEDIAN],
)
def test_exploration_type_is_honoured(make: Callable[[], Any], exploration: InteractionType) -> None:
    compare(make(), make_env("", 3), exploration)


@pytest.mark.parametrize("num_envs", [None, 1, 5])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (torch.distributions.Categorical, ["logits"]),
        (torch.distributions.Categorical, ["probs"]),
        (torch.distributions.OneHotCategorical, ["logits"]),
        (torch.distributions.Normal, ["loc", "scale"]),
        (torch.distributions.Laplace, ["loc", "scale"]),
    ],
)
@pytest.mark.parametrize("return_log_prob", [True, False])
def test_distributions(kind: Any, names: list[Any], num_envs: int | None, return_log_prob: bool) -> None:
    class Parameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(mlp(4, 3) for _ in names)

        def forward(self, observation: torch.Tensor) -> Any:
            values = [net(observation) for net in self.nets]
            if names == ["probs"]:
                return values[0].exp()
            return values[0] if len(names) == 1 else (values[0], values[1].exp())

    policy = ProbabilisticTensorDictSequential(
        [
            TensorDictModule(Parameters(), in_keys=["observation"], out_keys=names),
            ProbabilisticTensorDictModule(
                in_keys=names, out_keys=["action"], distribution_class=kind, return_log_prob=return_log_prob
            ),
        ]
    )
    integers = kind is torch.distributions.Categorical
    if num_envs is None:
        env: EnvBase = GymWrapper(CountingEnv(), integers)
    else:
        env = SerialEnv(num_envs, lambda: GymWrapper(CountingEnv(), integers))
    compare(policy, env)


@pytest.mark.parametrize("make", [stochastic, normal_actor])
def test_invalid_parameters_raise_what_the_distribution_raises(make: Callable[[], Any]) -> None:
    policy = make()
    policy.module[1].distribution_kwargs.clear()  # with torch's own checks
    env = make_env("", 2)
    collector = Collector(env, policy, frames_per_batch=4)
    batches = iter(collector)
    next(batches)
    for parameter in policy.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        next(batches)


def test_common_policies_are_called_on_tensors() -> None:
    for make, kinds in [
        (deterministic, [TensorCall]),
        (actor_critic, [TensorCall] * 3),
        (stochastic, [TensorCall, SampleCall]),
        (recurrent, [TensorCall]),
        (Wrapped, [TensorDictCall]),
        (module_on_tensordict_with_hook, [TensorDictCall]),
    ]:
        plan = compare(make(), make_env("", 2))
        assert [type(call) for call in plan.calls] == kinds


def test_compiled_policy() -> None:
    policy = deterministic()
    env = SerialEnv(2, lambda: GymWrapper(CountingEnv()))
    env.set_seed(0)
    collector = Collector(env, policy, frames_per_batch=20, total_frames=20, compile_policy={"backend": "eager"})
    (batch,) = collector
    assert torch.allclose(batch["action"], policy.module(batch["observation"]), atol=1e-5)


def test_weights_changed_in_place_or_replaced_are_seen() -> None:
    policy: Any = deterministic()
    env = GymWrapper(CountingEnv())
    collector = Collector(env, policy, frames_per_batch=5)
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        policy.module[-1].weight.mul_(3)
    changed = next(batches)
    assert torch.allclose(changed["action"], policy.module(changed["observation"]), atol=1e-5)
    policy.module[-1] = nn.Linear(16, 3)
    policy.module[0].weight = nn.Parameter(torch.randn(16, 4))
    replaced = next(batches)
    assert torch.allclose(replaced["action"], policy.module(replaced["observation"]), atol=1e-5)
    policy.module[0].register_forward_hook(lambda module, args, output: output * 0)
    hooked = next(batches)
    assert torch.allclose(hooked["action"], policy.module(hooked["observation"]), atol=1e-5)


def test_what_is_exchanged_in_the_policy_is_seen() -> None:
    policy = actor_critic()
    collector = Collector(make_env("", 2), policy, frames_per_batch=8)
    batches = iter(collector)
    next(batches)

    def check() -> TensorDictBase:
        batch = next(batches)
        expected = policy(batch.select("observation"))
        for key in ("features", "action", "state_value"):
            assert torch.allclose(batch[key], expected[key], atol=1e-5), key
        return batch

    policy.module[0].module = Custom()
    policy.module[0].module.second = nn.Linear(16, 8)
    check()
    policy.module[1].register_forward_hook(lambda module, args, output: output.set("action", output["action"] * 0))
    assert not check()["action"].any()
    policy.register_forward_hook(lambda module, args, output: output.set("action", output["action"] + 7))
    assert bool((check()["action"] == 7).all())


def test_a_policy_may_keep_or_change_what_it_is_given() -> None:
    kept = []

    def policy(observation: torch.Tensor) -> torch.Tensor:
        kept.append(observation)
        if len(kept) > 600:  # not on the first call
            observation *= 0
        return torch.ones(3)

    collector = Collector(GymWrapper(CountingEnv()), policy, frames_per_batch=1200, total_frames=1200)
    (batch,) = collector
    assert torch.equal(torch.stack(kept[1:601])[:599], batch["observation"][:599])
    assert int((batch["observation"][600:, 0] == 0).sum()) == 0  # the episode number is never 0


def test_collecting_inside_inference_mode_gives_ordinary_tensors() -> None:
    with torch.inference_mode():
        collector = Collector(make_env("", 2), deterministic(), frames_per_batch=8, total_frames=8)
        (batch,) = collector
    assert not any(leaf.is_inference() for leaf in batch.values(True, True))
    weight = torch.ones(4, requires_grad=True)
    (batch["observation"] @ weight).sum().backward()


def test_under_autocast_the_plan_is_the_ordinary_call() -> None:
    policy = TensorDictSequential(
        [
            TensorDictModule(mlp(), in_keys=["observation"], out_keys=["logits"]),
            TensorDictModule(torch.Tensor.float, in_keys=["logits"], out_keys=["action"]),
        ]
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = compare(policy, make_env("", 3))
        assert [field.dtype for field in plan.layout.outputs] == [torch.bfloat16, torch.float32]
        with pytest.raises(PolicyOutputError, match=r"bfloat16, which envs cannot read; return action\.float\(\)"):
            compare(deterministic(), make_env("", 3))


def test_the_first_call_leaves_no_trace() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.net = mlp()

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.net(observation) + torch.rand(3)

    policy = Counts()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    collector = Collector(GymWrapper(CountingEnv()), policy, frames_per_batch=4, total_frames=4)
    assert torch.equal(torch.get_rng_state(), before)
    list(collector)
    assert int(policy.calls) == 4


# -- bad policies ----------------------------------------------------------------------------------------------------


def collect_with(policy: Any, **kwargs: Any) -> None:
    list(Collector(GymWrapper(CountingEnv()), policy, frames_per_batch=10, total_frames=20, **kwargs))


def test_missing_key_is_named_with_what_there_is() -> None:
    with pytest.raises(PolicyInputError, match=r"asks for 'observations'.*Did you mean 'observation'"):
        collect_with(TensorDictModule(mlp(), in_keys=["observations"], out_keys=["action"]))


def test_wrong_action_shape_names_both_shapes() -> None:
    with pytest.raises(PolicyOutputError, match=r"shape \(2,\) per env, the env takes \(3,\)"):
        collect_with(TensorDictModule(mlp(4, 2), in_keys=["observation"], out_keys=["action"]))


def test_integer_action_for_a_one_hot_env_tells_the_fix() -> None:
    with pytest.raises(PolicyOutputError, match="categorical_action_encoding=True"):
        collect_with(lambda observation: torch.tensor(1))


def test_float_action_for_an_integer_env_tells_the_fix() -> None:
    env = GymWrapper(CountingEnv(), categorical_action_encoding=True)
    with pytest.raises(PolicyOutputError, match="argmax"):
        Collector(env, lambda observation: torch.tensor(1.0), frames_per_batch=10)


def test_no_action_key() -> None:
    with pytest.raises(PolicyOutputError, match="does not write 'action'"):
        collect_with(TensorDictModule(mlp(), in_keys=["observation"], out_keys=["logits"]))


def test_none() -> None:
    with pytest.raises(PolicyOutputError, match="returned None"):
        collect_with(lambda observation: None)
    with pytest.raises(PolicyOutputError, match="returned None"):
        collect_with(lambda td: None)


def test_parameters_that_fit_nothing() -> None:
    with pytest.raises(TypeError, match="trust_policy=True"):
        collect_with(lambda position, velocity: position)


def test_not_callable() -> None:
    with pytest.raises(TypeError, match="must be callable"):
        collect_with(3)


def test_policy_that_raises_keeps_its_type() -> None:
    def policy(observation: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        collect_with(policy)
    assert "raised by the policy" in "".join(caught.value.__notes__)


def test_output_that_changes_shape_or_dtype_is_refused() -> None:
    calls = 0

    def policy(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return observation[:3], torch.zeros(2 if calls > 5 else 1)

    with pytest.raises(PolicyOutputError, match=r"'output1' is shape \(2,\)(.|\n)*in step 4 of this batch"):
        collect_with(policy)


@pytest.mark.parametrize("later", [None, (1, 2), "text"])
def test_output_that_is_no_tensor_later(later: Any) -> None:
    calls = 0

    def policy(observation: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return later if calls == 4 else torch.ones(3)

    with pytest.raises(PolicyOutputError, match=r"the policy's 'action' is .*; on its first call it was of shape"):
        collect_with(policy)


def test_a_policy_that_raises_later_is_named() -> None:
    calls = 0

    def policy(observation: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return torch.ones(3) / (calls != 7 or 1 // 0)

    with pytest.raises(ZeroDivisionError) as caught:
        collect_with(policy)
    assert "swath: raised by the policy, in step 5 of this batch" in caught.value.__notes__


def test_what_overrides_the_call_of_a_module_is_called() -> None:
    class Adds(TensorDictModule):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            return out.set("action", out["action"] + 3)

    compare(Adds(mlp(), ["observation"], ["action"]), make_env("", 2))
    policy: Any = deterministic()
    last = policy.module[-1]
    last.forward = lambda x: nn.Linear.forward(last, x) + 5
    compare(policy, make_env("", 2))
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        compare(deterministic(), make_env("", 2))
    finally:
        hook.remove()
    assert len(seen) == 2 * 7 * 3 + 7  # module, stack and five layers: three ordinary calls, three steps, the first


def test_a_layer_that_starts_to_work_in_place_later() -> None:
    net = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 3)).eval()
    collector = Collector(make_env("", 2), TensorDictModule(net, ["observation"], ["action"]), frames_per_batch=12)
    first = collector.rollout()
    net.train()
    second = collector.rollout()
    assert torch.equal(
        first["next", "observation"][:, :-1][~first["next", "done"][:, :-1, 0]],
        first["observation"][:, 1:][~first["next", "done"][:, :-1, 0]],
    )
    assert bool((second["observation"][..., 0] >= 1).all())  # the episode number, never dropped to 0
    assert bool((second["observation"][..., 0] == second["observation"][..., 0].round()).all())


def test_a_buffer_that_the_first_call_reassigns() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return observation[..., :3]

    policy = Counts()
    collect_with(policy)
    assert int(policy.calls) == 20


def test_unknown_state_shape_tells_how_to_say_it() -> None:
    def net(observation: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return observation[..., :3] + memory.sum(-1, keepdim=True), memory + 1

    policy: Any = TensorDictModule(net, in_keys=["observation", "memory"], out_keys=["action", ("next", "memory")])
    with pytest.raises(PolicyInputError, match=r"policy.state_spec = \{'memory'"):
        collect_with(policy)
    policy.state_spec = {"memory": Unbounded((2,))}
    collect_with(policy)

"""Captured policies give what calling them gives, to the last bit, whatever happens to them in between."""

from __future__ import annotations

import cProfile
import ctypes
import functools
import itertools
import operator
import pstats
import random
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules.module import register_module_forward_hook

import captured_policies as policies
from capture_checks import Change, Collected, assert_same_bits, bits, both_ways, collected
from captured_policies import Bound, Config, FromAttribute, FromItems, Net, Slotted
from counting import CountingEnv, make_counting
from policies_for_tests import recurrent
from swath.collectors import Collector
from swath.envs import SerialEnv
from swath.errors import CaptureError
from swath.rollout.capture import captured
from swath.rollout.capture.watch import Watch
from swath.rollout.plan import PolicyPlan
from swath.rollout.strip import Strip


def setter(**values: Any) -> Change:
    """Sets attributes of the policy; ``a__b`` is ``policy.a.b``."""

    def change(policy: Any) -> None:
        for path, value in values.items():
            *owners, name = path.split("__")
            owner = policy
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, name, value)

    return change


def optimizer_step(policy: Any) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    with torch.enable_grad():
        policy(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def replaced_parameter(policy: Any) -> None:
    policy.net.weight = nn.Parameter(policy.net.weight.detach() + 1)


def replaced_data(policy: Any) -> None:
    policy.net.weight.data = policy.net.weight.data * 3


def with_global(value: float) -> Change:
    return lambda policy: setattr(policies, "SCALE", value)


def class_attribute(value: float) -> Change:
    return lambda policy: setattr(type(policy), "shared", value)


def doubled(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def other_method(self: Any) -> float:
    return 5.0


def other_forward(self: Any, observation: torch.Tensor) -> torch.Tensor:
    return self.net(observation) - 7


def add_hook(policy: Any) -> None:
    policy.handle = policy.net.register_forward_hook(doubled)


def remove_hook(policy: Any) -> None:
    policy.handle.remove()


def own_class(base: type) -> Callable[[], Any]:
    """Of a class that no other policy has, which may be changed."""
    return lambda: type("Mine", (base,), {})()


#: The policy; what is changed, one after the other, each of which makes a difference.
CHANGES: dict[str, tuple[Callable[[], Any], list[Change]]] = {
    "optimizer step": (policies.Child, [optimizer_step, optimizer_step]),
    "parameter replaced": (Net, [replaced_parameter]),
    "a parameter's memory replaced": (Net, [replaced_data]),
    "parameter removed": (Net, [lambda policy: policy.net.register_parameter("bias", None)]),
    "module replaced": (Net, [lambda policy: setattr(policy, "net", nn.Linear(4, 3))]),
    "load_state_dict": (Net, [lambda policy: policy.load_state_dict(Net().state_dict())]),
    "weights untied": (policies.Tied, [lambda policy: setattr(policy.second, "weight", nn.Parameter(torch.eye(4)))]),
    "weights tied": (policies.Tied, [lambda policy: setattr(policy.second, "bias", policy.first.bias)]),
    "eval and train": (policies.Dropping, [nn.Module.eval, nn.Module.train]),
    "attribute": (Net, [setter(scale=2.0), setter(scale=3.0)]),
    "attribute of a parent's method": (policies.Child, [setter(scale=2.0)]),
    "attribute shadowed by the instance's": (Net, [setter(scale=2), lambda policy: delattr(policy, "scale")]),
    "attribute by a computed name": (lambda: policies.ByComputedName(scale=1.0, rest="ale"), [setter(scale=2.0)]),
    "attribute in __dict__": (lambda: policies.FromDict(scale=1.0, rest="ale"), [setter(scale=2.0)]),
    "attribute of a parameter": (policies.FromTensor, [setter(net__weight__scale=2.0)]),
    "requires_grad": (policies.FromRequiresGrad, [lambda policy: policy.requires_grad_(False)]),
    "grad": (policies.FromGrad, [lambda policy: setattr(policy.net.weight, "grad", torch.ones(3, 4))]),
    "global": (policies.from_global, [with_global(2.0), with_global(3.0), with_global(1.0)]),
    "attribute of a module": (policies.from_module, [lambda policy: setattr(policies.settings, "scale", 2.0)]),
    "class attribute": (policies.from_class, [class_attribute(2.0), class_attribute(3.0)]),
    "property": (lambda: policies.FromProperty(_hidden=1.0), [setter(_hidden=2.0)]),
    "getter of a property": (
        policies.with_property,
        [lambda policy: setattr(type(policy).hidden.fget, "__defaults__", (2.0,))],
    ),
    "descriptor": (lambda: policies.FromDescriptor(config=Config()), [setter(config__scale=2.0)]),
    "list": (lambda: FromItems(items=[1.0]), [lambda policy: policy.items.insert(0, 2.0)]),
    "list grown": (lambda: policies.FromLength(items=[1.0]), [lambda policy: policy.items.append(2.0)]),
    "set grown": (lambda: policies.FromLength(items={1.0}), [lambda policy: policy.items.add(2.0)]),
    "dict": (lambda: FromItems(items={0: 1.0}), [lambda policy: policy.items.update({0: 2.0})]),
    "dict grown": (lambda: policies.FromLength(items={0: 1.0}), [lambda policy: policy.items.update({1: 2.0})]),
    "view of a dict": (policies.from_read_only_view, [lambda policy: policy.kept.update({0: 2.0})]),
    "deque": (policies.from_deque, [lambda policy: policy.items.append(2.0)]),
    "nested": (lambda: FromItems(items=[[1.0]][0]), [lambda policy: policy.items.__setitem__(0, 2.0)]),
    "dataclass": (lambda: FromAttribute(config=Config()), [setter(config__scale=2.0), setter(config=Config(3.0))]),
    "slots": (lambda: FromAttribute(config=Slotted()), [setter(config__scale=2.0)]),
    "named tuple": (
        lambda: FromAttribute(config=policies.Pair(1.0, 2.0)),
        [lambda policy: setattr(policy, "config", policy.config._replace(scale=2.0))],
    ),
    "dict with attributes": (policies.from_options, [setter(config__scale=2.0)]),
    "member of an enum": (policies.from_enum, [setter(config__scale=2.0)]),
    "weak reference": (policies.from_weak_reference, [setter(kept__scale=2.0)]),
    "hook": (Net, [add_hook, remove_hook]),
    "hook before": (Net, [lambda policy: policy.net.register_forward_pre_hook(lambda _, given: (given[0] + 1,))]),
    "hook on the policy": (Net, [lambda policy: policy.register_forward_hook(doubled)]),
    "method of the instance": (Net, [lambda p: setattr(p, "factor", types.MethodType(other_method, p))]),
    "method of the class": (own_class(Net), [lambda policy: setattr(type(policy), "factor", other_method)]),
    "method of a parent": (
        lambda: type("Mine", (type("Parent", (Net,), {"factor": lambda self: 1.0}),), {})(),
        [lambda policy: setattr(type(policy).__mro__[1], "factor", other_method)],
    ),
    "forward of the class": (own_class(Net), [lambda policy: setattr(type(policy), "forward", other_forward)]),
    "forward of the instance": (Net, [lambda p: setattr(p, "forward", types.MethodType(other_forward, p))]),
    "class": (own_class(Net), [lambda policy: setattr(policy, "__class__", policies.FromRequiresGrad)]),
    "closure": (policies.closure, [lambda policy: policy.set(2.0), lambda policy: policy.set(3.0)]),
    "attribute of a function": (policies.function_with_attribute, [setter(scale=2.0)]),
    "default of a function": (policies.function_with_default, [lambda p: setattr(p, "__defaults__", (2.0,))]),
    "code of a function": (
        policies.function_with_default,
        [lambda policy: setattr(policy, "__code__", policies.function_that_adds().__code__)],
    ),
    "keyword of a partial": (policies.partial, [lambda policy: policy.keywords.update(scale=[2.0])]),
    "argument of a partial": (policies.partial, [lambda policy: policy.keywords["scale"].__setitem__(0, 2.0)]),
    "bound method": (lambda: Bound().act, [lambda policy: setattr(policy.__self__, "scale", 2.0)]),
    "callable object": (Bound, [setter(scale=2.0), lambda p: setattr(p, "__class__", policies.Other)]),
    "lambda": (
        lambda: (lambda bound: lambda observation: bound(observation))(Bound()),
        [lambda policy: setattr(policy.__closure__[0].cell_contents, "scale", 2.0)],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_between_batches(name: str) -> None:
    make, changes = CHANGES[name]
    # Waits before it is captured again: nothing changes for three batches.
    steps = [step for change in changes for step in (change, None, None)]
    assert_captured_each_time(both_ways(make, None, *steps), changes)
    assert_differs(make, changes)


def assert_captured_each_time(plans: list[str], changes: list[Change]) -> None:
    """Before each change, and in the end: else nothing was seen to be seen."""
    for number in range(len(changes) + 1):
        assert plans[1 + 3 * number].startswith("captured"), plans


def assert_differs(make: Callable[[], Any], changes: list[Change]) -> None:
    """Every change shows in the batch that follows it: else it proves nothing that both ways are the same."""
    changed = collected(make, [None, *changes], capture=False)
    for number in range(len(changes)):
        steps = [None, *changes[:number], None]
        before = collected(make, steps, capture=False)
        with pytest.raises(AssertionError):
            assert torch.equal(changed.batches[2 + number]["action"], before.batches[2 + number]["action"])


@pytest.mark.parametrize("name", ["attribute", "closure", "optimizer step", "deque", "hook"])
def test_change_by_a_hook_of_the_collector(name: str) -> None:
    make, (change, *_) = CHANGES[name]

    def collect(capture: bool) -> Any:
        policy, seen = make(), []

        def hook(batch: Any) -> None:
            seen.append(batch)
            if len(seen) == 2:
                change(policy)

        return collected(lambda: policy, [None] * 4, capture=capture, post_collect_hook=hook)

    torch.manual_seed(0)
    ours = collect(True)
    torch.manual_seed(0)
    called = collect(False)
    assert_same_bits(ours, called)
    assert ours.plans[1].startswith("captured")
    assert ours.plans[-1].startswith("captured")


# -- settings of torch -------------------------------------------------------------------------------------------------


def autocast(enabled: bool) -> Change:
    return lambda policy: torch.set_autocast_enabled("cpu", enabled)


def default_dtype(dtype: torch.dtype) -> Change:
    return lambda policy: torch.set_default_dtype(dtype)


def validation(is_on: bool) -> Change:
    return lambda policy: Distribution.set_default_validate_args(is_on)


def global_hook(policy: Any) -> None:
    policy.handle = register_module_forward_hook(doubled)  # type: ignore[arg-type]


def other_activation(value: torch.Tensor) -> torch.Tensor:
    return torch.relu(value)


#: The last change takes the first one back.
SETTINGS: dict[str, tuple[Callable[[], Any], list[Change]]] = {
    "autocast": (lambda: nn.Sequential(policies.Child(), policies.ToFloat()), [autocast(True), autocast(False)]),
    "default dtype": (policies.FromDefaultDtype, [default_dtype(torch.float64), default_dtype(torch.float32)]),
    "hook on all modules": (Net, [global_hook, remove_hook]),
    "a library's method": (
        lambda: Net(scale=1.0, net=nn.Sequential(nn.Linear(4, 3), nn.SiLU())),
        [
            lambda policy: setattr(nn.SiLU, "forward", lambda self, x: torch.relu(x)),
            lambda policy, before=nn.SiLU.forward: setattr(nn.SiLU, "forward", before),
        ],
    ),
    "a library's function": (
        policies.FromFunctional,
        [
            lambda policy: setattr(nn.functional, "silu", other_activation),
            lambda policy, before=nn.functional.silu: setattr(nn.functional, "silu", before),
        ],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_changed_between_batches(name: str) -> None:
    make, (change, back) = SETTINGS[name]
    plans = both_ways(make, None, change, None, None, back, None, None)
    assert_captured_each_time([plan if i != 4 else "captured" for i, plan in enumerate(plans)], [change, back])
    with pytest.raises(AssertionError, match="batch 2"):
        assert_same_bits(
            collected(make, [None, change, back], capture=False), collected(make, [None] * 3, capture=False)
        )


def test_validation_of_distributions_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which compiling switches off, for everybody
    plans = both_ways(policies.Heads, None, validation(False), None, None, validation(True), None, None)
    assert all(plans[i].startswith("captured") for i in (1, 4, 7)), plans
    assert plans[7] == plans[1] != plans[4]


def test_exploration_type_is_changed() -> None:
    def collect(capture: bool) -> Any:
        torch.manual_seed(0)
        CountingEnv.made = 0
        got = Collected()
        with Collector(
            make_counting(), policies.probabilistic(), frames_per_batch=40, total_frames=-1, capture_policy=capture
        ) as collector:
            collector.set_seed(7)
            for kind in (None, None, "mode", "mode", "mean", "mean", "random", "random", "random"):
                collector.exploration_type = None if kind is None else InteractionType(kind)
                got.batches.append(next(iter(collector)).clone().unsqueeze(0))
                got.plans.append(collector.policy_plan())
        got.random_state = torch.get_rng_state()
        return got

    ours = collect(True)
    assert_same_bits(ours, collect(False))
    assert all(ours.plans[i].startswith("captured") for i in (1, 3, 5, 8)), ours.plans


# -- in each step ------------------------------------------------------------------------------------------------------

#: Captured, with as many ways through the code.
CAPTURED: dict[str, tuple[Callable[[], Any], int]] = {
    "running statistics": (policies.RunningStatistics, 1),
    "annealed epsilon": (policies.Annealed, 1),
    "views": (policies.WritesToViews, 1),
    "written to after it was read": (policies.WritesLater, 1),
    "results seen through views": (policies.LooksThroughViews, 1),
    "writes to its input": (policies.WritesToItsInput, 1),
    "returns its input": (policies.ReturnsItsInput, 1),
    "constants": (policies.WithDefaults, 1),
    "tied weights": (policies.Tied, 1),
    "raises and goes on": (policies.DrawsAndGoesOn, 1),
    "a branch on a random number": (policies.LooksAtRandomNumbers, 2),
    "a branch on values": (policies.BranchesOnValues, 2),
    "a branch on what looks like a search for NaN": (policies.LooksAtANumberThatWasWrittenTo, 2),
    "a branch on drawn indices": (policies.AllAgree, 2),
    "the sign of zero": (policies.SignOfZero, 2),
    "convolutions": (policies.Convolves, 1),
    "several heads": (policies.Heads, 1),
    "recurrent": (recurrent, 1),
    "probabilistic": (policies.probabilistic, 1),
    "quantized": (policies.quantized, 1),
    "in a TensorDictModule": (lambda: in_module(policies.Child()), 1),
}


def in_module(module: Any) -> TensorDictModule:
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action"])


@pytest.mark.filterwarnings("ignore:.*torch.ao:DeprecationWarning", "ignore:torch.quantize")
@pytest.mark.parametrize("num_envs", [1, 3, None])
@pytest.mark.parametrize("name", CAPTURED)
def test_each_step(name: str, num_envs: int | None) -> None:
    make, num_ways = CAPTURED[name]
    if num_envs is None and name not in ("recurrent", "probabilistic", "in a TensorDictModule"):
        pytest.skip("it needs rows")
    if num_envs == 1 and name == "a branch on drawn indices":
        pytest.skip("it needs several rows")
    plan = both_ways(make, None, None, None, num_envs=num_envs, steps=60)[-1]
    assert plan.startswith("captured"), plan
    assert plan.count(" or ") >= num_ways - 1, plan


def test_another_number_of_rows() -> None:
    """One plan on rows of several numbers, as when several envs wait."""
    with Collector(SerialEnv(3, make_counting), policies.Child(), frames_per_batch=3, total_frames=-1) as collector:
        next(iter(collector))
        plan = PolicyPlan.resolve(collector.policy, collector.env, {("observation",): torch.zeros(3, 4)})
    bound = {}
    for num_rows in (1, 5, 3):
        sized = plan.resized(num_rows)
        strip = Strip(sized.layout, 1)
        bound[num_rows] = (strip, sized.bind(strip, remembers=False))
    for _ in range(12):
        for num_rows, (strip, policy) in bound.items():
            given = torch.randn(num_rows, 4)
            strip.carried[("observation",)].rows[0].copy_(given)
            with torch.no_grad():
                policy.prepare()
                policy.act(0)
                expected = collector.policy(given)
            assert torch.equal(bits(strip.outputs[("action",)].rows[0]), bits(expected))
    assert [policy.describe() for _, policy in bound.values()] == ["captured, 3 operations"] * 3


def test_looks_that_take_longer_than_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is called as it is, with the same data."""
    monkeypatch.setattr(captured, "LOOKING", 0.0)
    monkeypatch.setattr(captured, "MIN_LOOKS", 1)
    plans = both_ways(policies.WritesToViews, None, None, None, num_envs=1)
    assert "to look before each batch" in plans[-1], plans


def test_calls_that_take_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is another one at every step: what was captured is dropped, and the reason given."""
    monkeypatch.setattr(captured, "MOST", 0.0)
    plans = both_ways(policies.BranchesOnValues, None, None, None, num_envs=1, steps=60)
    assert any("it branches on a tensor's value (captured_policies.py:" in plan for plan in plans), plans


def test_ways_on_probation_stand_for_themselves() -> None:
    """A way that is left while it is compared has not agreed, and the next one has changed nothing."""
    long = functools.partial(make_counting, 1000)
    plans = both_ways(policies.ThreeWays, None, num_envs=1, make_env=long, steps=60)
    assert plans[-1].count(" or ") == 1, plans  # the second way came too rarely to be trusted


@pytest.mark.parametrize("wait", range(4))
def test_change_on_a_branch_that_was_not_recorded(wait: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the batch is not collected with what was captured before it."""
    monkeypatch.setattr(captured, "MAX_PATHS", wait)  # 0 and 1: the branch is called as it is
    plans = both_ways(policies.ChangesItselfOnARareBranch, None, None, num_envs=1, steps=100)
    assert any(plan.startswith("captured") or "its call changes" in plan for plan in plans)


@pytest.mark.parametrize("step", [2, 4, 5, 6, 7, 20])
def test_policy_that_raises(step: int) -> None:
    """In any stage: where it would, and leaving what it would."""

    def collect(capture: bool) -> list[Any]:
        policy = policies.RaisesAtStep(step=float(step))
        with pytest.raises(ArithmeticError, match="not this one") as raised:
            collected(lambda: policy, [None], capture=capture, num_envs=1, make_env=lambda: make_counting(1000))
        return [torch.get_rng_state(), [str(frame.path) for frame in raised.traceback[-2:]]]

    (mine, where), (theirs, there) = collect(True), collect(False)
    assert torch.equal(mine, theirs)
    assert where[-1] == there[-1]


# -- called as it is ---------------------------------------------------------------------------------------------------


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        return make()

    return made


def numbers() -> Any:
    yield from range(10_000)


def table(value: float) -> Any:
    return np.full(2, value, np.float32)


def scripted() -> Any:
    return torch.jit.script(policies.Typed())


@functools.lru_cache
def cached() -> float:
    return 1.0


#: The policy, why it is called, and a change that would be missed.
CALLED: dict[str, tuple[Callable[[], Any], str, Change | None]] = {
    "random": (lambda: policies.Calls(random.random), "it calls random.random", None),
    "a method of Random": (lambda: policies.Calls(random.Random(0).gauss), "it calls random.Random.gauss", None),
    "numpy.random": (lambda: policies.Calls(np.random.rand), "cannot be watched", None),
    "generator of NumPy": (lambda: policies.Calls(np.random.default_rng(0).random), "cannot be watched", None),
    "generator in a TensorDictModule": (
        lambda: in_module(policies.Calls(np.random.default_rng(0).random)),
        "cannot be watched",
        None,
    ),
    "time": (lambda: policies.Calls(lambda: 1.0 if time.time() > 0 else 2.0), "time", None),
    "arguments": (lambda: policies.Calls(lambda: float(len(sys.argv) > 0)), "it uses the module sys", None),
    "now": (lambda: policies.Calls(lambda: 1.0 if datetime.now().year else 2.0), "it calls datetime.now", None),
    "print": (lambda: policies.Calls(lambda: print(end="") or 1.0), r"it calls print\(\)", None),
    "array": (
        lambda: FromItems(items=table(1.0)),
        "items, a numpy.ndarray",
        lambda policy: policy.items.fill(2.0),
    ),
    "array in a TensorDictModule": (
        lambda: in_module(FromItems(items=table(1.0))),
        "items, a numpy.ndarray",
        lambda policy: policy.module.items.fill(2.0),
    ),
    "array of a library's object": (
        policies.from_array_of_a_library,
        "scale, a numpy.ndarray",
        lambda policy: policy.config.scale.fill(2.0),
    ),
    "bytes that change": (
        lambda: FromItems(items=bytearray([1])),
        "a builtins.bytearray",
        lambda policy: policy.items.__setitem__(0, 2),
    ),
    "value of C": (
        lambda: policies.FromValue(value=ctypes.c_double(1.0)),
        "a ctypes.c_double",
        lambda policy: setattr(policy.value, "value", 2.0),
    ),
    "iterator": (lambda: policies.NextOf(numbers=itertools.count()), "a itertools.count", None),
    "generator": (lambda: policies.NextOf(numbers=numbers()), "a builtins.generator", None),
    "getter": (
        lambda: policies.Getting(getter=operator.attrgetter("scale")),
        "a operator.attrgetter",
        setter(scale=2.0),
    ),
    "cache": (lambda: policies.Calls(cached), "lru_cache", None),
    "counter": (policies.Counts, r"its call changes .*\.calls", None),
    "list that grows": (lambda: policies.CountsInAList(items=[]), r"its call changes .*\.items", None),
    "buffer replaced": (policies.RebindsItsBuffer, "whose owner cannot be found", None),
    "keeps its input": (policies.KeepsItsInput, "whose owner cannot be found", None),
    "mask": (policies.ByMask, "the shape of what index gives depends on values", None),
    "through NumPy": (policies.ThroughNumPy, r"it calls .numpy\(\)", None),
    "sparse": (policies.Sparse, "sparse", None),
    "generator of torch": (policies.FromGenerator, "a generator of its own", None),
    "seeds itself": (policies.SeedsItself, "captured, it would give another", None),
    "scripted": (scripted, "TorchScript", setter(scale=2.0)),
    "scripted inside": (lambda: nn.Sequential(nn.Identity(), scripted()), "TorchScript", None),
    "statistics of a batch norm": (policies.Layered, "native_batch_norm", None),
    "a branch on a changed buffer": (policies.BranchesOnWhatItChanged, "a value that it has changed", None),
    "raises later": (policies.RaisesAndGoesOn, "changes a buffer before all that could go wrong is known", None),
    "raises and goes on": (lambda: policies.DrawsAndGoesOn(-1), "aten.embedding.default raises", None),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_called_as_it_is(name: str) -> None:
    make, reason, change = CALLED[name]
    plan = both_ways(seeded(make), None, change, None)[-1]
    assert plan.startswith("called as it is: "), plan
    assert re.search(reason, plan), plan


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("kind", [policies.Attends, policies.Encodes])
def test_attention_in_eval(kind: Any, always: bool) -> None:
    """It takes a way to other last bits while operations are recorded: not even one row may be of that."""
    plans = both_ways(lambda: kind(always).eval(), None, None)
    if always:
        assert "the fast path of attention" in plans[-1]
    else:
        assert plans[-1].startswith("captured"), plans
    assert both_ways(lambda: kind(always), None, None)[-1].startswith("captured")


@pytest.mark.parametrize("where", ["the policy", "in a module", "a part", "by a method"])
def test_compiled(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code looks at attributes in ways of its own, and must not see that it is looked at."""
    pytest.importorskip("torch._dynamo")
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which compiling switches off, for everybody

    def make() -> Any:
        torch._dynamo.reset()
        inner = Net(scale=1.0)
        if where == "by a method":
            inner.compile(backend="eager")
            return inner
        made: Any = torch.compile(inner, backend="eager")
        if where == "the policy":
            return lambda observation: made(observation)
        return in_module(made) if where == "in a module" else nn.Sequential(nn.Identity(), made)

    def change(policy: Any) -> None:
        net = next(module for module in networks(policy) if isinstance(module, Net))
        net.scale = 2.0

    plans = both_ways(make, None, change, None)
    assert all("it calls what torch.compile has made" in plan for plan in plans), plans


def networks(policy: Any) -> Any:
    return policy.modules() if isinstance(policy, nn.Module) else policy.__closure__[0].cell_contents.modules()


# -- nothing is left behind --------------------------------------------------------------------------------------------

IN_A_FRESH_PROCESS = """
import sys
import tensordict.nn  # which imports torch's compiler itself, in some versions

def compilers():
    return {name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))}

before = compilers()
from swath.collectors import Collector

def policy(observation):
    return observation[..., :2] * 2

collector = Collector("CartPole-v1", policy, frames_per_batch=50, total_frames=100)
for batch in collector:
    plan = collector.policy_plan()
assert plan.startswith("captured"), plan
assert compilers() == before, compilers() - before
"""


@pytest.mark.processes
def test_no_compiler_is_imported() -> None:
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], check=True, timeout=100)


@pytest.mark.parametrize("stage", ["scouted", "record"])
def test_recording_leaves_nothing_behind(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profiler, no mode of torch: not if the policy raises, either."""
    policy = policies.RaisesWhenTold(raises=False)
    during: list[tuple[Any, ...]] = []
    original = getattr(captured, stage)

    def told(function: Any) -> Any:
        policy.raises = True
        return original(lambda: (during.append(surroundings()), function()))

    monkeypatch.setattr(captured, stage, told)
    before = surroundings()
    with pytest.raises(ArithmeticError, match="not this one"):
        collected(lambda: policy, [None], capture=True)
    assert surroundings() == before
    assert during
    assert during[0] != before


def surroundings() -> tuple[Any, ...]:
    """What a recording puts in place."""
    return sys.getprofile(), torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def test_random_state_is_left_as_the_call_leaves_it() -> None:
    """In every stage, step by step: warming up, looked at, recorded, compared, captured."""
    states: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for capture, found in states.items():
        collected(
            policies.Heads,
            [lambda policy, found=found: found.append(torch.get_rng_state())] * 30,
            capture=capture,
            steps=1,
        )
    assert len(states[True]) == 30
    assert all(map(torch.equal, states[True], states[False]))


def test_collecting_under_a_profiler() -> None:
    """It could not be put back: it is left alone, and the policy is called as it is."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        plans = both_ways(policies.Child, None)
        assert sys.getprofile() is profiler or sys.version_info >= (3, 12)
    finally:
        profiler.disable()
    expected = "called as it is: a profiler is active" if sys.version_info < (3, 12) else "captured"
    assert plans[-1].startswith(expected)
    assert "forward" in {function[2] for function in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]


def test_another_python_profiler_is_left_alone() -> None:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        mine = sys.getprofile()
        plans = both_ways(policies.Child, None)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert plans[-1] == "called as it is: a profiler is active"


def test_objects_that_cannot_be_looked_at() -> None:
    """An object that raises whatever is asked of it does not stop the collection."""
    plan = both_ways(lambda: policies.Unfriendly(config=policies.RaisesWhenLookedAt()), None)[-1]
    assert plan.startswith("called as it is: its operations cannot be repeated (RuntimeError"), plan


def test_what_is_found_out_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency that no watch sees raises at the next comparison, instead of giving wrong data for ever."""
    monkeypatch.setattr(Watch, "changed", lambda self: None)
    monkeypatch.setattr(captured, "CHECKING", 1e9)  # compare in every batch
    with pytest.raises(CaptureError, match="capture_policy=False"):
        collected(Net, [None, setter(scale=2.0), None, None, None, None], capture=True)

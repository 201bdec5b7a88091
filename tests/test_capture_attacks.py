"""Policies that are hard to capture: what is delivered, and what they do, is what calling them in each step gives."""

from __future__ import annotations

import cProfile
import itertools
import multiprocessing
import operator
import types
import weakref
from collections.abc import Callable
from datetime import datetime
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy import random as random_numbers
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from counting import assert_same
from swath.collectors import Collector
from swath.envs import GymWrapper, SerialEnv

STEPS = 40
#: A step by which every policy here that can be captured is.
LATE = 20


class Scripted(gymnasium.Env):
    """Observes (what the script says of the step, the step, the last action, noise)."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, script: Callable[[int], float], on_step: Callable[[int], None]) -> None:
        self.script, self.on_step = script, on_step
        self.steps = 0
        self.noise = np.random.default_rng(0)

    def _observe(self, action: float) -> np.ndarray:
        return np.array([self.script(self.steps), self.steps, action, self.noise.normal()], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return self._observe(0.0), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        self.on_step(self.steps)
        return self._observe(float(np.ravel(action)[0])), 0.0, False, False, {}


class Policy(nn.Module):
    """A linear layer; ``setup`` and ``forward`` are the case's."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        case.setup(self)


class Case:
    """A way to use a policy: override what is needed."""

    num_envs: int | None = None
    is_wrapped = False

    def setup(self, policy: Any) -> None:
        """What it has."""

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation)

    def script(self, step: int) -> float:
        return 0.0

    def on_step(self, policy: Any, step: int) -> None:
        """What the env does to it."""

    def before_batch(self, policy: Any, batch: int) -> None:
        """What is done to it between batches."""

    def seen(self, policy: Any) -> Any:
        """What is left of it."""

    def policy(self) -> Any:
        forward = type(self).forward
        case = self

        def call(policy: Any, observation: torch.Tensor) -> torch.Tensor:
            return forward(case, policy, observation)

        return type("Of" + type(self).__name__, (Policy,), {"forward": call})(self)

    def run(self, captures: bool) -> tuple[list[Any], str, Any]:
        """The batches, the error, what is left of the policy."""
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 (some policies draw there)
        policy = self.policy()

        def make() -> GymWrapper:
            return GymWrapper(Scripted(self.script, lambda step: self.on_step(policy, step)))

        env = make() if self.num_envs is None else SerialEnv(self.num_envs, make)
        actor = TensorDictModule(policy, ["observation"], ["action"]) if self.is_wrapped else policy
        num_frames = STEPS * (self.num_envs or 1)
        collector = Collector(env, actor, frames_per_batch=num_frames, total_frames=-1, capture_policy=captures)
        batches: list[Any] = []
        error = ""
        iterator = iter(collector)
        try:
            for batch in range(4):
                self.before_batch(policy, batch)
                batches.append(next(iterator).clone())
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        collector.shutdown()
        return batches, error, (self.seen(policy), torch.get_rng_state().tolist())


class HasScale(Case):
    """Multiplies with something that is 1, and 2 from the third batch on."""

    def scale(self, policy: Any) -> float:
        raise NotImplementedError

    def set_scale(self, policy: Any, value: float) -> None:
        raise NotImplementedError

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) * self.scale(policy)

    def before_batch(self, policy: Any, batch: int) -> None:
        self.set_scale(policy, 1.0 if batch < 2 else 2.0)


class HasLateScale(Case):
    """Multiplies with something that is different from step ``LATE`` on, and that no one changes but time."""

    def scale(self, policy: Any) -> float:
        raise NotImplementedError

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) * self.scale(policy)


# -- what may have been read ------------------------------------------------------------------------------------------


class Box:
    scale = 1.0
    factor: float


class Meta(type):
    scale = 1.0


class OfMeta(metaclass=Meta):
    pass


class AttributeDict(dict):
    pass


class Array(np.ndarray):
    pass


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * scaled.scale  # type: ignore[attr-defined]


scaled.scale = 1.0  # type: ignore[attr-defined]


class CountsForItself(HasLateScale):
    def setup(self, policy: Any) -> None:
        policy.count = itertools.count()

    def scale(self, policy: Any) -> float:
        return 1.0 + (next(policy.count) > LATE)


class AsksGenerator(HasLateScale):
    def setup(self, policy: Any) -> None:
        policy.scales = (1.0 + (i > LATE) for i in range(10**6))

    def scale(self, policy: Any) -> float:
        return next(policy.scales)


class AsksIterator(HasLateScale):
    def setup(self, policy: Any) -> None:
        policy.scales = iter([1.0] * LATE + [2.0] * 10**4)

    def scale(self, policy: Any) -> float:
        return next(policy.scales)


class DrawsFromNumPy(HasLateScale):
    def scale(self, policy: Any) -> float:
        return 1.0 + (random_numbers.rand() > 0.98)  # noqa: NPY002


class HoldsNumPyGenerator(HasLateScale):
    """Inside a module of a library."""

    is_wrapped = True

    def setup(self, policy: Any) -> None:
        policy.numbers = np.random.default_rng(0)

    def scale(self, policy: Any) -> float:
        return 1.0 + float(policy.numbers.random() > 0.95)


class HoldsArray(HasScale):
    """Inside a module of a library."""

    is_wrapped = True

    def setup(self, policy: Any) -> None:
        policy.scales = np.ones(3)

    def scale(self, policy: Any) -> float:
        return float(policy.scales[0])

    def set_scale(self, policy: Any, value: float) -> None:
        policy.scales[0] = value


class HoldsKindOfArray(HoldsArray):
    is_wrapped = False

    def setup(self, policy: Any) -> None:
        policy.scales = np.ones(3).view(Array)


class HoldsBytes(HoldsArray):
    is_wrapped = False

    def setup(self, policy: Any) -> None:
        policy.scales = bytearray(1)

    def set_scale(self, policy: Any, value: float) -> None:
        policy.scales[0] = int(value)


class SharesNumber(HasScale):
    def setup(self, policy: Any) -> None:
        policy.shared = multiprocessing.RawValue("d", 1.0)

    def scale(self, policy: Any) -> float:
        return policy.shared.value

    def set_scale(self, policy: Any, value: float) -> None:
        policy.shared.value = value


class ReadsThroughProxy(HasScale):
    def setup(self, policy: Any) -> None:
        policy.settings = {"scale": 1.0}
        policy.view = types.MappingProxyType(policy.settings)

    def scale(self, policy: Any) -> float:
        return policy.view["scale"]

    def set_scale(self, policy: Any, value: float) -> None:
        policy.settings["scale"] = value


class ReadsView(ReadsThroughProxy):
    def setup(self, policy: Any) -> None:
        policy.settings = {"scale": 1.0}
        policy.view = policy.settings.values()

    def scale(self, policy: Any) -> float:
        return sum(policy.view)


class HoldsBox(HasScale):
    def setup(self, policy: Any) -> None:
        policy.box = Box()

    def scale(self, policy: Any) -> float:
        return policy.box.scale

    def set_scale(self, policy: Any, value: float) -> None:
        policy.box.scale = value


class HoldsWeakly(HoldsBox):
    def setup(self, policy: Any) -> None:
        super().setup(policy)
        policy.reference = weakref.ref(policy.box)

    def scale(self, policy: Any) -> float:
        return policy.reference().scale


class HoldsUnnamed(HoldsBox):
    """No code that runs spells the attribute's name as one."""

    def setup(self, policy: Any) -> None:
        policy.box = Box()
        policy.box.factor = 1.0

    def scale(self, policy: Any) -> float:
        return policy.box.__dict__["fac" + "tor"[:3]]

    def set_scale(self, policy: Any, value: float) -> None:
        policy.box.factor = value


class GetsAttribute(HoldsUnnamed):
    get = operator.attrgetter("factor")

    def scale(self, policy: Any) -> float:
        return type(self).get(policy.box)


class ReadsDict(HoldsUnnamed):
    def scale(self, policy: Any) -> float:
        return sum(policy.box.__dict__.values())


class Matches(HoldsUnnamed):
    def scale(self, policy: Any) -> float:
        match policy.box:
            case Box(factor=value):
                return value
        raise AssertionError


class HoldsAttributeDict(HoldsBox):
    def setup(self, policy: Any) -> None:
        policy.box = AttributeDict()
        policy.box.scale = 1.0


class ReadsTensorsAttribute(HoldsBox):
    def setup(self, policy: Any) -> None:
        policy.box = nn.Parameter(torch.ones(1))
        policy.box.scale = 1.0


class ReadsFunctionsAttribute(HasScale):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return scaled(policy.layer(observation))

    def set_scale(self, policy: Any, value: float) -> None:
        scaled.scale = value  # type: ignore[attr-defined]


class ReadsMetaclass(HasScale):
    def scale(self, policy: Any) -> float:
        return OfMeta.scale

    def set_scale(self, policy: Any, value: float) -> None:
        Meta.scale = value


class ShadowsClassAttribute(HasScale):
    def setup(self, policy: Any) -> None:
        policy.box = type("Inner", (Box,), {})()

    def scale(self, policy: Any) -> float:
        return policy.box.scale

    def set_scale(self, policy: Any, value: float) -> None:
        if value != 1.0:
            type(policy.box).scale = value


class ChangesClass(HoldsBox):
    def set_scale(self, policy: Any, value: float) -> None:
        if value != 1.0:
            policy.box.__class__ = type("Other", (Box,), {"scale": value})


class AsksWhetherTrained(HasScale):
    def scale(self, policy: Any) -> float:
        return 1.0 + policy.layer.weight.requires_grad

    def set_scale(self, policy: Any, value: float) -> None:
        policy.layer.weight.requires_grad_(value == 1.0)


class HasHiddenDefault(HasScale):
    """Behind a decorator of torch."""

    def policy(self) -> Any:
        settings = {"scale": 1.0}

        @torch.no_grad()
        def call(policy: Any, observation: torch.Tensor, settings: dict[str, float] = settings) -> torch.Tensor:
            return policy.layer(observation) * settings["scale"]

        policy: Any = type("Decorated", (Policy,), {"forward": call})(self)
        policy.changed_elsewhere = settings.__setitem__
        return policy

    def set_scale(self, policy: Any, value: float) -> None:
        policy.changed_elsewhere("scale", value)


class IsHookedWithAllOthers(Case):
    """By a hook on every module."""

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) + 0.0

    def before_batch(self, policy: Any, batch: int) -> None:
        if batch == 1:
            hook = register_module_forward_hook(lambda m, i, o: o * 2 if isinstance(m, nn.Linear) else None)
            object.__setattr__(policy, "handle", hook)
        if batch == 3:
            policy.handle.remove()


class IsChangedByEnv(HoldsBox):
    """In the midst of a batch."""

    def setup(self, policy: Any) -> None:
        policy.box = Box()
        policy.box.scale = 1.0

    def before_batch(self, policy: Any, batch: int) -> None:
        pass

    def on_step(self, policy: Any, step: int) -> None:
        if step == LATE:
            policy.box.scale = 2.0


# -- what is done on rare ways ----------------------------------------------------------------------------------------


class Rare(Case):
    """Something is different at step ``LATE``."""

    value = 1.0

    def setup(self, policy: Any) -> None:
        policy.times = 0
        policy.table = nn.Parameter(torch.randn(3, 3))
        policy.register_buffer("count", torch.zeros(()))

    def script(self, step: int) -> float:
        return self.value if step == LATE else 0.0

    def seen(self, policy: Any) -> Any:
        return policy.times, policy.count.item()


class ChangesItselfRarely(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        if observation[0] > 0.5:
            policy.times += 1
        return policy.layer(observation) * (1 + policy.times)


class RaisesRarely(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        if observation[0] > 0.5:
            policy.times += 1
            raise ValueError(f"seen {policy.times} times")
        return policy.layer(observation)


class RaisesOnce(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        if observation[0] > 0.5:
            policy.times += 1
            if policy.times == 1:
                raise ValueError("the first time")
        return policy.layer(observation)


class HandlesWhatOperationsRaise(Rare):
    value = 100.0

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(3)
        try:
            row = policy.table[observation[:1].long()][0]
        except IndexError:
            row = torch.zeros(3)
        return policy.layer(observation) + row + noise


class IsRecordedWhileHandling(HandlesWhatOperationsRaise):
    def script(self, step: int) -> float:
        return 100.0 if step < LATE else 0.0


class ChangesBufferBeforeItRaises(Rare):
    value = 100.0

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        policy.count.add_(1)
        return policy.layer(observation) + policy.table[observation[:1].long()][0] * policy.count


class HasNoCholesky(Rare):
    value = 2.0

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        covariance = torch.eye(3) * (1.0 - observation[0])
        return torch.nn.functional.linear(policy.layer(observation), torch.linalg.cholesky(covariance))


class Asserts(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async(observation[0] < 0.5)
        return policy.layer(observation)


class SamplesFromInfinity(Rare):
    """A softmax of an infinite number is no probability, which ``multinomial`` says."""

    value = float("inf")

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        logits = policy.layer(torch.ones(4)) + observation[:1] * torch.eye(3)[0].where(observation[:1] > 0, 0.0)
        return torch.multinomial(torch.softmax(logits.nan_to_num(posinf=self.value), -1), 1).float().expand(3)


class MakesListRarelyAnother(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) + sum(observation[:1].tolist())


class MakesTensorOfTensors(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) + torch.tensor([observation[0], 0.0, observation[0]])


class MakesTensorTheOldWay(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) + torch.FloatTensor([observation[0], 0.0, 0.0])


class SplitsByTensor(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) + torch.tensor_split(observation, observation[:1].long() + 1)[0].sum()


class Conjugates(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        z = torch.complex(observation[1:], observation[:1].expand(3))
        return policy.layer(observation) + (z.conj() * z.conj()).imag


class ComparesClosely(Rare):
    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(observation) * (1.0 + torch.allclose(observation[:1], torch.zeros(1)))


class HoldsSparseTensor(Rare):
    def setup(self, policy: Any) -> None:
        super().setup(policy)
        policy.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return torch.mv(policy.graph, policy.layer(observation))


class NormalisesBatches(Case):
    num_envs = 4

    def setup(self, policy: Any) -> None:
        policy.norm = nn.BatchNorm1d(4, momentum=0.001)

    def forward(self, policy: Any, observation: torch.Tensor) -> torch.Tensor:
        return policy.layer(policy.norm(observation))

    def seen(self, policy: Any) -> Any:
        return policy.norm.running_mean.tolist(), policy.norm.num_batches_tracked.item()


def cases(kind: type[Case]) -> list[type[Case]]:
    below = [case for child in kind.__subclasses__() for case in cases(child)]
    return ([] if kind in (Case, HasScale, HasLateScale, Rare) else [kind]) + below


@pytest.mark.parametrize("kind", cases(Case), ids=lambda kind: kind.__name__)
def test_it_gives_what_calling_it_gives(kind: type[Case]) -> None:
    called, captured = kind().run(captures=False), kind().run(captures=True)
    assert captured[1] == called[1]
    assert len(captured[0]) == len(called[0])
    for mine, theirs in zip(captured[0], called[0], strict=True):
        assert_same(mine.unsqueeze(0), theirs.unsqueeze(0))
    assert captured[2] == called[2]


class ReadsClock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation) + datetime.now().year


def collect_with(policy: Any) -> str:
    env = GymWrapper(Scripted(lambda step: 0.0, lambda step: None))
    collector = Collector(env, policy, frames_per_batch=STEPS, total_frames=STEPS)
    for _ in collector:
        pass
    plan = collector.policy_plan()
    collector.shutdown()
    return str(plan)


def test_a_policy_that_reads_the_clock_is_called() -> None:
    assert "datetime.now" in collect_with(ReadsClock())


def test_a_profiler_goes_on() -> None:
    """``cProfile`` has the one place that Python has for a profiler."""
    with cProfile.Profile() as profile:
        collect_with(Case().policy())
    calls = [entry.callcount for entry in profile.getstats() if getattr(entry.code, "co_name", "") == "call"]
    assert max(calls) >= STEPS


def test_a_vector_times_a_matrix_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    class Multiplies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return observation @ self.weight + 1.0

    collect_with(Multiplies())
    assert not recwarn.list

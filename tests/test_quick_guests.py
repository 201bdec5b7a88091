"""Guests that nobody knows: stepped without TorchRL's ``step_and_maybe_reset`` they give what they give with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from counting import CountingEnv
from swath.collectors import Collector
from swath.envs.guest import GuestEnv
from swath.envs.guest_stepper import GuestStepper

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
STEPS = 30


def rl() -> Any:
    import torchrl.envs

    return torchrl.envs


@pytest.fixture(scope="module", autouse=True)
def _first_serial_env() -> None:
    """Memory of the first one in a process stays: that is no leak of a test."""
    env = rl().SerialEnv(2, lambda: rl().GymWrapper(CountingEnv(9)))
    env.rollout(2)
    env.close()


def gym() -> Any:
    return rl().GymWrapper(CountingEnv(7))


def own_env(flags: str) -> Callable[[], Any]:
    """An env that is written for TorchRL, and leaves out flags that follow from others."""

    def make() -> Any:
        from torchrl.data import Composite, OneHot, Unbounded

        class Own(rl().EnvBase):
            def __init__(self) -> None:
                super().__init__()
                self.observation_spec = Composite(observation=Unbounded((4,)))
                self.action_spec = OneHot(3)
                self.reward_spec = Unbounded((1,))
                if flags == "all":
                    self.done_spec = Composite(
                        {name: Unbounded((1,), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
                    )
                self.inner = CountingEnv(7)

            def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
                return TensorDict(observation=torch.from_numpy(self.inner.reset()[0]))

            def _step(self, tensordict: TensorDictBase) -> TensorDict:
                action = tensordict["action"].argmax(-1).numpy()
                observation, reward, terminated, truncated, _ = self.inner.step(action)
                over = torch.tensor([terminated or truncated])
                data = TensorDict(observation=torch.from_numpy(observation), reward=torch.tensor(reward))
                if flags == "all":
                    data["terminated"], data["truncated"] = torch.tensor([terminated]), torch.tensor([truncated])
                    return data
                return data.set(flags, over.squeeze() if flags == "done" else over)

            def _set_seed(self, seed: int | None) -> None:
                self.inner.reset(seed=seed)

        return Own()

    return make


def unknown(kind: str) -> Any:
    """Transforms that are not known to swath."""
    envs = rl()

    class Sum(envs.RewardSum):
        """Nothing but a subclass."""

    class Shifted(envs.Transform):
        def __init__(self) -> None:
            super().__init__(in_keys=["observation"], out_keys=["shifted"])
            self.total = torch.zeros(4)

        def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
            self.total = self.total + value.reshape(-1, 4).sum(0)  # remembers how often it was called, and with what
            return value + self.total

        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            return self._call(tensordict_reset)

        def transform_observation_spec(self, spec: Any) -> Any:
            spec["shifted"] = spec["observation"].clone()
            return spec

    class Turned(envs.Transform):
        """Another action for the env."""

        def __init__(self) -> None:
            super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

        def _inv_apply_transform(self, action: torch.Tensor) -> torch.Tensor:
            return action.roll(1, -1)

    class Rude(envs.Transform):
        """Overrides the inverse as a whole."""

        def _inv_call(self, tensordict: Any) -> Any:
            return tensordict.set("action", tensordict["action"].roll(2, -1))

    class Impatient(envs.Transform):
        """Ends episodes, and reads the root."""

        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            late = (tensordict["observation"][..., 1:2] >= 3) | next_tensordict["done"]
            next_tensordict["truncated"] = next_tensordict["truncated"] | late
            return next_tensordict.set("done", late)

    class Hooked(envs.Transform):
        def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
            tensordict_["observation"] = tensordict_["observation"] + 1000
            return tensordict, tensordict_

    made: dict[str, Callable[[], Any]] = {
        "subclass": lambda: envs.Compose(envs.StepCounter(max_steps=5), Sum(), envs.InitTracker()),
        "shifted": Shifted,
        "turned": lambda: envs.Compose(Turned(), envs.StepCounter(), Sum()),
        "rude": lambda: envs.Compose(Rude(), Sum()),
        "impatient": lambda: envs.Compose(Impatient(), Sum()),
        "hooked": lambda: envs.Compose(Hooked(), Sum()),
        "function": lambda: lambda data: data.set("observation", data["observation"] * 2),
        "frame skip": lambda: envs.Compose(envs.FrameSkipTransform(2), Sum()),
        "nested": lambda: envs.Compose(envs.Compose(Shifted()), Sum()),
    }
    return made[kind]()


KINDS = ["subclass", "shifted", "turned", "rude", "impatient", "hooked", "function", "frame skip", "nested"]
#: These change what TorchRL does around a step, which is then left to it.
NOT_QUICK = {"rude", "hooked"}


def policy() -> Any:
    def act(observation: torch.Tensor) -> torch.Tensor:
        chosen = observation[..., 1].to(torch.int64) * 2 + (observation[..., 3] > 0)
        return torch.nn.functional.one_hot(chosen % 3, 3)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def assert_as_torchrl(make: Callable[[], Any], is_quick: bool = True, **kwargs: Any) -> None:
    data = []
    for quickly in (True, False):
        CountingEnv.made = 0
        guest = make()
        env = GuestEnv(guest, lower=False)
        env.steps_quickly = quickly
        frames = STEPS * guest.numel()
        collector = Collector(env, policy(), frames_per_batch=frames, total_frames=3 * frames, **kwargs)
        collector.set_seed(5)
        data.append([batch.clone() for batch in collector])
        stepper = collector._rollout._stepper
        assert isinstance(stepper, GuestStepper)
        assert (stepper._quick is not None) is (quickly and is_quick)
        collector.shutdown()
        guest.close(raise_if_closed=False)
    for mine, theirs in zip(*data, strict=True):
        assert {str(key) for key in mine.keys(True, True)} == {str(key) for key in theirs.keys(True, True)}
        for key in theirs.keys(True, True):
            torch.testing.assert_close(
                mine.get(key), theirs.get(key), rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}"
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_unknown_transforms(kind: str, num_envs: int) -> None:
    def make() -> Any:
        return rl().TransformedEnv(gym() if num_envs == 1 else rl().SerialEnv(num_envs, gym), unknown(kind))

    assert_as_torchrl(make, kind not in NOT_QUICK)


@pytest.mark.parametrize("kind", ["subclass", "shifted"])
def test_inside_of_a_serial_env(kind: str) -> None:
    assert_as_torchrl(lambda: rl().SerialEnv(3, lambda: rl().TransformedEnv(gym(), unknown(kind))))


@pytest.mark.parametrize("flags", ["all", "done", "terminated"])
@pytest.mark.parametrize("kind", [None, "subclass", "turned"])
def test_envs_of_users(flags: str, kind: str | None) -> None:
    make = own_env(flags)
    assert_as_torchrl(make if kind is None else lambda: rl().TransformedEnv(make(), unknown(kind)))


@pytest.mark.parametrize(
    "options", [{"max_frames_per_traj": 4}, {"device": "cpu"}, {"reset_at_each_iter": True}], ids=str
)
def test_arguments(options: dict[str, Any]) -> None:
    def make() -> Any:
        return rl().TransformedEnv(gym(), rl().Compose(unknown("function"), rl().InitTracker()))

    assert_as_torchrl(make, **options)


def test_a_method_of_the_env_that_is_overridden_is_called() -> None:
    class Own(rl().GymWrapper):
        def maybe_reset(self, tensordict: Any) -> Any:
            tensordict["observation"] = tensordict["observation"] + 10
            return super().maybe_reset(tensordict)

    assert_as_torchrl(lambda: Own(CountingEnv(7)), is_quick=False)

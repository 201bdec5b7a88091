"""ParallelEnv: the same numbers as SerialEnv, from processes; and what happens when one of them breaks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from counting import CountingEnv, CountingTensorDictEnv, assert_consistent, assert_same, make_counting
from leaks import children, wait_until
from policies_for_tests import deterministic, recurrent
from programs import WarmProgram
from swath.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from swath.envs import Composite, EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv, Unbounded, next_seed
from swath.errors import EnvClosed, EnvError, WorkerDied, WorkerHangs
from swath.testing import check_env

pytestmark = pytest.mark.processes


class DictEnv(gymnasium.Env):
    """Observations of several dtypes, actions of two parts."""

    observation_space = spaces.Dict(
        pixels=spaces.Box(0, 255, (6, 5, 3), np.uint8),
        inner=spaces.Dict(speed=spaces.Box(-1, 1, (2,), np.float64), gear=spaces.Discrete(4)),
    )
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.steps = 0

    def _observe(self) -> dict[str, Any]:
        value = self.offset + self.steps
        return {
            "pixels": np.full((6, 5, 3), value % 256, np.uint8),
            "inner": {"speed": np.full(2, value / 1000, np.float64), "gear": np.int64(value % 4)},
        }

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = int((options or {}).get("start", 0))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        return self._observe(), float(np.sum(action)), self.steps % 7 == 0, False, {}

    def describe_yourself(self, greeting: str) -> str:
        return f"{greeting} {self.offset}"


class BreakingEnv(CountingEnv):
    """Does something at its n-th step."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(longest=1000)
        self.at, self.what, self.taken = at, what, 0

    def step(self, action: Any) -> Any:
        self.taken += 1
        if self.taken == self.at:
            if self.what == "raise":
                raise ValueError("the gearbox is broken")
            if self.what == "exit":
                sys.exit(3)
            if self.what == "hang":
                time.sleep(60)
        return super().step(action)


def test_the_same_data_as_in_this_process() -> None:
    policy = deterministic()

    def collected(env: EnvBase, limit: int | None) -> list[TensorDict]:
        collector = Collector(env, policy, frames_per_batch=200, total_frames=1000, max_frames_per_traj=limit)
        collector.set_seed(3)
        return list(collector)

    for make in (make_counting, CountingTensorDictEnv):
        for limit in (None, 20):  # with a limit, episodes end by themselves and by it in the same step
            ours = collected(ParallelEnv(5, make, num_workers=2), limit)
            for mine, serial in zip(ours, collected(SerialEnv(5, make), limit), strict=True):
                assert_same(mine, serial)


def test_rollouts_steps_and_resets_are_those_of_a_serial_env() -> None:
    with ParallelEnv(3, make_counting, num_workers=2) as ours, SerialEnv(3, make_counting) as serial:
        assert ours.batch_size == serial.batch_size == torch.Size([3])
        assert str(ours.specs) == str(serial.specs)
        assert ours.set_seed(11) == serial.set_seed(11)

        def act(td: Any) -> Any:
            action = torch.nn.functional.one_hot(td["observation"][..., 1].long() % 3, 3)
            return td.set("action", action)

        for options in (
            {"break_when_any_done": False},
            {},
            {"break_when_any_done": False, "break_when_all_done": True},
        ):
            assert_same(ours.rollout(30, act, **options), serial.rollout(30, act, **options))
        # A reset of the second env only.
        first = ours.reset()
        serial.reset()
        mask = torch.tensor([[False], [True], [False]])
        after = [env.reset(act(first.clone()).set("_reset", mask)) for env in (ours, serial)]
        assert_same(after[0].unsqueeze(1), after[1].unsqueeze(1))
        assert torch.equal(after[0]["observation"][0], first["observation"][0])
        assert after[0]["observation"][1, 0] == first["observation"][1, 0] + 1  # another episode


def test_the_contract_of_an_env() -> None:
    for make in (make_counting, CountingTensorDictEnv):
        with ParallelEnv(3, make, num_workers=2) as env:
            check_env(env)


def test_nested_observations_of_any_dtype_and_arguments_for_each_env() -> None:
    kwargs = [{"offset": 10 * i} for i in range(3)]
    with ParallelEnv(3, lambda offset: GymWrapper(DictEnv(offset)), create_env_kwargs=kwargs, num_workers=2) as env:
        data = env.rollout(9, break_when_any_done=False)
        assert data["pixels"].dtype == torch.uint8
        assert data["inner", "speed"].dtype == torch.float64
        assert data["pixels"][:, 0, 0, 0, 0].tolist() == [0, 10, 20]
        assert data["next", "pixels"][:, 6, 0, 0, 0].tolist() == [7, 17, 27]  # the last of an episode
        assert data["pixels"][:, 7, 0, 0, 0].tolist() == [0, 10, 20]
        torch.testing.assert_close(data["next", "reward"].squeeze(-1), data["action"].sum(-1))
        # What children have, as lists; what they can do, too.
        assert env.offset == [0, 10, 20]
        assert env.describe_yourself("I am") == ["I am 0", "I am 10", "I am 20"]
        with pytest.raises(AttributeError):
            env.no_such_thing  # noqa: B018
        # Arguments of a reset, for all and for each.
        assert env.reset(options={"start": 3})["pixels"][:, 0, 0, 0].tolist() == [3, 13, 23]
        each = env.reset(list_of_kwargs=[{"options": {"start": i}} for i in range(3)])
        assert each["pixels"][:, 0, 0, 0].tolist() == [0, 11, 22]


def test_lists_of_factories_and_their_number() -> None:
    with ParallelEnv(2, [lambda: GymWrapper(DictEnv(1)), lambda: GymWrapper(DictEnv(2))]) as env:
        assert env.offset == [1, 2]
    with ParallelEnv(num_workers=2, create_env_fn="CartPole-v1") as env:  # the keyword of the reference
        assert env.batch_size == (2,)
        assert env.num_processes <= 2
    with pytest.raises(RuntimeError, match="3 envs were asked for, but 2 factories"):
        ParallelEnv(3, [make_counting] * 2)
    with pytest.raises(ValueError, match="num_workers=5 for 2 envs"):
        ParallelEnv(2, make_counting, num_workers=5)
    with pytest.raises(ValueError, match="pin_memory is not supported"):
        ParallelEnv(2, make_counting, pin_memory=True)
    with pytest.raises(TypeError, match="unknown argument: 'num_worker'"):
        ParallelEnv(2, make_counting, num_worker=1)
    with pytest.raises(TypeError, match="needs a number of envs"):
        ParallelEnv(2)
    with ParallelEnv(1, make_counting) as env, pytest.raises(EnvError, match="give create_env_kwargs to ParallelEnv"):
        env.update_kwargs({})
    with pytest.raises(EnvError, match="another layout"):
        ParallelEnv(2, [make_counting, lambda: GymEnv("Pendulum-v1")], num_workers=2)
    with pytest.raises(EnvError, match="another layout"):
        ParallelEnv(2, [make_counting, lambda: GymEnv("Pendulum-v1")], num_workers=1)
    assert isinstance(ParallelEnv(1, make_counting, serial_for_single=True), type(SerialEnv(1, make_counting)))


def test_seeds_are_chained_and_state_goes_on() -> None:
    with ParallelEnv(4, make_counting, num_workers=3) as env:
        following = env.set_seed(5)
        expected = 5
        for _ in range(4):
            expected = next_seed(expected)
        assert following == expected
        env.reset()
        state = env.state_dict()
        ours = env.reset()["observation"]
        with ParallelEnv(4, make_counting, num_workers=3) as other:
            other.load_state_dict(state)
            theirs = other.reset()["observation"]
        assert torch.equal(ours[:, 3], theirs[:, 3])  # drawn from the same generators
        assert env.set_seed(5, static_seed=True) == 5
        same = env.reset()["observation"]
        assert torch.equal(same[0], same[3])


def test_limits_and_recurrent_policies_in_a_collector() -> None:
    env = ParallelEnv(4, make_counting, num_workers=2)
    collector = Collector(env, recurrent(), frames_per_batch=200, total_frames=600, max_frames_per_traj=9)
    batches = list(collector)
    assert_consistent(batches)
    done = torch.cat([batch["next", "done"] for batch in batches], 1)
    counts = torch.cat([batch["next", "step_count"] for batch in batches], 1)
    assert int(counts.max()) == 9
    assert bool(done[counts == 9].all())
    starts = torch.cat([batch["step_count"] for batch in batches], 1).squeeze(-1) == 0
    hidden = torch.cat([batch["hidden"] for batch in batches], 1)
    assert not hidden[starts].any()


def test_in_a_worker_of_a_multi_collector() -> None:
    def make() -> EnvBase:
        return ParallelEnv(2, make_counting, num_workers=2)

    collector = MultiSyncCollector([make, make], deterministic(), frames_per_batch=80, total_frames=240, num_workers=2)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [torch.Size([2, 2, 20])] * 3
    assert_consistent(batches)


def test_an_exception_names_the_env_and_the_next_reset_goes_on() -> None:
    makers = [lambda i=i: GymWrapper(BreakingEnv(4 if i == 2 else 10**9, "raise")) for i in range(4)]
    with ParallelEnv(4, makers, num_workers=2) as env:
        with pytest.raises(ValueError, match="the gearbox is broken") as caught:
            env.rollout(10)
        notes = " ".join(caught.value.__notes__)
        assert "env 2" in notes
        assert "worker 1" in notes
        assert env.rollout(2).shape == (4, 2)


def test_sys_exit_in_an_env_ends_neither_side() -> None:
    makers = [lambda i=i: GymWrapper(BreakingEnv(2 if i == 1 else 10**9, "exit")) for i in range(2)]
    with ParallelEnv(2, makers, num_workers=2) as env, pytest.raises(RuntimeError, match="SystemExit: 3"):
        env.rollout(10)


@pytest.mark.alone
@pytest.mark.parametrize("in_the_step", [False, True])
def test_a_killed_process_is_named_within_two_seconds(in_the_step: bool) -> None:
    env = ParallelEnv(4, lambda: GymWrapper(BreakingEnv(5 if in_the_step else 10**9, "hang")), num_workers=2)
    env.rollout(4)
    victim = env._crew.hosts.workers.handles[1].pid  # type: ignore[attr-defined]
    if in_the_step:
        killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
        killer.start()
    else:
        os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+, envs 2 to 3\) was killed by SIGKILL") as caught:
        env.rollout(4)
    assert time.monotonic() - started < 2.3
    assert caught.value.worker == 1
    env.close()


def test_a_step_that_hangs() -> None:
    env = ParallelEnv(2, lambda: GymWrapper(BreakingEnv(3, "hang")), num_workers=2, step_timeout_s=0.5)
    with pytest.raises(WorkerHangs, match=r"longer than step_timeout_s=0\.5"):
        env.rollout(5)
    env.close()


def test_closing() -> None:
    env = ParallelEnv(2, make_counting)
    env.close()
    with pytest.raises(EnvClosed):
        env.close()
    env.close(raise_if_closed=False)
    with pytest.raises(EnvClosed):
        env.reset()
    with pytest.raises(EnvClosed):
        env.set_seed(0)
    before = children()
    env = ParallelEnv(2, make_counting)
    assert len(children() - before) >= 1
    del env
    assert wait_until(lambda: children() <= before)
    with pytest.raises(TypeError, match="give the function that makes it"), ParallelEnv(1, make_counting) as env:
        __import__("pickle").dumps(env)


def test_a_failure_while_envs_are_made_is_raised_here() -> None:
    def broken() -> EnvBase:
        raise KeyError("no such map")

    with pytest.raises(KeyError, match="no such map") as caught:
        ParallelEnv(2, [make_counting, broken], num_workers=2)
    assert any("env 1" in note for note in caught.value.__notes__)


def test_processes_leave_when_their_owner_is_killed() -> None:
    script = (
        "from swath.envs import ParallelEnv\n"
        "env = ParallelEnv(2, 'CartPole-v1', num_workers=2)\n"
        "env.rollout(3)\n"
        "print(*[member.pid for member in env._crew.hosts.workers.handles], flush=True)\n"
        "import signal; signal.pause()\n"
    )
    with WarmProgram(script) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


class TwoRows(EnvBase):
    """An env with a batch size of its own."""

    def __init__(self) -> None:
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite(observation=Unbounded((2, 3)), shape=(2,))
        self.action_spec = Unbounded((2, 1))

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        self.count = torch.zeros(2, 3)
        return TensorDict(observation=self.count.clone(), batch_size=[2])

    def _step(self, tensordict: Any) -> TensorDict:
        self.count = self.count + tensordict["action"]
        return TensorDict(observation=self.count.clone(), reward=tensordict["action"].clone(), batch_size=[2])


def test_children_with_a_batch_size_of_their_own() -> None:
    with ParallelEnv(3, TwoRows, num_workers=2) as env:
        assert env.batch_size == (3, 2)
        data = env.rollout(4)
        assert data.shape == (3, 2, 4)
        expected = data["action"].cumsum(2).expand(3, 2, 4, 3)
        torch.testing.assert_close(data["next", "observation"], expected)


# -- forked processes --------------------------------------------------------------------------------------------------


def steps_of_two_envs() -> ParallelEnv:
    return ParallelEnv(2, make_counting, num_workers=2)


def env_alone() -> tuple[Any, list[Any]]:
    env = steps_of_two_envs()
    td = env.reset()
    uses = [lambda: env.rand_step(td), env.reset, lambda: env.set_seed(0), env.state_dict]
    return env, uses


def env_in_collector() -> tuple[Any, list[Any]]:
    collector = Collector(steps_of_two_envs, deterministic(), frames_per_batch=20)
    next(iter(collector))
    return collector, [lambda: next(iter(collector))]


def batched() -> tuple[Any, list[Any]]:
    collector = AsyncBatchedCollector([make_counting] * 2, deterministic(), frames_per_batch=20)
    next(iter(collector))
    return collector, [lambda: next(iter(collector))]


def close(owner: Any) -> None:
    (owner.close if isinstance(owner, EnvBase) else owner.shutdown)()


@pytest.mark.parametrize("make", [env_alone, env_in_collector, batched])
def test_a_forked_process_does_not_step_its_parents_envs(make: Any) -> None:
    """They would have taken steps that the parent knows nothing of: its next observation would be of another moment."""
    owner, uses = make()
    pid = os.fork()
    if not pid:
        code = 0
        try:
            for use in uses:
                try:
                    use()
                    code = 1
                except RuntimeError as error:
                    code |= 0 if "belong to process" in str(error) else 2
            close(owner)
        except BaseException:
            code = 3
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    for use in uses:
        use()
    close(owner)

"""TorchRL's ``ParallelEnv`` of envs that are known: stepped on rows in its own processes, with the same data.

Envs are seeded by their number, so that those in processes of different collectors are the same.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from counting import CountingEnv
from leaks import children, nothing_is_left
from swath.collectors import Collector
from swath.envs.guest import GuestEnv
from swath.errors import EnvError, WorkerDied

pytestmark = [
    pytest.mark.torchrl,
    pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs the extra torchrl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.processes,
]
ENVS = 2
STEPS = 12


def rl() -> Any:
    import torchrl.envs

    return torchrl.envs


@pytest.fixture(scope="module", autouse=True)
def _first_parallel_env() -> None:
    """Memory and descriptors of the first one in a process stay: that is no leak of a test."""
    for options in ({}, {"use_buffers": False}):
        env = parallel(counting, **options)
        env.rollout(2)
        env.close()


class Numbered(CountingEnv):
    """Its randomness is that of its number."""

    def __init__(self, number: int, longest: int = 9) -> None:
        super().__init__(longest)
        self.np_random = np.random.default_rng(number)

    def how_long(self) -> int:
        return self.length


def counting(number: int = 0) -> Any:
    return rl().GymWrapper(Numbered(number))


def counters(max_steps: int = 6) -> list[Any]:
    return [rl().InitTracker(), rl().StepCounter(max_steps=max_steps), rl().RewardSum()]


def counted(number: int = 0) -> Any:
    return rl().TransformedEnv(counting(number), rl().Compose(*counters()))


def parallel(make: Any, **kwargs: Any) -> Any:
    numbers = [{"number": number} for number in range(ENVS)]
    given = {"mp_start_method": "fork", "create_env_kwargs": numbers, **kwargs}
    return rl().ParallelEnv(ENVS, make, **given)


def plain() -> Any:
    return parallel(counting)


def inside() -> Any:
    return parallel(counted)


def outside() -> Any:
    return rl().TransformedEnv(parallel(counting), rl().Compose(*counters()))


def both() -> Any:
    return rl().TransformedEnv(parallel(counted), rl().RenameTransform(["observation"], ["seen"], create_copy=True))


STACKS = [plain, inside, outside, both]


def policy() -> Any:
    """One-hot actions that depend on what is seen, and on nothing else."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        chosen = observation[..., 1].to(torch.int64) * 2 + (observation[..., 3] > 0)
        return torch.nn.functional.one_hot(chosen % 3, 3)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def assert_equal(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    assert ours.batch_size == theirs.batch_size
    keys = {str(key): key for key in theirs.keys(True, True)}
    assert {str(key) for key in ours.keys(True, True)} == set(keys)
    for key in keys.values():
        assert ours.get(key).dtype == theirs.get(key).dtype, key
        torch.testing.assert_close(
            ours.get(key), theirs.get(key), rtol=0, atol=0, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )


def run(
    make: Callable[[], Any],
    lower: bool,
    attack: Callable[[Any, Any], Any] | None = None,
    num_batches: int = 3,
    seed: int | None = 7,
    **kwargs: Any,
) -> tuple[list[TensorDictBase], list[str]]:
    """Batches, and how the env was stepped in each; the attack comes after the second batch."""
    guest = make()
    collector = Collector(GuestEnv(guest, lower=lower), policy(), frames_per_batch=STEPS * ENVS, **kwargs)
    if seed is not None:
        collector.set_seed(seed)
    batches, plans = [], []
    try:
        for number, batch in enumerate(collector, 1):
            batches.append(batch.clone())
            plans.append(collector.env_plan())
            if number == num_batches:
                break
            if number == 2 and attack is not None:
                attack(guest, collector)
    finally:
        collector.shutdown()
        guest.close(raise_if_closed=False)
    return batches, plans


def compare(make: Callable[[], Any], attack: Callable[[Any, Any], Any] | None = None, **kwargs: Any) -> list[str]:
    """The same, lowered and not; how it was stepped where it could be lowered."""
    ours, plans = run(make, True, attack, **kwargs)
    theirs, _ = run(make, False, attack, **kwargs)
    for own, other in zip(ours, theirs, strict=True):
        assert_equal(own, other)
    return plans


# -- the same data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", STACKS)
def test_data_are_those_of_torchrls_own_collector(make: Callable[[], Any]) -> None:
    import torchrl.collectors

    frames = STEPS * ENVS
    with nothing_is_left():
        theirs = torchrl.collectors.Collector(make(), policy(), frames_per_batch=frames, total_frames=3 * frames)
        expected = [batch.clone() for batch in theirs]
        theirs.shutdown()
        ours, plans = run(make, True, num_batches=3, seed=None)
        assert all(plan.startswith("lowered: in 2 processes of ParallelEnv, each: 1 Gymnasium env") for plan in plans)
        for own, other in zip(ours, expected, strict=True):
            assert_equal(own, other)
        del theirs, ours, expected


def test_seeds_are_torchrls() -> None:
    plans = compare(both, lambda guest, collector: collector.set_seed(11))
    assert all(plan.startswith("lowered") for plan in plans)


@pytest.mark.parametrize("options", [{"memmap": True, "shared_memory": False}, {"num_threads": 1, "device": "cpu"}])
def test_options_that_change_no_data(options: dict[str, Any]) -> None:
    assert compare(functools.partial(parallel, counted, **options), num_batches=2)[-1].startswith("lowered")


def test_each_env_may_have_a_function_of_its_own() -> None:
    def shorter(number: int) -> Any:
        return rl().TransformedEnv(counting(number), rl().Compose(*counters(3)))

    assert compare(lambda: parallel([counted, shorter]))[-1].startswith(
        "lowered: in 2 processes of ParallelEnv, each: 1 Gymnasium env"
    )


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda: rl().VecNormV2(in_keys=["observation"], out_keys=["normal"]),
        lambda: rl().CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["frames"]),
    ],
    ids=["VecNormV2", "CatFrames"],
)
def test_transforms_that_remember(where: str, transform: Callable[[], Any]) -> None:
    def make() -> Any:
        if where == "outside":
            return rl().TransformedEnv(parallel(counted), transform())
        return parallel(lambda number=0: rl().TransformedEnv(counted(number), transform()), auto_wrap_envs=False)

    assert compare(make)[-1].startswith("lowered")


def test_one_that_was_started_before() -> None:
    def make() -> Any:
        env = inside()
        env.set_seed(3)
        env.rollout(5)
        return env

    assert compare(make, seed=None)[-1].startswith("lowered")


# -- whoever uses it meanwhile -----------------------------------------------------------------------------------------


def steps_it(guest: Any, collector: Any) -> None:
    torch.manual_seed(0)
    guest.rollout(4, break_when_any_done=False)


def asks_it(guest: Any, collector: Any) -> None:
    assert [length > 0 for length in guest.how_long()] == [True] * ENVS
    assert [length > 0 for length in collector.env.how_long()] == [True] * ENVS
    assert not guest.is_closed


def repeats_actions(guest: Any, collector: Any) -> None:
    for channel in guest.parent_channels:
        channel.send((("base_env", "__setattr__"), (["wrapper_frame_skip", 2], {})))
        channel.recv()


@pytest.mark.parametrize("make", [inside, outside])
@pytest.mark.parametrize("attack", [steps_it, asks_it])
def test_its_user_may_use_it_between_batches(make: Callable[[], Any], attack: Callable[[Any, Any], Any]) -> None:
    assert compare(make, attack)[-1].startswith("lowered")


@pytest.mark.parametrize("make", [plain, inside])
def test_its_user_sees_where_the_envs_are(make: Callable[[], Any]) -> None:
    """Of envs that are not reset, TorchRL tells what it has in its buffers."""
    seen: dict[bool, TensorDictBase] = {}

    def attack(guest: Any, collector: Any) -> None:
        mask = torch.zeros(ENVS, 1, dtype=torch.bool)
        mask[1] = True
        request = guest.fake_tensordict().empty().set("_reset", mask)
        seen[collector.env.lowering.is_allowed] = guest.reset(request).clone()

    assert compare(make, attack)[-1].startswith("lowered")
    assert_equal(seen[True], seen[False])


def one_hot(*actions: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(actions), 3)


def stepped(env: Any, row: TensorDictBase, *actions: int) -> list[TensorDictBase]:
    """From where the collector has left it: a step, then one that may reset."""
    after = env.step(env.step_mdp(row).set("action", one_hot(*actions)))
    return [
        after.clone(),
        *(
            each.clone()
            for each in env.step_and_maybe_reset(env.step_mdp(after).set("action", one_hot(*reversed(actions))))
        ),
    ]


@pytest.mark.parametrize("how", ["whole", "part", "part taken before", "some"])
def test_its_user_steps_on_from_where_the_collector_was(how: str) -> None:
    """TorchRL writes actions to its buffers before it says anything to its processes."""

    def collect(lower: bool) -> list[TensorDictBase]:
        guest = inside()
        guest.start()
        part = guest[1:] if how == "part taken before" else None
        collector = Collector(GuestEnv(guest, lower=lower), policy(), frames_per_batch=2 * STEPS)
        batches = iter(collector)
        try:
            found = [next(batches).clone() for _ in range(2)]
            row = found[-1][:, -1]
            if how == "whole":
                found += stepped(guest, row, 2, 0)
            elif how == "some":
                root = guest.step_mdp(row).set("action", one_hot(2, 0))
                found.append(guest.step(root.set("_step", torch.tensor([True, False]))).clone())
            else:
                found += stepped(guest[1:] if part is None else part, row[1:], 2)
            return [*found, next(batches).clone()]
        finally:
            collector.shutdown()
            guest.close(raise_if_closed=False)

    for own, other in zip(collect(True), collect(False), strict=True):
        assert_equal(own, other)


def test_two_collectors_of_one_env_take_turns() -> None:
    def collect(lower: bool) -> list[TensorDictBase]:
        guest = inside()
        both = [Collector(GuestEnv(guest, lower=lower), policy(), frames_per_batch=2 * STEPS) for _ in range(2)]
        turns = [iter(collector) for collector in both]
        try:
            return [next(turn).clone() for _ in range(2) for turn in turns]
        finally:
            guest.close()

    for own, other in zip(collect(True), collect(False), strict=True):
        assert_equal(own, other)


def test_its_policy_may_use_it_in_a_batch() -> None:
    def collect(lower: bool) -> TensorDictBase:
        guest = inside()

        def act(observation: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([int(length) for length in guest.how_long()])
            return torch.nn.functional.one_hot((lengths + observation[..., 1].long()) % 3, 3)

        asking = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
        collector = Collector(GuestEnv(guest, lower=lower), asking, frames_per_batch=2 * STEPS)
        try:
            return next(iter(collector)).clone()
        finally:
            collector.shutdown()
            guest.close(raise_if_closed=False)

    assert_equal(collect(True), collect(False))


def test_its_steps_in_a_batch_are_the_collectors() -> None:
    guest = inside()
    wanted: list[Callable[[], Any]] = []
    said: list[str] = []

    def act(observation: torch.Tensor) -> torch.Tensor:
        if wanted:
            do = wanted.pop()
            with pytest.raises(EnvError, match="in the middle of a batch") as raised:
                do()
            said.append(str(raised.value))
        return policy().module(observation)

    interfering = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    collector = Collector(guest, interfering, frames_per_batch=2 * STEPS)
    alone = Collector(inside(), policy(), frames_per_batch=2 * STEPS)
    try:
        wanted += [guest.reset, guest.rand_step]
        batches, expected = iter(collector), iter(alone)
        assert_equal(next(batches), next(expected))
        assert len(said) == 2
        assert_equal(guest.rollout(4, policy()), alone.env.guest.rollout(4, policy()))
        assert_equal(next(batches), next(expected))
    finally:
        collector.shutdown()
        alone.shutdown()


def test_a_thread_asks_while_a_collector_steps() -> None:
    """Answers go to whoever has asked."""
    guest = inside()
    collector = Collector(guest, policy(), frames_per_batch=100 * ENVS, total_frames=600 * ENVS)
    is_over, wrong = threading.Event(), list[Any]()

    def ask() -> None:
        while not is_over.is_set():
            try:
                assert [set(each) for each in guest.state_dict().values()] == [set()] * ENVS
                assert [length > 0 for length in guest.how_long()] == [True] * ENVS
            except BaseException as error:
                wrong.append(error)
                return

    asker = threading.Thread(target=ask)
    try:
        batches = iter(collector)
        next(batches)
        asker.start()
        for _ in range(4):
            assert next(batches)["step_count"].max() <= 6
    finally:
        is_over.set()
        asker.join()
        collector.shutdown()
    assert wrong == []


def test_a_known_transform_is_added_around_it() -> None:
    def unwraps(guest: Any, collector: Any) -> None:
        guest.append_transform(rl().RewardScaling(0.0, 2.0))

    assert compare(outside, unwraps)[-1].startswith("lowered")


def test_an_unknown_transform_is_added_around_it() -> None:
    def adds(guest: Any, collector: Any) -> None:
        guest.append_transform(Halved(in_keys=["reward"], out_keys=["reward"]))

    plans = compare(outside, adds)
    assert plans[1].startswith("lowered")
    assert plans[2] == "stepped as it is: Halved is not known"


def test_what_is_in_its_processes_may_be_changed() -> None:
    assert compare(inside, repeats_actions)[-1].startswith("lowered")
    ours, _ = run(inside, True, repeats_actions)
    steps = ours[2]["next", "observation"][..., 1] - ours[2]["observation"][..., 1]
    assert steps.max() == 2


if importlib.util.find_spec("torchrl") is not None:
    from torchrl.envs import Transform

    class Halved(Transform):
        """A transform that nobody knows."""

        def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
            return value / 2

        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            return tensordict_reset


# -- what is not lowered -----------------------------------------------------------------------------------------------


def test_what_is_not_lowered_says_why() -> None:
    class Own(rl().GymWrapper):
        pass

    def own(number: int) -> Any:
        return Own(Numbered(number))

    def halved(number: int) -> Any:
        return rl().TransformedEnv(counting(number), Halved(in_keys=["reward"], out_keys=["reward"]))

    makers = {
        "ParallelEnv of Own is not known": lambda: parallel(own),
        "it has no buffers (use_buffers=False)": lambda: parallel(counting, use_buffers=False),
        "each of its envs has a TensorDict of its own (share_individual_td)": lambda: parallel(
            counting, share_individual_td=True
        ),
        "Halved is not known": lambda: parallel(halved),
    }
    for reason, make in makers.items():
        assert compare(make, num_batches=1) == [f"stepped as it is: {reason}"]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Failing(gymnasium.Env):
    """Raises in its seventh step, or kills its process."""

    def __init__(self, number: int, kills: bool) -> None:
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.number = number
        self.kills = kills
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        if self.count == 7 and self.number == 1:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the seventh step")
        return np.zeros(4, np.float32), 1.0, False, False, {}


def failing(number: int, kills: bool) -> Any:
    return rl().GymWrapper(Failing(number, kills))


@pytest.mark.parametrize("kills", [False, True])
def test_an_env_that_fails_is_named_and_nothing_is_left(kills: bool) -> None:
    with nothing_is_left():
        guest = parallel(functools.partial(failing, kills=kills))
        collector = Collector(guest, policy(), frames_per_batch=2 * STEPS)
        assert collector.env_plan().startswith("lowered")
        with pytest.raises(WorkerDied if kills else ZeroDivisionError) as raised:
            next(iter(collector))
        said = f"{raised.value} {getattr(raised.value, '__notes__', '')}"
        assert "env 1 of TorchRL's ParallelEnv" in said
        assert ("was killed by SIGKILL" if kills else "the seventh step") in said
        collector.shutdown()
        del collector, guest, raised


def leave_it_open() -> None:
    next(iter(Collector(inside(), policy(), frames_per_batch=2 * STEPS)))
    kept.append(inside())
    next(iter(Collector(kept[0], policy(), frames_per_batch=2 * STEPS)))


kept: list[Any] = []


def test_left_open_at_the_end_it_is_closed() -> None:
    """Python waits for its processes, which would wait for a command."""
    process = multiprocessing.get_context("fork").Process(target=leave_it_open)
    process.start()
    process.join(30)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()


def test_closing_it_ends_its_processes() -> None:
    before = children()
    guest = inside()
    collector = Collector(guest, policy(), frames_per_batch=2 * STEPS)
    next(iter(collector))
    assert not guest.is_closed
    assert len(children() - before) >= ENVS
    collector.shutdown()
    assert guest.is_closed
    assert children() <= before

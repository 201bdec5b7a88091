"""Swath's transforms that remember, of images, and that step the env: against the obvious way to compute the same."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from counting import CountingEnv, CountingTensorDictEnv
from swath.collectors import Collector, MultiSyncCollector
from swath.envs import (
    CatFrames,
    CenterCrop,
    Compose,
    EndOfLifeTransform,
    FrameSkipTransform,
    GrayScale,
    GymWrapper,
    NoopResetEnv,
    RandomTruncationTransform,
    Resize,
    SerialEnv,
    StepCounter,
    TimeMaxPool,
    ToTensorImage,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from swath.errors import EnvError


def counting(longest: int = 6) -> GymWrapper:
    return GymWrapper(CountingEnv(longest))


def several(num: int = 3) -> Any:
    return SerialEnv(num, counting)


def batches(env: Any, num: int = 3, steps: int = 15, **kwargs: Any) -> list[Any]:
    env.set_seed(1)
    torch.manual_seed(1)
    frames = steps * max(1, env.batch_size.numel())
    collector = Collector(env, None, frames_per_batch=frames, total_frames=num * frames, **kwargs)
    return [batch.clone() for batch in collector]


def rows(data: list[Any]) -> list[Any]:
    """Each env's steps in order."""
    whole: Any = torch.cat(data, -1)
    return list(whole) if whole.ndim == 2 else [whole]


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_vec_norm_of_one_env(decay: float) -> None:
    """Every observation counts once, also an episode's last and first."""
    env = TransformedEnv(counting(), VecNorm(in_keys=["observation"], out_keys=["normed"], decay=decay))
    total, squares, count = torch.zeros(4), torch.zeros(4), torch.zeros(1)

    def normed(value: torch.Tensor) -> torch.Tensor:
        nonlocal total, squares, count
        total, squares, count = total * decay + value, squares * decay + value**2, count * decay + 1
        mean = total / count
        deviation = (squares / count - mean**2).clamp_min(1e-4).sqrt()
        return (value - mean) / deviation.clamp_min(1e-4)

    expected, last = torch.zeros(4), None
    for step in rows(batches(env))[0]:
        if step["collector", "traj_ids"] != last:
            expected = normed(step["observation"])
        assert torch.equal(step["normed"], expected)
        expected = normed(step["next", "observation"])
        assert torch.equal(step["next", "normed"], expected)
        last = step["collector", "traj_ids"]


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
def test_frozen_statistics_stay(kind: Any) -> None:
    norm = kind(in_keys=["observation", "reward"], decay=0.9)
    env = TransformedEnv(several(), norm)
    batches(env, 1)
    before = copy.deepcopy(norm.freeze().state_dict())
    batches(env, 1)
    assert str(before) == str(norm.state_dict())
    norm.unfreeze()
    batches(env, 1)
    assert str(before) != str(norm.state_dict())


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
def test_statistics_are_saved_and_loaded(kind: Any) -> None:
    options = {} if kind is VecNorm else {"reduce_batch_dims": True}

    def make() -> Any:
        return TransformedEnv(several(), kind(in_keys=["observation", "reward"], out_keys=["o", "r"], **options))

    env, other = make(), make()
    data = batches(env, 1)
    other.load_state_dict(env.state_dict())
    for part in ("loc", "scale"):
        assert (getattr(env.transform[0], part) == getattr(other.transform[0], part)).all()
    restored = env.transform[0].denorm(data[0])
    assert restored["observation"].shape == data[0]["observation"].shape
    frozen = env.transform[0].frozen_copy()
    was = frozen.loc.clone()
    batches(env, 1)
    assert (frozen.loc == was).all()
    assert not (env.transform[0].loc == was).all()
    with pytest.raises(ValueError, match="state"):
        env.transform[0].load_state_dict({"other": torch.ones(1)})
    with pytest.raises(ValueError, match="state"):
        env.transform[0].load_state_dict({})


def test_loaded_statistics_are_used_at_once() -> None:
    """Also those that were loaded into a transform that is bound already."""
    norm = VecNormV2(in_keys=["observation"])
    env = TransformedEnv(counting(), norm)
    env.rollout(9, break_when_any_done=False)
    state = norm.state_dict()
    env.rollout(9, break_when_any_done=False)
    norm.load_state_dict(state)
    assert int(norm.state_dict()["count"]["observation"]) == int(state["count"]["observation"])
    norm.freeze()
    fresh = env.reset()["observation"]
    raw = norm.denorm(TensorDict(observation=fresh))["observation"]
    assert float(raw[1]) == pytest.approx(0, abs=1e-3)  # an episode's first step


def test_averages_of_each_env_or_of_all() -> None:
    own, common = VecNormV2(in_keys=["observation"]), VecNormV2(in_keys=["observation"], reduce_batch_dims=True)
    for norm in (own, common):
        batches(TransformedEnv(several(), norm), 1)
    assert own.loc["observation"].shape == (3, 4)
    assert common.loc["observation"].shape == (4,)


def test_new_api_makes_the_new_one() -> None:
    assert isinstance(VecNorm(in_keys=["observation"], new_api=True), VecNormV2)
    assert type(VecNorm(in_keys=["observation"], new_api=False)) is VecNorm


def test_shared_statistics() -> None:
    """Two envs that are given the same go on with them."""
    norm = VecNorm(in_keys=["observation"])
    batches(TransformedEnv(counting(), norm), 1)
    shared = norm._td.clone().share_memory_()
    count = float(shared["observation_count"])
    for _ in range(2):
        batches(TransformedEnv(counting(), VecNorm(in_keys=["observation"], shared_td=shared)), 1)
        assert float(shared["observation_count"]) > count + 10
        count = float(shared["observation_count"])
    averages = TensorDict(loc={"observation": torch.zeros(4)}, var={"observation": torch.zeros(4)})
    averages["count", "observation"] = torch.zeros((), dtype=torch.int64)
    batches(TransformedEnv(counting(), VecNormV2(in_keys=["observation"], shared_data=averages)), 1)
    assert int(averages["count", "observation"]) > 10


def test_only_some_envs_step() -> None:
    """Those that do not step count for nothing, and keep what they have."""
    for norm in (VecNorm(in_keys=["observation"]), VecNormV2(in_keys=["observation"], decay=0.5)):
        env = TransformedEnv(several(), norm)
        root = env.reset()
        before = norm.state_dict()
        root.update(env.full_action_spec.rand())
        root["_step"] = torch.tensor([True, False, True])
        after: Any = env.step(root)["next"]
        assert torch.equal(after["observation"][1], root["observation"][1])
        assert not torch.equal(after["observation"][0], root["observation"][0])
        now = norm.state_dict()
        if isinstance(norm, VecNorm):
            assert float(now["observation_count"]) == pytest.approx(float(before["observation_count"]) + 2, abs=1e-2)
        else:
            assert torch.equal(now["loc"]["observation"][1], before["loc"]["observation"][1])
            assert not torch.equal(now["loc"]["observation"][2], before["loc"]["observation"][2])


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [counting, several, CountingTensorDictEnv])
@pytest.mark.parametrize("padding", ["same", "constant"])
def test_cat_frames(make: Any, padding: str) -> None:
    frames = CatFrames(3, -1, ["observation"], ["past"], padding=padding, padding_value=-7)
    for row in rows(batches(TransformedEnv(make(), frames))):
        history: list[torch.Tensor] = []
        last = None
        for step in row:
            if step["collector", "traj_ids"] != last:
                first = step["observation"]
                history = [*([first] * 2 if padding == "same" else [torch.full((4,), -7.0)] * 2), first]
            assert torch.equal(step["past"], torch.cat(history[-3:]))
            history.append(step["next", "observation"])
            assert torch.equal(step["next", "past"], torch.cat(history[-3:]))
            last = step["collector", "traj_ids"]


@pytest.mark.parametrize("make", [counting, several])
def test_time_max_pool(make: Any) -> None:
    for row in rows(batches(TransformedEnv(make(), TimeMaxPool(["observation"], ["most"], T=3)))):
        history: list[torch.Tensor] = []
        last = None
        for step in row:
            if step["collector", "traj_ids"] != last:
                history = [torch.zeros(4), torch.zeros(4), step["observation"]]
            assert torch.equal(step["most"], torch.stack(history[-3:]).amax(0))
            history.append(step["next", "observation"])
            assert torch.equal(step["next", "most"], torch.stack(history[-3:]).amax(0))
            last = step["collector", "traj_ids"]


@pytest.mark.parametrize("transform", [CatFrames(2, -1, ["observation"]), TimeMaxPool(["observation"], T=2)])
def test_frames_of_envs_that_do_not_step(transform: Any) -> None:
    env = TransformedEnv(several(), transform)
    root = env.reset()
    root.update(env.full_action_spec.rand())
    root["_step"] = torch.tensor([False, True, False])
    after: Any = env.step(root)["next"]
    assert torch.equal(after["observation"][[0, 2]], root["observation"][[0, 2]])
    whole = TransformedEnv(several(), transform).reset()
    assert whole["observation"].shape == after["observation"].shape


# -- images ------------------------------------------------------------------------------------------------------------


class Pictures(gymnasium.Env):
    def __init__(self) -> None:
        self.observation_space = spaces.Dict(pixels=spaces.Box(0, 255, (9, 7, 3), np.uint8))
        self.action_space = spaces.Discrete(2)

    def _observe(self) -> Any:
        return {"pixels": self.np_random.integers(0, 256, (9, 7, 3), dtype=np.uint8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        return self._observe(), 1.0, bool(self.np_random.integers(4) == 0), False, {}


IMAGES: list[Transform] = [
    ToTensorImage(in_keys=["pixels"], out_keys=["image"]),
    ToTensorImage(from_int=False, dtype=torch.uint8, in_keys=["image"], out_keys=["image"]),
    GrayScale(["image"], ["image"]),
    Resize(4, 5, in_keys=["image"], out_keys=["image"]),
    CenterCrop(4, 9, ["image"], ["image"]),
]


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("chosen", [[0], [0, 2], [0, 3], [0, 4], [0, 2, 3, 4], [0, 4, 3, 2]], ids=str)
def test_images_on_rows_are_as_one_by_one(chosen: list[int], num: int) -> None:
    stack = [IMAGES[number] for number in chosen]
    base = GymWrapper(Pictures()) if num == 1 else SerialEnv(num, lambda: GymWrapper(Pictures()))
    for row in rows(batches(TransformedEnv(base, Compose(*stack)), 2)):
        for step in row:
            for place in (step, step["next"]):
                value = place["pixels"]
                for transform in stack:
                    value = transform._apply_transform(value)
                assert torch.equal(place["image"], value)


def test_images_of_bytes() -> None:
    bytes_first = ToTensorImage(from_int=False, dtype=torch.uint8, out_keys=["image"], in_keys=["pixels"])
    stack = [bytes_first, *IMAGES[2:4]]
    (data,) = batches(TransformedEnv(GymWrapper(Pictures()), Compose(*stack)), 1)
    assert data["image"].dtype == torch.uint8
    value = data["pixels"][3]
    for transform in stack:
        value = transform._apply_transform(value)
    assert torch.equal(data["image"][3], value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_resize_keeps_what_is_constant(mode: str, dtype: torch.dtype) -> None:
    image = torch.full((2, 3, 9, 7), 200, dtype=dtype)
    made = Resize((4, 5), interpolation=mode)._apply_transform(image)
    assert made.shape == (2, 3, 4, 5)
    assert made.dtype == dtype
    torch.testing.assert_close(made, torch.full_like(made, 200))
    assert Resize(9, 7)._apply_transform(image) is image


def test_center_crop() -> None:
    image = torch.arange(63).view(1, 9, 7)
    assert torch.equal(CenterCrop(3)._apply_transform(image), image[:, 3:6, 2:5])
    wide = CenterCrop(3, 9)._apply_transform(image)
    assert torch.equal(wide[..., 1:8], image[:, 3:6])
    assert not wide[..., 0].any()
    assert not wide[..., 8].any()


# -- transforms that step, ask or end ----------------------------------------------------------------------------------


def test_noops_are_seen_before_it_and_not_behind() -> None:
    stack = Compose(StepCounter(step_count_key="all"), NoopResetEnv(2, random=False), StepCounter())
    (row,) = rows(batches(TransformedEnv(counting(9), stack)))
    assert torch.equal(row["all"], row["step_count"] + 2)
    assert torch.equal(row["observation"][:, 1], row["all"][:, 0].float())


def test_noops_in_each_of_several() -> None:
    env = SerialEnv(3, lambda: TransformedEnv(counting(20), NoopResetEnv(5)))
    env.set_seed(0)
    counts = [env.reset()["observation"][:, 1] for _ in range(10)]
    assert 0 < float(torch.stack(counts).mean()) < 5
    assert float(torch.stack(counts).max()) == 4


def test_noops_that_no_episode_takes() -> None:
    env = TransformedEnv(counting(3), NoopResetEnv(5, random=False))
    with pytest.raises(EnvError, match="give fewer noops"):
        env.reset()


def test_random_truncation() -> None:
    stack = Compose(StepCounter(), RandomTruncationTransform(2, 4, prob=0.5))
    for row in rows(batches(TransformedEnv(SerialEnv(3, lambda: counting(10**6)), stack), 4)):
        ends = row["next", "step_count"][row["next", "done"]]
        assert set(ends[1:].tolist()) == {2, 3, 4}
        assert torch.equal(row["next", "truncated"], row["next", "done"])


class Lives(CountingEnv):
    def lives(self) -> int:
        return 5 - self.step_count // 3


@pytest.mark.parametrize("num", [1, 3])
def test_lives(num: int) -> None:
    def make() -> Any:
        return GymWrapper(Lives(11))

    eol = EndOfLifeTransform(eol_attribute="unwrapped.lives")
    for row in rows(batches(TransformedEnv(make() if num == 1 else SerialEnv(num, make), eol))):
        steps = row["next", "observation"][:, 1].long()
        assert torch.equal(row["next", "lives"], 5 - steps // 3)
        lost = (steps % 3 == 0).unsqueeze(-1) | row["next", "done"]
        assert torch.equal(row["next", "end-of-life"], lost)
        assert torch.equal(row["lives"], 5 - row["observation"][:, 1].long() // 3)


def test_lives_of_an_env_without_gymnasium() -> None:
    with pytest.raises(EnvError, match="no Gymnasium env"):
        TransformedEnv(CountingTensorDictEnv(), EndOfLifeTransform()).reset()


@pytest.mark.parametrize("make", [lambda: counting(50), CountingTensorDictEnv])
def test_frame_skip(make: Any) -> None:
    (row,) = rows(batches(TransformedEnv(make(), Compose(FrameSkipTransform(3), StepCounter()))))
    assert torch.equal(row["next", "observation"][:, 1], 3 * row["next", "step_count"][:, 0].float())
    taken = row["next", "observation"][:, 2]
    steps = row["next", "observation"][:, 1]
    assert torch.equal(row["next", "reward"][:, 0], (3 * steps - 3) + 0.75 * taken)


# -- in workers --------------------------------------------------------------------------------------------------------


def transformed() -> Any:
    frames = CatFrames(3, -1, ["observation"], ["past"])
    return TransformedEnv(counting(), Compose(NoopResetEnv(1), frames, VecNormV2(["observation"]), VecNorm(["past"])))


@pytest.mark.processes
def test_in_a_worker() -> None:

    def run(kind: Any, envs: Any) -> list[Any]:
        collector = kind(envs, None, frames_per_batch=20, total_frames=40)
        collector.set_seed(2)
        data = [batch.reshape(-1).clone() for batch in collector]
        collector.shutdown()
        return data

    for mine, here in zip(run(MultiSyncCollector, [transformed]), run(Collector, transformed), strict=True):
        assert mine["past"].shape == here["past"].shape == (20, 12)
        assert bool(mine["next", "past"].isfinite().all())
        assert torch.equal(mine["next", "done"].any(), here["next", "done"].any())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VecNorm([]), "nothing"),
        (lambda: VecNorm(["observation"], decay=0.0), "decay"),
        (lambda: VecNorm(["observation"], eps=0.0), "eps"),
        (lambda: VecNorm(["observation"], ["a", "b"]), "length"),
        (lambda: VecNorm(["observation"], shapes=[(), ()]), "shapes"),
        (lambda: VecNorm(["observation"], shapes=[(3,)]), "end in"),
        (lambda: VecNorm(["nothing"]), "gives no"),
        (lambda: VecNorm(["observation"], shared_td=TensorDict(observation_sum=torch.ones(4))), "share_memory_"),
        (lambda: VecNorm(["observation"], shared_td=TensorDict(other=torch.ones(4)).share_memory_()), "statistics of"),
        (lambda: VecNormV2(["observation"], stateful=False), "stateful"),
        (lambda: VecNormV2(["observation"], shared_data=_averages(3)), "its statistics"),
        (lambda: CatFrames(0, -1, ["observation"]), "N must"),
        (lambda: CatFrames(2, 0, ["observation"]), "negative"),
        (lambda: CatFrames(2, -2, ["observation"]), "dimensions"),
        (lambda: CatFrames(2, -1), "gives no"),
        (lambda: CatFrames(2, -1, ["reward"]), "reward"),
        (lambda: CatFrames(2, -1, ["observation"], padding="zeros"), "padding"),
        (lambda: CatFrames(2, -1, ["observation"], as_inverse=True), "as_inverse"),
        (lambda: CatFrames(2, -1, ["observation"], future=True), "future"),
        (lambda: CatFrames(2, -1, ["observation"], mask_key="m"), "mask_key"),
        (lambda: CatFrames(2, -1, ["observation"], reset_key=("agent", "_reset")), "reset_key"),
        (lambda: CatFrames(2, -1, ["observation"], done_key="over"), "done_key"),
        (lambda: TimeMaxPool(T=0), "T must"),
        (lambda: TimeMaxPool(["reward"], T=2), "reward"),
        (lambda: ToTensorImage(in_keys=["observation"]), "no image"),
        (lambda: GrayScale(["observation"]), "no image"),
        (lambda: Resize(0), "positive"),
        (lambda: Resize(3, interpolation="lanczos"), "interpolation"),
        (lambda: CenterCrop(0), "positive"),
        (lambda: NoopResetEnv(0), "noops"),
        (lambda: RandomTruncationTransform(3, 2), "min_horizon"),
        (lambda: RandomTruncationTransform(1, 2, prob=2), "prob"),
        (lambda: RandomTruncationTransform(1, 2, done_key="over"), "flag"),
        (lambda: RandomTruncationTransform(1, 2), "StepCounter"),
        (lambda: EndOfLifeTransform(done_key="over"), "done_key"),
        (lambda: FrameSkipTransform(0), "frame_skip"),
        (lambda: Compose(StepCounter(), FrameSkipTransform(2)), "first"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError), match=message):
        TransformedEnv(counting(), make()).reset()


def _averages(size: int) -> TensorDict:
    zeros = {"observation": torch.zeros(size)}
    return TensorDict(loc=dict(zeros), var=dict(zeros), count={"observation": torch.zeros((), dtype=torch.int64)})


def test_refused_of_integers_and_of_several() -> None:
    with pytest.raises(TypeError, match="cast"):
        TransformedEnv(GymWrapper(Pictures()), VecNorm(["pixels"]))
    with pytest.raises(ValueError, match="channels in front"):
        TransformedEnv(GymWrapper(Pictures()), GrayScale())
    with pytest.raises(ValueError, match="single env"):
        TransformedEnv(several(), NoopResetEnv())

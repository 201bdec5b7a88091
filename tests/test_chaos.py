"""Random calls and real kills, with an oracle that looks at every frame: ``tests/chaos.py`` plays more of it."""

from __future__ import annotations

import numpy as np
import pytest

import chaos
from chaos_env import CHECK, RECEIVED, STEP, SignedEnv, check_of, digest_of, signing_policy
from chaos_oracle import Frames, Wrong, check_frames, check_marks, check_story
from chaos_round import KINDS, Plan
from swath.collectors import Collector
from swath.envs import GymWrapper

#: Each kind of collector, with a kill where there is somebody to kill. Rounds that once failed are among them: rows of
#: zeros (MultiAsync 159), a hole (MultiSync 117726), too many frames (MultiSync 46116), torn weights (AsyncBatched 91),
#: an update that hangs (MultiSync 51).
SEEDS = {
    "Collector": [7, 14],
    "MultiSync": [51, 46116, 117726],
    "MultiAsync": [159, 506],
    "AsyncCollector": [10],
    "AsyncBatched": [91],
    "ParallelEnv": [502],
    "Distributed": [6, 503],
}
MORE_SEEDS = {
    "Collector": [602, 609],
    "MultiSync": [3, 8, 11, 15, 505, 603, 1047, 1249],
    "MultiAsync": [2, 7, 9, 16, 604],
    "AsyncCollector": [3, 17, 500, 605],
    "AsyncBatched": [111, 139],
    "ParallelEnv": [12, 607],
    "Distributed": [13, 608],
}
assert tuple(SEEDS) == tuple(MORE_SEEDS) == KINDS


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in SEEDS[kind]])
def test_every_frame_is_true_whatever_is_called_and_killed(kind: str, seed: int) -> None:
    chaos.play(kind, seed)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_is_true_in_many_rounds(kind: str) -> None:
    for seed in MORE_SEEDS[kind]:
        chaos.play(kind, seed)


def test_a_seed_says_all_of_a_round() -> None:
    assert Plan.of("MultiAsync", 3) == Plan.of("MultiAsync", 3) != Plan.of("MultiAsync", 4)
    modes = {Plan.of(kind, seed).mode for kind in KINDS for seed in range(20)}
    assert modes == {"iterate", "store", "background"}


# -- the oracle sees what is wrong -------------------------------------------------------------------------------------


def true_frames() -> Frames:
    """Two batches of 50 frames of one env."""
    env = GymWrapper(SignedEnv(0, 12, 0.0, None))
    collector = Collector(env, signing_policy(0, 4), frames_per_batch=50, total_frames=100, track_policy_version=True)
    return Frames.cat([Frames.of(batch, number) for number, batch in enumerate(collector)])


def judge(frames: Frames, num_cuts: int = 0) -> None:
    check_frames(frames)
    check_story(frames, num_cuts=num_cuts, num_kills=0)
    check_marks(frames, stored=False, num_cuts=num_cuts)


def test_the_oracle_finds_nothing_in_true_frames() -> None:
    judge(true_frames())


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("root", 0, "no env made this"),
        ("next", 0, "no env made this"),
        ("action", 0, "the env got another action"),
        ("reward", 0, "the reward is another step's"),
        ("version", 1, "other weights than policy_version says"),
        ("terminated", True, "terminated is not what the env said"),
        ("done_before", True, "done at the root"),
        ("ids", 10_000, r"not in one piece|lacks its beginning"),
    ],
)
def test_the_oracle_sees_a_frame_that_is_not_true(key: str, value: float, what: str) -> None:
    frames = true_frames()
    goes_on = (frames.root[:, STEP] == 1) & ~frames.terminated & ~frames.truncated
    getattr(frames, key)[goes_on.nonzero()[0][0]] = value  # the second of an episode that has a third
    with pytest.raises(Wrong, match=what):
        judge(frames)


def test_the_oracle_sees_torn_weights() -> None:
    frames = true_frames()
    frames.action[20, 3] = 1  # and the env says that it got just this
    frames.next[20, RECEIVED] = digest_of(frames.action[20])
    frames.next[20, CHECK:] = check_of(frames.next[20])
    with pytest.raises(Wrong, match="torn weights"):
        judge(frames)


def test_the_oracle_sees_what_is_missing_doubled_or_in_another_order() -> None:
    frames = true_frames()
    order = np.arange(len(frames))
    with pytest.raises(Wrong, match=r"a hole in a trajectory|frames were lost|lacks its beginning"):
        judge(frames[np.delete(order, 20)])
    with pytest.raises(Wrong, match="there twice"):
        judge(frames[np.insert(order, 20, 20)])
    with pytest.raises(Wrong, match=r"not in order|not in one piece"):
        judge(frames[np.r_[order[:20], order[:20:-1]]])

"""Transforms that step the env, ask it, or end its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from swath.envs.transforms.arguments import require_one_episode, require_positive
from swath.envs.transforms.base import Transform
from swath.envs.transforms.rows import Driver, Rows, Stage
from swath.envs.transforms.specs import Specs
from swath.errors import EnvError
from swath.keys import as_key, show
from swath.specs import Categorical, NestedKey, Unbounded

#: So often an episode may end before all of its first actions were taken.
MAX_TRIALS = 10


class NoopResetEnv(Transform):
    """Takes random actions after a reset: up to ``noops`` (``noops`` excluded), or ``noops`` with ``random=False``.

    The transforms before it see these steps, those behind it only the last. It is of a single env: give it to each env
    of a ``SerialEnv``.

    >>> from swath.envs import GymEnv, StepCounter, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    >>> env.append_transform(NoopResetEnv(3, random=False)).reset()["step_count"]
    tensor([3])
    """

    is_by_env = False
    drives = True

    _shown = ("noops", "random")

    def __init__(self, noops: int = 30, random: bool = True) -> None:
        require_positive("NoopResetEnv", "noops", noops, least=1 if random else 0)
        super().__init__()
        self.noops = noops
        self.random = random
        #: Draws what is done in those steps; None: from the env's specs.
        self.draw: Callable[[], Any] | None = None

    def transform_specs(self, specs: Specs) -> None:
        if specs.batch_size.numel() > 1:
            raise ValueError(
                f"NoopResetEnv is of a single env, not of {specs.batch_size.numel()}; give one to each: "
                "SerialEnv(n, lambda: TransformedEnv(env, NoopResetEnv()))"
            )
        self._spec = specs.action.clone()

    def bind(self, rows: Rows) -> Stage:
        assert rows.driver is not None
        return _NoopStage(self, rows.driver, self.draw or self._spec.rand)


class _NoopStage:
    def __init__(self, transform: NoopResetEnv, driver: Driver, draw: Callable[[], Any]) -> None:
        self._transform = transform
        self._driver = driver
        self._draw = draw

    def step(self, env_ids: Sequence[int] | None) -> None:
        pass

    def reset(self, env_ids: Sequence[int]) -> None:
        noops = self._transform.noops
        if self._transform.random:
            noops = int(torch.randint(noops, (1,)).item())
        for _ in range(MAX_TRIALS + 1):
            if self._takes(noops, list(env_ids)):
                return
        raise EnvError(
            f"NoopResetEnv: {MAX_TRIALS + 1} times an episode was over before its {noops} first actions; give fewer "
            "noops"
        )

    def _takes(self, num: int, env_ids: list[int]) -> bool:
        """Whether so many actions were taken; else the env was reset again."""
        driver = self._driver
        for _ in range(num):
            driver.act(self._draw())
            if driver.step(env_ids):
                driver.reset(env_ids)
                return False
        return True


class RandomTruncationTransform(Transform):
    """Truncates episodes at random lengths, so that envs which began together do not end together.

    The first episode of each env ends after 1 to ``max_horizon`` steps. Of those behind it a part (``prob``; of the
    very next one ``first_episode_prob``) ends after ``min_horizon`` to ``max_horizon``, the others after
    ``max_horizon``.
    A ``StepCounter`` must come before it.

    >>> from swath.envs import Compose, GymEnv, StepCounter, TransformedEnv
    >>> cut = Compose(StepCounter(), RandomTruncationTransform(2, 4))
    >>> TransformedEnv(GymEnv("CartPole-v1"), cut).rollout(100).shape[0] <= 4
    True
    """

    is_by_env = False

    _shown = ("min_horizon", "max_horizon", "prob", "first_episode_prob")

    def __init__(
        self,
        min_horizon: int,
        max_horizon: int,
        prob: float = 0.0,
        first_episode_prob: float | None = None,
        *,
        step_count_key: NestedKey = "step_count",
        truncated_key: NestedKey = "truncated",
        done_key: NestedKey = "done",
    ) -> None:
        first_episode_prob = prob if first_episode_prob is None else first_episode_prob
        for name, given in (("prob", prob), ("first_episode_prob", first_episode_prob)):
            if not 0 <= given <= 1:
                raise ValueError(f"RandomTruncationTransform: {name} must be in [0, 1], got {given}")
        if not 1 <= min_horizon <= max_horizon:
            raise ValueError(
                "RandomTruncationTransform: 1 <= min_horizon <= max_horizon must hold, got "
                f"{min_horizon} and {max_horizon}"
            )
        if truncated_key != "truncated" or done_key != "done":
            raise ValueError("RandomTruncationTransform: an episode that is cut is truncated and done, no other flag")
        super().__init__()
        self.min_horizon = min_horizon
        self.max_horizon = max_horizon
        self.prob = prob
        self.first_episode_prob = first_episode_prob
        self.step_count_key = step_count_key
        #: Whose the lengths are that were drawn; None: each env's own.
        self.source: Any = None

    @property
    def ends_episodes(self) -> bool:
        return True

    def transform_specs(self, specs: Specs) -> None:
        if specs.kind_of(as_key(self.step_count_key)) is None:
            raise KeyError(
                f"RandomTruncationTransform: nothing gives {show(as_key(self.step_count_key))}; "
                "put a StepCounter before it"
            )
        if "truncated" not in specs.done:
            specs.done["truncated"] = Categorical(2, (*specs.batch_size, 1), torch.bool)

    def bind(self, rows: Rows) -> Stage:
        return _TruncationStage(self, rows)


class _Horizons:
    """How long episodes may be, of all envs; the rest is as the transform says."""

    def __init__(self, transform: RandomTruncationTransform) -> None:
        self._transform = transform
        self._horizons: Any = None
        self._first_episode: Any = None
        self._initialized = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


class _TruncationStage:
    def __init__(self, transform: RandomTruncationTransform, rows: Rows) -> None:
        self.source = transform.source or _Horizons(transform)
        self._rows = rows
        slot = rows[transform.step_count_key]
        self._count, self._shape = slot.array.reshape(-1), slot.row.shape

    def step(self, env_ids: Sequence[int] | None) -> Sequence[int] | None:
        over = np.flatnonzero(self._count >= self.source._horizons.numpy().reshape(-1)).tolist()
        if not over:
            return None
        if env_ids is not None:
            over = [env for env in over if env in env_ids]
        self._rows.truncated[over] = True
        return over

    def reset(self, env_ids: Sequence[int]) -> None:
        source = self.source
        if not source._initialized:
            source._horizons = torch.randint(1, source.max_horizon + 1, self._shape)
            source._first_episode = torch.ones(self._shape, dtype=torch.bool)
            source._initialized = True
            return
        if len(env_ids) == self._rows.num_envs and not self._rows.ended:
            return  # nobody's episode was over: all begin again, with the lengths that they had
        horizons, first = source._horizons.view(-1), source._first_episode.view(-1)
        env_ids = list(env_ids)
        if source.prob == 0 and source.first_episode_prob == 0:
            horizons[env_ids] = source.max_horizon
        else:
            drawn = torch.randint(source.min_horizon, source.max_horizon + 1, (len(env_ids),))
            of_first, of_others = torch.tensor(source.first_episode_prob), torch.tensor(source.prob)
            prob = torch.where(first[env_ids], of_first, of_others)
            drawn[torch.rand(len(env_ids)) > prob] = source.max_horizon
            horizons[env_ids] = drawn
        first[env_ids] = False


class EndOfLifeTransform(Transform):
    """Says under ``eol_key`` whether a step cost a life, or ended the episode; ``lives_key`` has how many are left.

    Args:
        eol_attribute: what has, or returns, the number of lives: a path that begins at the Gymnasium env.

    >>> import gymnasium
    >>> from swath.envs import GymWrapper, TransformedEnv
    >>> env = gymnasium.make("CartPole-v1")
    >>> env.unwrapped.lives = 3
    >>> TransformedEnv(GymWrapper(env), EndOfLifeTransform(eol_attribute="unwrapped.lives")).reset()["lives"]
    tensor(3)
    """

    is_by_env = False

    _shown = ("eol_key", "lives_key", "eol_attribute")

    def __init__(
        self,
        eol_key: NestedKey = "end-of-life",
        lives_key: NestedKey = "lives",
        done_key: NestedKey = "done",
        eol_attribute: str = "unwrapped.ale.lives",
    ) -> None:
        require_one_episode("EndOfLifeTransform", "done_key", done_key, "done")
        super().__init__()
        self.eol_key = eol_key
        self.lives_key = lives_key
        self.done_key = done_key
        self.eol_attribute = eol_attribute.split(".")
        #: Asks for the lives that are left; None: the env, by ``eol_attribute``.
        self.ask_lives: Callable[[], Any] | None = None

    def transform_specs(self, specs: Specs) -> None:
        specs.put(as_key(self.eol_key), Categorical(2, (*specs.batch_size, 1), torch.bool), "observation")
        specs.put(as_key(self.lives_key), Unbounded(specs.batch_size, torch.int64), "observation")

    def bind(self, rows: Rows) -> Stage:
        return _LivesStage(rows, self.eol_key, self.lives_key, self.ask_lives or self._getter(rows.base))

    def _getter(self, base: Any) -> Callable[[], Any]:
        gym_envs = getattr(base, "gym_envs", None)
        if not gym_envs or not all(isinstance(gym_env, gymnasium.Env) for gym_env in gym_envs):
            raise EnvError(
                f"EndOfLifeTransform: {base!r} has no Gymnasium env in this process to ask for its lives; put it "
                "around each env: SerialEnv(n, lambda: TransformedEnv(GymEnv(...), EndOfLifeTransform())), or "
                "ParallelEnv in place of SerialEnv"
            )

        def ask() -> list[int]:
            lives = []
            for gym_env in gym_envs:
                found: Any = gym_env
                for name in self.eol_attribute:
                    found = getattr(found, name)
                number: Any = found() if callable(found) else found
                lives.append(int(number))
            return lives

        return ask


class _LivesStage:
    def __init__(self, rows: Rows, eol_key: NestedKey, lives_key: NestedKey, ask: Callable[[], Any]) -> None:
        self._rows = rows
        self._over = rows.new(eol_key, (1,), torch.bool).array.reshape(-1)
        self._lives = rows.new(lives_key, (), torch.int64).array
        self._ask = ask

    def _asked(self) -> np.ndarray:
        return np.asarray(self._ask(), dtype=np.int64).reshape(-1)

    def step(self, env_ids: Sequence[int] | None) -> None:
        lives = self._asked()
        which: Any = slice(None) if env_ids is None else list(env_ids)
        done = self._rows.terminated | self._rows.truncated
        self._over[which] = ((self._lives > lives) | done)[which]
        self._lives[which] = lives[which]

    def reset(self, env_ids: Sequence[int]) -> None:
        env_ids = list(env_ids)
        self._over[env_ids] = False
        self._lives[env_ids] = self._asked()[env_ids]


class FrameSkipTransform(Transform):
    """Repeats each action ``frame_skip`` times; rewards add up, all else is that of the last step.

    It must be the first transform. A step is repeated also where it ended the episode: for envs that may not be stepped
    then, use ``GymEnv(..., frame_skip=n)``. Vector envs, which would go on with another episode, are refused.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> TransformedEnv(GymEnv("CartPole-v1"), FrameSkipTransform(4)).rollout(2)["next", "reward"].squeeze(-1)
    tensor([4., 4.])
    """

    drives = True
    repeats_steps = True

    _shown = ("frame_skip",)

    def __init__(self, frame_skip: int = 1) -> None:
        super().__init__()
        self.frame_skip = frame_skip

    @property
    def frame_skip(self) -> int:
        return self._frame_skip

    @frame_skip.setter
    def frame_skip(self, frame_skip: int) -> None:
        require_positive("FrameSkipTransform", "frame_skip", frame_skip)
        self._change("_frame_skip", frame_skip)

    def transform_specs(self, specs: Specs) -> None:
        if len(specs.reward.keys(True, True)) != 1:
            raise ValueError("FrameSkipTransform: the env must have one reward")

    def bind(self, rows: Rows) -> Stage:
        assert rows.driver is not None
        if not rows.driver.is_first:
            raise ValueError("FrameSkipTransform must be the first transform: it repeats steps of the env as it is")
        return _FrameSkipStage(rows, rows.driver, self.frame_skip)


class _FrameSkipStage:
    def __init__(self, rows: Rows, driver: Driver, num: int) -> None:
        self._driver = driver
        self._num = num
        key = driver.reward_key
        self._reward = rows[key]
        self._total = rows.new(key, self._reward.tensor.shape[1:], self._reward.tensor.dtype)

    def step(self, env_ids: Sequence[int] | None) -> None:
        total, reward = self._total.array, self._reward.array
        total[:] = reward
        for _ in range(self._num - 1):
            self._driver.again(env_ids)
            total += reward

    def reset(self, env_ids: Sequence[int]) -> None:
        pass

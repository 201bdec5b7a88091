"""What an env gave, to be given again: the same data for one env and for several, from any episode on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.envs.base import EnvBase
from swath.envs.rows import RowEnv
from swath.keys import Key, as_key
from swath.rollout.layout import Layout
from swath.rollout.random_actions import RandomActions
from swath.rollout.strip import Strip
from swath.specs import Bounded, Composite, Spec, Unbounded

Values = dict[Key, np.ndarray]


@dataclass(frozen=True)
class Entry:
    """What a step gave, or a reset, which gives no outcomes."""

    carried: Values
    outcomes: Values
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class Tape:
    """The episodes of one env, one after the other; each begins with what its reset gave."""

    episodes: tuple[tuple[Entry, ...], ...]

    def from_episode(self, number: int) -> Tape:
        """Also of later ones than there are: they are given again from the first one on."""
        number %= len(self.episodes)
        return Tape(self.episodes[number:] + self.episodes[:number])


#: Episodes are no longer than that, so that some of them end whatever the env: of one env after another.
_LENGTHS = (5, 2, 7, 1, 4, 9, 3)


def record(env: EnvBase, num_tapes: int, num_steps: int) -> list[Tape]:
    """Let ``env`` step with random actions."""
    layout = env.row_layout()
    tapes: list[Tape] = []
    while len(tapes) < num_tapes:
        strip = Strip(layout, num_steps)
        stepper = env.bind(strip)
        draw = RandomActions(dict(env.full_action_spec.items(True, True)), strip)
        draw.fill(num_steps)
        everyone = list(range(strip.num_envs))
        stepper.reset(0, everyone)
        episodes: list[list[list[Entry]]] = [[[_entry(strip, 0, None, i)]] for i in everyone]
        for t in range(num_steps):
            draw.act(t)
            ended = stepper.step(t) or []
            for i in everyone:
                entry, own = _entry(strip, t + 1, t, i), episodes[i]
                longest = _LENGTHS[(i + len(tapes) + len(own)) % len(_LENGTHS)]
                is_cut = i not in ended and len(own[-1]) == longest
                own[-1].append(replace(entry, truncated=True) if is_cut else entry)
                if is_cut:  # from here on it is another episode
                    own.append([replace(entry, outcomes={})])
            if ended:
                stepper.reset(t + 1, ended)
            for i in ended:
                episodes[i].append([_entry(strip, t + 1, None, i)])
        tapes += [Tape(tuple(tuple(episode) for episode in own if len(episode) > 1)) for own in episodes]
    return tapes[:num_tapes]


def _entry(strip: Strip, row: int, step: int | None, env: int) -> Entry:
    def values(columns: Any, at: int) -> Values:
        return {key: column.tensor[at, env].cpu().numpy().copy() for key, column in columns.items()}

    if step is None:
        return Entry(values(strip.carried, row), {}, False, False)
    flags = bool(strip.terminated[step, env]), bool(strip.truncated[step, env])
    return Entry(values(strip.carried, row), values(strip.outcomes, step), *flags)


class ReplayedEnv(RowEnv):
    """Gives what is on tapes, whatever the actions; one env without a batch size, or as many as there are tapes."""

    def __init__(self, like: EnvBase, tapes: Sequence[Tape], *, single: bool = False) -> None:
        super().__init__(batch_size=() if single else (len(tapes),))
        self._like = like
        self._tapes = tapes
        #: What was asked of it that only the env has.
        self.asked: list[str] = []
        self.stepper: ReplayedStepper | None = None
        lead = len(like.batch_size)
        for kind in self.full_specs:
            leaves = getattr(like, f"full_{kind}_spec").items(True, True)
            resized = {as_key(key): _resized(leaf, lead, self.batch_size) for key, leaf in leaves}
            self.full_specs[kind] = Composite(resized, shape=self.batch_size)

    def row_layout(self) -> Layout:
        own, theirs = super().row_layout(), self._like.row_layout()
        return replace(
            theirs, **{name: getattr(own, name) for name in ("batch_size", "carried", "outputs", "outcomes")}
        )

    def bind_rows(self, strip: Strip) -> ReplayedStepper:
        self.stepper = ReplayedStepper(self._tapes, strip)
        return self.stepper

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._like, name):
            self.asked.append(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"what {self._like!r} gave"


class ReplayedStepper:
    """Tapes on the rows of a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, tapes: Sequence[Tape], strip: Strip) -> None:
        self._tapes = tapes
        self._strip = strip
        self._everyone = list(range(strip.num_envs))
        #: By env: which episode is under way (-1: none yet), and at which of its entries.
        self.episode = [-1] * strip.num_envs
        self._at = [0] * strip.num_envs

    def _current(self, env: int) -> tuple[Entry, ...]:
        episodes = self._tapes[env].episodes
        return episodes[self.episode[env] % len(episodes)]

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        for env in env_ids:
            self.episode[env] += 1
            self._at[env] = 0
            self._write(row, env, self._current(env)[0])

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        ended = []
        for env in self._everyone if env_ids is None else env_ids:
            episode = self._current(env)
            self._at[env] = at = min(self._at[env] + 1, len(episode) - 1)  # whoever goes on behind the end gets that
            entry = episode[at]
            self._write(t + 1, env, entry)
            for key, value in entry.outcomes.items():
                self._strip.outcomes[key].tensor[t, env] = torch.from_numpy(value)
            if entry.terminated or entry.truncated or at == len(episode) - 1:
                self._strip.terminated[t, env] = entry.terminated
                self._strip.truncated[t, env] = entry.truncated or not entry.terminated
                ended.append(env)
        return ended or None

    def _write(self, row: int, env: int, entry: Entry) -> None:
        for key, value in entry.carried.items():
            self._strip.carried[key].tensor[row, env] = torch.from_numpy(value)


def _resized(spec: Spec, lead: int, batch_size: torch.Size) -> Spec:
    """The spec of another number of envs."""
    new = spec.clone()
    if isinstance(new, Bounded):
        for name in ("low", "high"):
            bound = getattr(new, name)
            if np.ndim(bound) == len(spec.shape):
                setattr(new, name, bound[(0,) * lead])
    new.shape = torch.Size((*batch_size, *spec.shape[lead:]))
    return new


class SampleEnv(EnvBase):
    """Random numbers under the keys that are asked for, in short episodes; for those who bring no env."""

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__()
        spec = Composite()
        for key in dict.fromkeys([*(key for key in keys if key != ("reward",)), ("observation",)]):
            spec[key] = Bounded(0, 255, (8, 8, 3), torch.uint8) if key[-1] == "pixels" else Unbounded((4,))
        self.observation_spec = spec
        self.action_spec = Bounded(-1.0, 1.0, (2,))
        self._draw = torch.Generator().manual_seed(0)
        self._left = 0

    def _set_seed(self, seed: int) -> None:
        self._draw.manual_seed(seed)

    def _observe(self) -> TensorDict:
        def drawn(spec: Spec) -> torch.Tensor:
            if isinstance(spec, Bounded):
                return torch.randint(256, spec.shape, generator=self._draw).to(spec.dtype)
            return torch.randn(spec.shape, generator=self._draw)

        return TensorDict({key: drawn(spec) for key, spec in self.observation_spec.items(True, True)})

    def _reset(self, tensordict: TensorDictBase | None, *args: Any, **kwargs: Any) -> TensorDict:
        self._left = int(torch.randint(1, 9, (), generator=self._draw))
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self._left -= 1
        over = torch.tensor([self._left <= 0])
        by_itself = bool(torch.rand((), generator=self._draw) < 0.5)
        return self._observe().update(
            {
                "reward": torch.randn(1, generator=self._draw),
                "terminated": over & by_itself,
                "truncated": over & (not by_itself),
            }
        )

"""The contract of a transform."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from swath.collectors.single import Collector
from swath.envs.base import FLAGS, EnvBase
from swath.envs.making import is_env, make_env
from swath.envs.transforms.base import Transform
from swath.envs.transforms.compose import Compose, as_transform
from swath.envs.transforms.env import TransformedEnv
from swath.envs.transforms.keys import ExcludeTransform, RenameTransform
from swath.keys import Key, as_key, show
from swath.process.pickling import dumps
from swath.rollout.strip import Strip
from swath.testing.tapes import ReplayedEnv, SampleEnv, Tape, record
from swath.testing.watching import Watch

NUM_ENVS = 3


def check_transform(
    transform: Transform, env: Any = None, *, num_steps: int = 40, seed: int = 0, restarts: bool = True
) -> None:
    """Raise ``AssertionError`` at the first rule that ``transform`` breaks.

    Checked: specs say what is delivered (keys, shapes, dtypes, values in their bounds); a reset of all envs or of some,
    and a step of some, change these only; each episode begins as the first one did; several envs get what each of
    them gets alone; the same data give the same results, also from a copy and from one that was pickled for a worker;
    nothing is written to memory that is only read, and nothing depends on what was in new memory; actions arrive as
    the env takes them; an env without a key that is needed is refused when it is given, with the key's name.

    Args:
        transform: left as it is; several of them (``Compose``) are checked one after the other.
        env: whose data it is to work on, or a function that makes it; by default an env of random numbers that has
            the transform's ``in_keys`` (of four floats; ``"pixels"``: an image) and a continuous action.
        num_steps: how many steps are taken each time.
        seed: of the env, and of all that is drawn.
        restarts: False for a transform that goes on over episodes, such as a count of them.

    What an episode begins with, and that envs are independent, is not asked of a transform whose ``is_by_env`` is
    False. One that asks the env itself (``rows.base``) is checked on that env only, and not on what it gave before.

    >>> from swath.envs import GymEnv, StepCounter
    >>> check_transform(StepCounter(max_steps=5), GymEnv("CartPole-v1"))
    """
    if num_steps < 1:
        raise ValueError(f"check_transform: num_steps must be at least 1, got {num_steps}")
    transform = as_transform(transform)
    if isinstance(transform, Compose):
        _check_each(transform, env, num_steps=num_steps, seed=seed, restarts=restarts)
        return
    made_here = env is not None and not is_env(env)
    base: EnvBase = SampleEnv([as_key(key) for key in transform.in_keys]) if env is None else make_env(env)
    try:
        with _own_randomness():
            _Check(transform, base, num_steps, seed, restarts, env is None).run()
    finally:
        if made_here:
            base.close(raise_if_closed=False)


def _check_each(transforms: Any, env: Any, **options: Any) -> None:
    """Each on what the ones before it give."""
    if env is None:
        wanted: list[Key] = []
        made: set[Key] = set()
        for transform in transforms:
            wanted += [as_key(key) for key in transform.in_keys if as_key(key) not in made]
            made |= set(transform.touched_keys())
        env = SampleEnv(wanted)
    base: EnvBase = make_env(env)
    for number, transform in enumerate(transforms):
        before = Compose(*[_duplicate(each) for each in transforms[:number]])
        check_transform(transform, TransformedEnv(base, before) if number else base, **options)


class _Check:
    """One transform, one env."""

    def __init__(
        self, transform: Transform, env: EnvBase, num_steps: int, seed: int, restarts: bool, is_sample: bool
    ) -> None:
        self.transform = transform
        self.env = env
        self.num_steps = num_steps
        self.seed = seed
        self.restarts = restarts
        self.is_sample = is_sample

    def fail(self, rule: str) -> None:
        raise AssertionError(f"check_transform: {self.transform!r}: {rule}")

    def run(self) -> None:
        self._check_copies()
        watch = self._check_on_the_env()
        self.env.set_seed(self.seed)
        _seed(self.seed)
        tapes = record(self.env, NUM_ENVS, self.num_steps)
        self._check_missing_keys(watch, tapes)
        if not self._can_replay(tapes):
            return
        whole = self._check_repeated(tapes)
        if whole is not None:
            self._check_some(tapes, whole)
            if self.transform.is_by_env:
                self._check_alone(tapes, whole)
        if self.transform.is_by_env and self.restarts:
            self._check_episodes(tapes)

    # -- copies ------------------------------------------------------------------------------------------------------

    def new(self, pickled: bool = False) -> Transform:
        return _unpickled(self.transform) if pickled else _duplicate(self.transform)

    def _check_copies(self) -> None:
        for how, make in (("copied (copy.deepcopy)", _duplicate), ("pickled for a worker", _unpickled)):
            try:
                made = make(self.transform)
            except Exception as error:
                raise AssertionError(
                    f"check_transform: {type(self.transform).__name__} cannot be {how}: {type(error).__name__}: {error}"
                    ". Make in bind what cannot be there twice"
                ) from error
            if repr(made) != repr(self.transform) and " at 0x" not in repr(made):
                self.fail(f"when it is {how}, it becomes {made!r}")

    # -- with the env itself -------------------------------------------------------------------------------------------

    def _check_on_the_env(self) -> Watch:
        watch = Watch(self.new())
        try:
            env = TransformedEnv(self.env, watch.transform)
        except (KeyError, TypeError, ValueError) as error:
            if not self.is_sample:
                raise
            keys = ", ".join(show(as_key(key)) for key in self.env.observation_keys)
            raise AssertionError(
                f"check_transform: {self.transform!r} does not take an env of random numbers that gives {keys} and "
                f"takes two floats: {error}. Give one that it is for: check_transform(transform, env)"
            ) from error
        env.set_seed(self.seed)
        _seed(self.seed)
        _run(env, watch, self.num_steps)
        collector = Collector(env, frames_per_batch=self.num_steps * env.batch_size.numel())
        try:
            self._check_batch(env, collector.rollout())
        finally:
            collector.shutdown(close_env=False)
        return watch

    def _check_batch(self, env: TransformedEnv, batch: Any) -> None:
        """What a collector delivers."""
        time, after = len(env.batch_size), batch["next"]
        for key, leaf in (*env.full_observation_spec.items(True, True), *env.full_reward_spec.items(True, True)):
            value = after.get(key, None)
            size = (*env.batch_size, self.num_steps, *leaf.shape[time:])
            if value is None or value.shape != torch.Size(size) or value.dtype != leaf.dtype:
                got = "nothing" if value is None else f"{tuple(value.shape)} and {value.dtype}"
                self.fail(
                    f"a collector delivers {got} under {show(('next', *as_key(key)))}, not {size} and {leaf.dtype}"
                )

    # -- with what it gave ---------------------------------------------------------------------------------------------

    def _env(self, tapes: Sequence[Tape], single: bool, pickled: bool = False, **watched: Any) -> _Bound:
        base = ReplayedEnv(self.env, tapes, single=single)
        watch = Watch(self.new(pickled), **watched)
        return _Bound(TransformedEnv(base, watch.transform), base, watch)

    def _replay(self, tapes: Sequence[Tape], single: bool = False, **kwargs: Any) -> _Run:
        options = {name: kwargs.pop(name) for name in ("fill", "pickled", "is_apart") if name in kwargs}
        bound = self._env(tapes, single, **options)
        _seed(self.seed)
        return _run(bound.env, bound.watch, kwargs.pop("num_steps", self.num_steps), replayed=bound.base, **kwargs)

    def _can_replay(self, tapes: Sequence[Tape]) -> bool:
        """Not where it asks the env for more than its data."""
        bound = self._env(tapes[:1], single=True)
        try:
            bound.env.bind(Strip(bound.env.row_layout(), 1))
        except AssertionError:
            raise
        except Exception:
            if bound.base.asked:
                return False
            raise
        return True

    def _takes_several(self, tapes: Sequence[Tape]) -> bool:
        try:
            self._env(tapes, single=False)
        except (KeyError, TypeError, ValueError) as error:
            if self.transform.is_by_env:
                self.fail(
                    f"it takes one env, but not {len(tapes)}: {error}. If it is meant for a single one, say is_by_env "
                    "= False, so that each env of a SerialEnv gets its own"
                )
            return False
        return True

    def _check_repeated(self, tapes: Sequence[Tape]) -> _Run | None:
        """The same data, twice; of all envs, if it takes more than one."""
        several = self._takes_several(tapes)
        tapes, single = (tapes, False) if several else (tapes[:1], True)
        first = self._replay(tapes, single)
        difference = first.difference(self._replay(tapes, single))
        if difference:
            self.fail(
                f"the same data and the same seed give other results: {difference}. Does it draw from a generator of "
                "its own, or keep something outside of what bind makes?"
            )
        difference = first.difference(self._replay(tapes, single, pickled=True))
        if difference:
            self.fail(f"one that was pickled for a worker gives other results: {difference}")
        difference = first.difference(self._replay(tapes, single, fill=77))
        if difference:
            self.fail(
                f"a result depends on what was in memory before: {difference} where rows.new(...) was filled with 77. "
                "Write all of it in reset(env_ids) and in step(env_ids)"
            )
        return first if several else None

    def _check_some(self, tapes: Sequence[Tape], whole: _Run) -> None:
        """Envs that are reset, or stepped, by themselves."""
        if self.transform.drives or not self.transform.is_by_env:
            return
        at = 1 + self.num_steps // 3
        reset = self._replay(tapes, resets={at: [1]}, is_apart=True)
        others = [0, 2]
        if difference := whole.of(others).difference(reset.of(others)):
            self.fail(f"after a reset of env 1 alone at step {at}, the others differ: {difference}")
        stepped = self._replay(tapes, num_steps=at, pauses={at - 1: [1]}, is_apart=True)
        for key, rows in stepped.roots.items():
            if not _same(rows[at][others], whole.roots[key][at][others]):
                self.fail(
                    f"at step {at - 1}, of envs 0 and 2 only, {show(key)} of these is not what it is when all step"
                )

    def _check_alone(self, tapes: Sequence[Tape], whole: _Run) -> None:
        for env, tape in enumerate(tapes):
            alone = self._replay([tape], single=True, actions=whole.actions_of(env))
            if difference := whole.of([env]).difference(alone):
                self.fail(
                    f"env {env} of {len(tapes)} gets other data than the same env alone: {difference}. If it is meant "
                    "to mix envs (statistics, draws), say is_by_env = False"
                )

    def _check_episodes(self, tapes: Sequence[Tape]) -> None:
        """Each episode is what it would be as the first one."""
        one = self._replay(tapes[:1], single=True)
        begins = [0, *[t + 1 for t in np.flatnonzero(one.ended[:, 0]).tolist() if t + 1 < self.num_steps]]
        for begin, end in zip(begins, [*begins[1:], self.num_steps], strict=True):
            tape = tapes[0].from_episode(one.episodes[begin])
            actions = {key: value[begin:end] for key, value in one.actions.items()}
            first = self._replay([tape], single=True, num_steps=end - begin, actions=actions)
            if difference := one.between(begin, end).difference(first, begin):
                self.fail(
                    f"the episode that begins with step {begin} is another than it would be as the first one: "
                    f"{difference}. Restart in reset(env_ids) what it remembers (restarts=False: it is meant to go on)"
                )

    # -- keys that are not there ---------------------------------------------------------------------------------------

    def _check_missing_keys(self, watch: Watch, tapes: Sequence[Tape]) -> None:
        there = {
            as_key(key) for kind in ("observation", "reward") for key in self.env.full_specs[kind].keys(True, True)
        }
        asked = {as_key(key) for key in self.transform.in_keys}
        for key in sorted((watch.read | asked) & there - {(flag,) for flag in FLAGS}):
            without = TransformedEnv(self._data_only(tapes), ExcludeTransform(key))
            self._require_refusal(without, key, is_declared=key in asked)
        for key in map(as_key, self.transform.in_keys_inv):
            renamed = RenameTransform([], [], [key], [("another",)])
            self._require_refusal(TransformedEnv(self._data_only(tapes), renamed), key, is_declared=True)

    def _data_only(self, tapes: Sequence[Tape]) -> ReplayedEnv:
        return ReplayedEnv(self.env, tapes[:1], single=True)

    def _require_refusal(self, without: TransformedEnv, key: Key, is_declared: bool) -> None:
        try:
            env = TransformedEnv(without, self.new())
        except Exception as error:
            if key[-1] not in str(error):
                self.fail(f"an env without {show(key)} is refused with {str(error)!r}, which does not name that key")
            return
        if not is_declared:  # it may do without
            try:
                env.bind(Strip(env.row_layout(), 1))
                return
            except Exception:  # seen in time, it would be no surprise
                pass
        self.fail(
            f"an env without {show(key)} is taken, and fails only when it is stepped; say specs.find({key!r}, self) "
            "(of an action: find_action) in transform_specs, which refuses it with the keys there are"
        )


@dataclass
class _Bound:
    env: TransformedEnv
    base: ReplayedEnv
    watch: Watch


def _at(rows: Mapping[Key, np.ndarray], where: Any) -> dict[Key, np.ndarray]:
    return {key: value[where] for key, value in rows.items()}


@dataclass
class _Run:
    """What came of some steps; times first, then envs."""

    #: By key: what stands before each step and after the last, and what each step gave.
    roots: dict[Key, np.ndarray]
    afters: dict[Key, np.ndarray]
    ended: np.ndarray
    actions: dict[Key, np.ndarray]
    #: Of the first env: by the step that it begins with, which episode of its tape.
    episodes: dict[int, int] = field(default_factory=dict)

    def of(self, envs: list[int]) -> _Run:
        at = (slice(None), envs)
        return _Run(_at(self.roots, at), _at(self.afters, at), self.ended[at], _at(self.actions, at))

    def actions_of(self, env: int) -> dict[Key, np.ndarray]:
        return self.of([env]).actions

    def between(self, begin: int, end: int) -> _Run:
        at = slice(begin, end)
        return _Run(_at(self.roots, at), _at(self.afters, at), self.ended[at], {})

    def difference(self, other: _Run, first_step: int = 0) -> str:
        """In which the two differ first; empty if in nothing."""
        for t in range(len(self.ended)):
            pairs: list[tuple[dict[Key, np.ndarray], dict[Key, np.ndarray], str]] = [
                (self.roots, other.roots, "before"),
                (self.afters, other.afters, "after"),
                ({("done",): self.ended}, {("done",): other.ended}, "after"),
            ]
            for mine, theirs, where in pairs:
                for key, value in mine.items():
                    if not _same(value[t], theirs[key][t]):
                        which = int(_unequal(value[t], theirs[key][t])[0])
                        one, two = value[t][which].tolist(), theirs[key][t][which].tolist()
                        return f"{show(key)} {where} step {first_step + t} is {_short(one)} and {_short(two)}"
        return ""


def _run(
    env: TransformedEnv,
    watch: Watch,
    num_steps: int,
    *,
    replayed: ReplayedEnv | None = None,
    actions: Mapping[Key, np.ndarray] | None = None,
    resets: Mapping[int, list[int]] | None = None,
    pauses: Mapping[int, list[int]] | None = None,
) -> _Run:
    """Take steps as a rollout does: envs whose episode ended are reset after the last observation was put aside.

    ``resets``: by step, the envs that are reset before it besides. ``pauses``: by step, those that do not take it.
    """
    strip = Strip(env.row_layout(), num_steps)
    stepper = env.bind(strip)
    everyone = list(range(strip.num_envs))
    given = _drawn(env, strip) if actions is None else actions
    for key, values in given.items():
        strip.outputs[key].tensor.copy_(torch.from_numpy(values))
    watch.where = "the first reset"
    stepper.reset(0, everyone)
    episodes = {0: 0}
    afters = {key: [] for key in (*strip.carried, *strip.outcomes)}
    ends = np.zeros((num_steps, strip.num_envs), dtype=bool)
    for t in range(num_steps):
        if resets and t in resets:
            watch.where = f"a reset before step {t}"
            stepper.reset(t, resets[t])
        watch.where = f"step {t}"
        paused = (pauses or {}).get(t)
        ended = stepper.step(t, None if paused is None else [env for env in everyone if env not in paused]) or []
        for key, column in strip.carried.items():
            afters[key].append(column.in_numpy[t + 1].copy())
        for key, column in strip.outcomes.items():
            afters[key].append(column.in_numpy[t].copy())
        ends[t, ended] = True
        if ended:
            watch.where = f"the reset after step {t}"
            stepper.reset(t + 1, ended)
        if replayed is not None and replayed.stepper is not None and 0 in ended:
            episodes[t + 1] = replayed.stepper.episode[0]
    roots = {key: column.in_numpy.copy() for key, column in strip.carried.items()}
    taken = {key: column.in_numpy.copy() for key, column in strip.outputs.items()}
    return _Run(roots, {key: np.stack(rows) for key, rows in afters.items()}, ends, taken, episodes)


def _drawn(env: TransformedEnv, strip: Strip) -> dict[Key, np.ndarray]:
    """Random actions, in the shape of the strip's rows."""
    drawn = {}
    for key, spec in env.full_action_spec.items(True, True):
        column = strip.outputs[as_key(key)]
        rows = [spec.rand().to(column.field.dtype).reshape(column.tensor.shape[1:]) for _ in range(strip.num_steps)]
        drawn[as_key(key)] = torch.stack(rows).cpu().numpy()
    return drawn


def _bare(transform: Transform) -> Transform:
    """Without the env that it may be a part of."""
    bare = copy.copy(transform)
    bare.container = None
    return bare


def _duplicate(transform: Transform) -> Transform:
    return copy.deepcopy(_bare(transform))


def _unpickled(transform: Transform) -> Transform:
    return pickle.loads(dumps(_bare(transform)))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (that of a user's transform)
    random.seed(seed)


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Leaves the program's random state as it is."""
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)  # noqa: NPY002
            random.setstate(of_python)


def _same(value: np.ndarray, other: np.ndarray) -> bool:
    return value.shape == other.shape and not len(_unequal(value, other))


def _unequal(value: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The envs in which they differ."""
    is_same = (value == other) | ((value != value) & (other != other))
    return np.flatnonzero(~is_same.reshape(len(value), -1).all(-1))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

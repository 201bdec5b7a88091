"""n-step returns: of batches (MultiStep), and of what is written to a replay buffer (MultiStepTransform)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from swath.data.episode_ends import mark_frames
from swath.data.sequences import (
    MASK,
    BatchTransform,
    discounted_sums,
    find,
    goes_on,
    like,
    masks_of,
    refuse_number,
    steps_to_end,
    time_last,
    unnamed,
    without_last_ones,
)
from swath.keys import Key, as_key, leaves_of, show
from swath.rollout.delivery import TRAJ_IDS
from swath.states import mismatch

#: What a batch has afterwards, besides the original rewards.
STEPS: Key = ("steps_to_next_obs",)
GAMMA: Key = ("gamma",)
NONTERMINAL: Key = ("nonterminal",)


class _Ahead:
    """What becomes of a batch ``[*envs, time]`` when its ``next`` is ``n_steps`` ahead."""

    def __init__(
        self,
        who: str,
        n_steps: int,
        gamma: float,
        reward_keys: Sequence[NestedKey] | None,
        done_key: NestedKey | None,
        done_keys: Sequence[NestedKey] | None,
        mask_key: NestedKey | None,
    ) -> None:
        self.who = who
        self.n_steps = n_steps
        self.gamma = gamma
        self.rewards = _keys(who, "reward_keys", ("reward",) if reward_keys is None else reward_keys)
        if not self.rewards:
            raise ValueError(f"{who}: reward_keys is empty, so that there is nothing to sum")
        self.done = as_key("done" if done_key is None else done_key)
        self.kept_flags = _keys(who, "done_keys", done_keys or ())
        self.masks = (MASK,) if mask_key is None else (as_key(mask_key), MASK)

    def of(self, data: TensorDictBase) -> TensorDictBase:
        """A batch with other ``next``, rewards and further keys; of the given one nothing is changed."""
        who, lead = self.who, data.batch_dims
        if STEPS[0] in data.keys() and self._original(self.rewards[0]) in data.keys(True):  # noqa: SIM118
            raise ValueError(
                f"{who}: this batch has {show(STEPS)} and {show(self._original(self.rewards[0]))} already: its rewards "
                "are sums over several steps. Use MultiStep as postproc or MultiStepTransform in the buffer, not both"
            )
        flags = find(data, ("next", *self.done), who, "says where episodes end (done_key)")
        if flags.shape[:lead] != data.batch_size:
            raise ValueError(
                f"{who}: {show(('next', *self.done))} has shape {tuple(flags.shape)}, which is not that of "
                f"the batch, {tuple(data.batch_size)}"
            )
        done = without_last_ones(flags, lead)
        mask = masks_of(data, self.masks)
        going = goes_on(done, data, mask)
        steps = steps_to_end(going, self.n_steps, lead - 1)
        made = data.copy()
        after: Any = made.get("next")
        originals = {key: find(data, ("next", *key), who, "is summed (reward_keys)") for key in self.rewards}
        if self.n_steps > 1:
            if self.kept_flags and all(after.get(key, None) is None for key in self.kept_flags):
                find(data, ("next", *self.kept_flags[0]), who, "is to stay that of its own step (done_keys)")
            moved = after.exclude(*self.rewards, *self.kept_flags)
            after.update(self._moved(moved, steps, lead - 1))
        for key, reward in originals.items():
            after.set(self._original(key)[1:], reward)
            after.set(key, discounted_sums(reward, like(going, reward, who), self.gamma, self.n_steps, lead - 1))
        if done.ndim > lead:  # of several agents: shapes are those of their flags
            steps, going = steps.reshape(flags.shape), going.reshape(flags.shape)
        made.set(STEPS, steps)
        made.set(GAMMA, self.gamma**steps)
        made.set(NONTERMINAL, going if mask is None else going & mask.reshape(*mask.shape, *[1] * (going.ndim - lead)))
        return made

    def _original(self, key: Key) -> Key:
        """Where the rewards of single steps are then."""
        return ("next", "original_reward") if len(self.rewards) == 1 else ("next", *key[:-1], f"original_{key[-1]}")

    def _moved(self, after: Any, steps: torch.Tensor, time: int) -> Any:
        """Of each frame, what is ``steps - 1`` frames ahead."""
        numbers = torch.arange(steps.shape[time], device=steps.device)
        index = numbers.reshape(-1, *[1] * (steps.ndim - time - 1)) + steps - 1
        if steps.ndim > time + 1:
            return after.apply(lambda leaf: self._moved_by_agent(leaf, index, time))
        lead = after.batch_size
        after = after.copy()
        after.names = None
        rows = torch.arange(lead[:-1].numel(), device=steps.device).reshape(*lead[:-1], 1) * lead[-1]
        return after.reshape(lead.numel())[(index + rows).reshape(-1)].reshape(lead)

    def _moved_by_agent(self, leaf: torch.Tensor, index: torch.Tensor, time: int) -> torch.Tensor:
        if leaf.shape[: index.ndim] != index.shape:
            raise RuntimeError(
                f"{self.who}: {show(('next', *self.done))} ends episodes of {tuple(index.shape[time + 1 :])} agents "
                f"one by one, and something in 'next' has shape {tuple(leaf.shape)}, which is not of each. Give "
                "a done_key that is of the whole env"
            )
        return leaf.gather(time, index.reshape(*index.shape, *[1] * (leaf.ndim - index.ndim)).expand_as(leaf))


class MultiStep:
    """Makes of single steps n-step transitions; for a collector's ``postproc``, or any batch ``[*envs, time]``.

    ``("next", "reward")`` becomes the discounted sum over up to ``n_steps`` steps, and everything else in ``next``, the
    flags among it, is what the last of them led to. No sum goes beyond the end of an episode, or of the batch: the last
    frames have fewer steps. New keys are ``"steps_to_next_obs"``; ``"gamma"`` to this power, which the next
    observation's value is to be multiplied with; ``"nonterminal"``, False in the last frame of an episode or of the
    batch; and ``("next", "original_reward")``.

    Args:
        gamma: the discount, in (0, 1].
        n_steps: most steps ahead; 1 leaves rewards and observations as they are.
        reward_keys, done_key, mask_key: where they are found; the first two within ``next``. With several rewards, each
            original is beside its sum as ``"original_<name>"``.
        done_keys: flags that stay those of the frame's own step, as all do in TorchRL. By default none: a target that
            bootstraps where ``("next", "terminated")`` is False would else do so from observations that are terminal.

    >>> from swath.collectors import Collector
    >>> postproc = MultiStep(gamma=0.99, n_steps=3)
    >>> batch = next(iter(Collector("CartPole-v1", frames_per_batch=5, total_frames=5, postproc=postproc)))
    >>> batch["steps_to_next_obs"], batch["next", "reward"].reshape(-1)
    (tensor([3, 3, 3, 2, 1]), tensor([2.9701, 2.9701, 2.9701, 1.9900, 1.0000]))
    """

    looks_ahead = True

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        self.gamma = _checked_gamma(type(self).__name__, gamma)
        self.n_steps = _checked_steps(type(self).__name__, n_steps)
        self.reward_keys = reward_keys
        self.done_key = done_key
        self.done_keys = done_keys
        self.mask_key = mask_key
        _ahead_of(self)  # refuses what are no keys

    @property
    def instead_of_env(self) -> str:
        return f"Collector(env, ..., postproc=MultiStep(gamma={self.gamma}, n_steps={self.n_steps}))"

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        data, back = time_last(tensordict, type(self).__name__)
        return back(_ahead_of(self).of(data))

    forward = __call__

    def __repr__(self) -> str:
        return _shown(self)


class MultiStepTransform(BatchTransform):
    """``MultiStep`` for a replay buffer: what is written becomes n-step transitions, over the ends of batches.

    The last ``n_steps`` frames of each env are held back until those that follow are written; so a transition does not
    depend on where a batch ended. A collector's envs are kept apart, whoever writes them. Arguments and keys are those
    of ``MultiStep``; ``n_steps`` may be changed at any time.

    >>> from swath.collectors import Collector
    >>> from swath.data import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=MultiStepTransform(n_steps=3, gamma=0.99))
    >>> for _ in Collector("CartPole-v1", frames_per_batch=5, total_frames=10, replay_buffer=rb):
    ...     print(len(rb))
    2
    7
    """

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        self.n_steps = n_steps
        self.gamma = _checked_gamma(type(self).__name__, gamma)
        self.reward_keys = reward_keys
        self.done_key = done_key
        self.done_keys = done_keys
        self.mask_key = "mask" if mask_key is None else mask_key
        _ahead_of(self)  # refuses what are no keys
        #: The last frames of each env, or row of ``extend``, which were not written yet: a row of ``[rows, n]``.
        self._held: dict[Hashable, tuple[TensorDictBase, int]] = {}
        #: Those whose episode does not go on with what comes next.
        self._ended: set[Hashable] = set()

    _instead_of_call = "For a batch, or as a collector's postproc, there is swath.data.MultiStep(gamma, n_steps)"

    @property
    def n_steps(self) -> int:
        """How far ahead; what is written next is as this says."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._n_steps = _checked_steps(type(self).__name__, value)

    def inv(self, data: TensorDictBase) -> TensorDictBase | None:
        """What can be written, of what was held back and of this, ``[*rows, time]``; None if that is nothing.

        Each row goes on where it ended the last time.
        """
        batch, back = time_last(data, type(self).__name__)
        batch = unnamed(batch)
        lead = batch.batch_size[:-1]
        rows = batch.reshape(lead.numel(), batch.shape[-1])
        held = sum(isinstance(key, tuple) for key in self._held)
        if held not in (0, len(rows)):
            raise ValueError(
                f"{type(self).__name__} holds the last frames of {held} rows, which go on with the next data that is "
                f"written, and was given {len(rows)} rows. Write rows of the same envs each time; or MultiStep, on "
                "each batch by itself; clear() drops what is held"
            )
        made = self._advanced(rows, [("row", number) for number in range(len(rows))], marks=False)
        return None if made is None else back(made.reshape(*lead, made.shape[-1]))

    def inv_rows(self, rows: TensorDictBase, first_env: int | None) -> list[tuple[int | None, TensorDictBase]]:
        """As ``inv``, of envs ``[envs, time]`` from ``first_env`` on: parts of what can be written, and their first.

        Envs that have equally many frames held are one part. None: frames ``[1, time]`` of trajectories, or pieces of
        some, which do not go on; nothing of them is held back.
        """
        if first_env is None:
            return [(None, _ahead_of(self).of(unnamed(rows)))]
        made = []
        lengths = [self._num_held(first_env + row) for row in range(len(rows))]
        row = 0
        while row < len(rows):
            stop = row + 1
            while stop < len(rows) and lengths[stop] == lengths[row]:
                stop += 1
            envs = range(first_env + row, first_env + stop)
            part = self._advanced(unnamed(rows[row:stop]), envs, marks=True)
            if part is not None:
                made.append((first_env + row, part))
            row = stop
        return made

    def _num_held(self, key: Hashable) -> int:
        held = self._held.get(key)
        return 0 if held is None else held[0].shape[1]

    def _held_of(self, keys: Sequence[Hashable]) -> Any:
        """``[rows, n]`` of rows that have equally many; None where nothing is held."""
        held = [self._held[key] for key in keys if key in self._held]
        if not held:
            return None
        first = held[0][0]
        if len(first) == len(held) and all(block is first and row == at for at, (block, row) in enumerate(held)):
            return first  # as it was put there: whoever writes, writes the same envs each time
        return torch.stack([block[row] for block, row in held])  # type: ignore[arg-type]

    def _advanced(self, rows: TensorDictBase, keys: Sequence[Hashable], marks: bool) -> TensorDictBase | None:
        """Frames of rows that have equally many held. ``marks``: an episode that was cut short ends, truncated."""
        before, whole = self._held_of(keys), rows
        if before is not None:
            whole = torch.cat([before, rows], 1)
            self._end_held(whole, before.shape[1] - 1, keys, marks)
        made = None
        if whole.shape[1] > self.n_steps:
            made = _ahead_of(self).of(whole)[:, : -self.n_steps]
        # A copy: a view would keep the whole batch, and what collectors have lent of their memory.
        kept = whole[:, max(0, whole.shape[1] - self.n_steps) :].clone()
        self._held.update((key, (kept, row)) for row, key in enumerate(keys))
        return made

    def _end_held(self, whole: Any, last: int, keys: Sequence[Hashable], marks: bool) -> None:
        """Where what was held does not go on with what follows behind ``last``: its last frame is its episode's."""
        cut = torch.tensor([key in self._ended for key in keys], device=whole.device)
        self._ended.difference_update(keys)
        ids = whole.get(TRAJ_IDS, None) if marks and last + 1 < whole.shape[1] else None
        if ids is not None:
            cut = cut | (ids[:, last + 1] != ids[:, last]).reshape(len(keys), -1).any(1)
        if cut.any():
            mark_frames(dict(leaves_of(whole)), (cut, last))
            done = whole.get(("next", *as_key("done" if self.done_key is None else self.done_key)), None)
            if done is not None:
                done[cut, last] = True

    # -- what is held ----------------------------------------------------------------------------------------------

    def holds(self, env: int) -> bool:
        """Whether frames of this env were not written yet."""
        return env in self._held

    @property
    def next_traj_id(self) -> int:
        """From where on trajectory ids are not those of frames that are held."""
        ids = [block.get(TRAJ_IDS, None) for block in {id(block): block for block, _ in self._held.values()}.values()]
        return max((int(each.max()) + 1 for each in ids if each is not None), default=0)

    def end(self, envs: Sequence[int]) -> None:
        """Episodes under way in these envs will not go on."""
        self._ended.update(env for env in envs if env in self._held)

    def clear(self) -> None:
        """Drop what is held back."""
        self._held.clear()
        self._ended.clear()

    def state_dict(self) -> dict[str, Any]:
        held = {key: block[row].clone() for key, (block, row) in self._held.items()}
        return {"held": held, "ended": sorted(self._ended, key=repr)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        if not isinstance(state_dict, Mapping) or not {"held", "ended"} <= state_dict.keys():
            raise mismatch(type(self).__name__, state_dict, "the state of a MultiStepTransform")
        self._held = {key: (held.clone().unsqueeze(0), 0) for key, held in state_dict["held"].items()}
        self._ended = set(state_dict["ended"])

    def __repr__(self) -> str:
        return _shown(self)


def _ahead_of(given: MultiStep | MultiStepTransform) -> _Ahead:
    who = type(given).__name__
    keys = given.reward_keys, given.done_key, given.done_keys, given.mask_key
    return _Ahead(who, given.n_steps, given.gamma, *keys)


def _keys(who: str, name: str, given: Sequence[NestedKey]) -> list[Key]:
    if isinstance(given, str):
        raise TypeError(f"{who}: {name} is a list of keys, got {given!r}; write {name}=[{given!r}]")
    return [as_key(key) for key in given]


def _shown(given: MultiStep | MultiStepTransform) -> str:
    return f"{type(given).__name__}(n_steps={given.n_steps}, gamma={given.gamma})"


def _checked_gamma(who: str, gamma: Any) -> float:
    if not 0 < float(gamma) <= 1:
        refuse_number(who, "gamma", gamma, "a discount, above 0 and at most 1")
    return float(gamma)


def _checked_steps(who: str, n_steps: Any) -> int:
    if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps < 1:
        refuse_number(who, "n_steps", n_steps, "a number of steps, 1 or more")
    return n_steps

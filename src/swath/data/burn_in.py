"""BurnInTransform: recurrent states of samples, brought up to date by the steps before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase

from swath.data.sequences import BatchTransform, refuse_number
from swath.keys import Key, as_key, show
from swath.warn import warn_user


class BurnInTransform(BatchTransform):
    """Runs modules over the first ``burn_in`` steps of a sample ``[slices, time]``, and gives the others.

    The state that they end with becomes that of the first step that is given, instead of the one that was stored, which
    an older policy made. No gradients are kept.

    Args:
        modules: one or several that take sequences (of TorchRL's: with ``default_recurrent_mode=True``).
        burn_in: how many steps; 0 does nothing.
        out_keys: the states; by default all that the modules write to ``next``.

    >>> from tensordict import TensorDict
    >>> from tensordict.nn import TensorDictModule
    >>> sums = TensorDictModule(lambda x, s: s[:, :1] + x.cumsum(1), in_keys=["x", "s"], out_keys=[("next", "s")])
    >>> sample = TensorDict(x=torch.ones(2, 5), s=torch.zeros(2, 5), batch_size=(2, 5))
    >>> BurnInTransform(sums, burn_in=3)(sample)["s"]
    tensor([[3., 0.],
            [3., 0.]])
    """

    changes_samples = True

    def __init__(
        self,
        modules: Sequence[TensorDictModuleBase] | TensorDictModuleBase,
        burn_in: int,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        self.modules = list(modules) if isinstance(modules, Sequence) else [modules]
        for module in self.modules:
            if not isinstance(module, TensorDictModuleBase):
                raise ValueError(f"BurnInTransform: modules are TensorDictModules, got a {type(module).__name__}")
        if isinstance(burn_in, bool) or not isinstance(burn_in, int) or burn_in < 0:
            refuse_number("BurnInTransform", "burn_in", burn_in, "a number of steps, 0 or more")
        self.burn_in = burn_in
        self.in_keys = list(dict.fromkeys(key for module in self.modules for key in module.in_keys))
        written = [as_key(key) for module in self.modules for key in module.out_keys]
        states = [key[1:] for key in written if key[0] == "next" and len(key) > 1]
        self._states: list[Key] = list(dict.fromkeys(states if out_keys is None else _of_next(out_keys)))
        if not self._states:
            names = ", ".join(map(show, written)) or "nothing"
            raise ValueError(
                f"BurnInTransform: the modules write {names}, and none of it to ('next', …), where a state for the "
                "next step is; give modules that do"
            )

    @property
    def out_keys(self) -> list[NestedKey]:
        return [key[0] if len(key) == 1 else key for key in self._states]

    def __call__(self, data: Any) -> Any:
        if self.burn_in == 0:
            return data
        self._check(data)
        rest = data[..., self.burn_in :]
        with torch.no_grad():
            ran = data[..., : self.burn_in].copy()
            for module in self.modules:
                weight = next(_tensors_of(module), None)
                ran = module(ran if weight is None else ran.to(weight.device))
        for key in self._states:
            state = ran.get(("next", *key), None)
            if state is None:
                raise KeyError(f"BurnInTransform: the modules wrote no {show(('next', *key))} (out_keys)")
            last = state.select(data.batch_dims - 1, -1)
            rest.set(key, _with_first(rest, key, last))
        return rest

    forward = __call__

    def _check(self, data: Any) -> None:
        if not is_tensor_collection(data):
            raise TypeError(f"BurnInTransform takes a sample as a TensorDict, got {type(data).__name__}")
        if data.batch_dims < 2:
            raise ValueError(
                f"BurnInTransform takes samples [slices, time], got {tuple(data.batch_size)}: where one slice ends is "
                "not seen. Before it: rb.append_transform(lambda sample: sample.reshape(-1, slice_len))"
            )
        if data.shape[-1] <= self.burn_in:
            raise ValueError(
                f"BurnInTransform: of slices of {data.shape[-1]} steps nothing is left after burn_in={self.burn_in}; "
                "sample longer ones (SliceSampler(slice_len=…))"
            )
        for module in self.modules:
            for part in module.modules():
                if getattr(part, "recurrent_mode", True) is False:  # TorchRL's: steps would be taken one by one
                    raise RuntimeError(
                        f"BurnInTransform: {type(part).__name__} is not in its recurrent mode, and would start each "
                        "step from the state that is stored. Make it with default_recurrent_mode=True, or sample "
                        "within torchrl.modules.set_recurrent_mode(True)"
                    )

    def __repr__(self) -> str:
        return f"BurnInTransform(burn_in={self.burn_in}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _of_next(keys: Sequence[NestedKey]) -> Iterator[Key]:
    for key in map(as_key, keys):
        if key[0] == "next" and len(key) > 1:
            warn_user(
                f"BurnInTransform: out_keys are read from 'next' anyway; {show(key[1:])} is the same as {show(key)}"
            )
            key = key[1:]
        yield key


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _with_first(rest: TensorDictBase, key: Key, first: torch.Tensor) -> torch.Tensor:
    """A state ``[*slices, time]`` as it is stored, or zeros, but for its first step."""
    time, known = rest.batch_dims - 1, rest.get(key, None)
    if known is None:
        here = rest.device or next(iter(rest.values(True, True))).device
        known = first.new_zeros((*rest.batch_size, *first.shape[time:]), device=here)
    else:
        known = known.clone()
    known.select(time, 0).copy_(first)
    return known

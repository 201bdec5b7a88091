"""The policy that is served: its weights and their version, and how it is called on the rows of many requests."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor, lazy_stack
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from swath.errors import PolicyOutputError, add_note
from swath.keys import Key, as_key, nested, show
from swath.modules.inference_server.captured_rows import CapturedRows
from swath.modules.inference_server.requests import Answer, Content
from swath.rollout.exploration import exploring
from swath.rollout.first_call import require_inputs
from swath.rollout.functional import Function, is_known_stack, stack_functions
from swath.rollout.policies import PolicyCall, TensorCall, name_outputs, policy_calls, tensordict_callable
from swath.weight_update.weights import apply_weights

_ACTION: Key = ("action",)
#: Kinds of requests for which the policy is captured; others are answered by calling it.
MAX_KINDS = 64


class ServedPolicy:
    """A policy, and everything that happens to it between two batches.

    Args:
        given: the caller's policy; a module is copied, so that training it is not seen before it is published.
        shares_weights: serve the given module itself.
        device, output_device: where it computes, and where answers go (None: to where requests come from).
        kind: how it chooses for requests that do not say.
    """

    def __init__(
        self,
        given: Any,
        *,
        shares_weights: bool = False,
        device: torch.device | None = None,
        output_device: torch.device | None = None,
        collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None = None,
        kind: InteractionType | None = None,
        version: int = 0,
        version_key: Any = "policy_version",
    ) -> None:
        self._given = given
        self._device = device
        self._output_device = output_device
        self._collate = collate_fn
        self._kind = kind
        self.version = version
        self._version_key = None if version_key is None else as_key(version_key)
        self.num_updates = 0
        #: Held while the policy computes, and while it changes.
        self.lock = threading.RLock()
        self.model = given
        if isinstance(given, nn.Module) and not shares_weights:
            self.model = _own(given).requires_grad_(False)
        if isinstance(self.model, nn.Module) and device is not None:
            self.model = self.model.to(device)
        declared = getattr(self.model, "in_keys", None), getattr(self.model, "out_keys", None)
        #: None where the policy does not say.
        self.in_keys, self._out_keys = (None if keys is None else tuple(map(as_key, keys)) for keys in declared)
        self._calls: list[PolicyCall] | None = None
        #: Nothing but layers that are known, whose results are nobody else's.
        self._gives_new_memory = False
        self._stacks: dict[Any, list[Function]] = {}
        self._captured: dict[Any, CapturedRows] = {}
        #: The kinds for which something may have changed since.
        self._to_look_at: set[Any] = set()
        self._may_change = self.model is given and isinstance(given, nn.Module)

    def forget_source(self) -> None:
        """The policy was made for this server: there is no other one to take weights from."""
        self._given = None

    # -- weights ---------------------------------------------------------------------------------------------------

    def publish(self, source: Any = None) -> None:
        """Take over weights; without a source, those of the module that was given."""
        with self.lock:
            if source is None:
                source = self._given
                if source is None:
                    raise ValueError(
                        "this server was made with a policy_factory, so there is no policy to take weights from: "
                        "update_policy_weights_(weights)"
                    )
            if source is not self.model:
                apply_weights(self.model, source)
            self.count_update()

    def change(self, function: Callable[[Any], Any], *, counts: bool = True) -> Any:
        with self.lock:
            try:
                return function(self.model)
            finally:  # a function that fails half way has changed something, too
                if counts:
                    self.count_update()
                else:
                    self._look_again()

    def count_update(self, version: int | None = None) -> None:
        self.version = self.version + 1 if version is None else version
        self.num_updates += 1
        self._look_again()

    def _look_again(self) -> None:
        """Something of the policy has changed."""
        self._calls = None
        self._to_look_at = set(self._captured)

    def describe(self) -> str:
        """How the policy is called, in words, for the kinds of requests that came."""
        return "; ".join(dict.fromkeys(captured.describe() for captured in self._captured.values())) or "as it is"

    # -- calling ---------------------------------------------------------------------------------------------------

    def answer(self, contents: Sequence[Content]) -> Iterator[Answer]:
        """An answer to each, from one forward; they have one signature."""
        with self.lock, torch.no_grad(), exploring(contents[0].kind or self._kind):
            if self._collate is not None or contents[0].tensordict is not None or self._reads_size_only(contents[0]):
                return self._answer_whole(contents)
            return self._answer_rows(contents)

    def _reads_size_only(self, content: Content) -> bool:
        """Whether only a TensorDict can say to the policy how many rows there are."""
        return not content.keys and not any(isinstance(call, TensorCall) for call in self._calls_for({}))

    def _answer_rows(self, contents: Sequence[Content]) -> Iterator[Answer]:
        keys = contents[0].keys
        columns = zip(*[content.tensors for content in contents], strict=True)
        are_single = all(not content.batch_size for content in contents)
        if are_single:
            rows = {key: torch.stack(column) for key, column in zip(keys, columns, strict=True)}
        else:
            rows = {
                key: torch.cat([
                    tensor.reshape((content.num_rows, *tensor.shape[len(content.batch_size) :]))
                    for content, tensor in zip(contents, column, strict=True)
                ])
                for key, column in zip(keys, columns, strict=True)
            }  # fmt: skip
        sizes = [content.num_rows for content in contents]
        num_rows = sum(sizes)
        came_from = next((tensor.device for tensor in rows.values()), None)
        if self._device is not None:
            rows = {key: tensor.to(self._device) for key, tensor in rows.items()}
        outputs = self._outputs_for(rows)
        goes_to = self._output_device or came_from
        for key, value in outputs.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (num_rows,):
                raise PolicyOutputError(
                    f"the policy's {show(key)} is {_describe(value)}, for a batch of {num_rows} rows; it must have an "
                    "entry for each"
                )
            if value.device != goes_to or not self._gives_new_memory:
                # A policy may keep what it gives away, and write to it again.
                outputs[key] = value.to(goes_to, copy=True)
        if self._version_key is not None:
            outputs[self._version_key] = torch.full((num_rows,), self.version)
        names = tuple(outputs)
        if are_single:
            return ((names, values) for values in zip(*[value.unbind(0) for value in outputs.values()], strict=True))
        pieces = [
            [
                piece.reshape((*content.batch_size, *value.shape[1:]))
                for piece, content in zip(value.split(sizes), contents, strict=True)
            ]
            for value in outputs.values()
        ]
        return ((names, values) for values in zip(*pieces, strict=True))

    def _outputs_for(self, rows: dict[Key, torch.Tensor]) -> dict[Key, Any]:
        """What the policy gives for these rows: captured for each kind of rows that comes again."""
        self._calls_for(rows)
        if self._gives_new_memory or not isinstance(self.model, nn.Module):
            return self._called_on(rows)
        kind = (interaction_type(), *((key, tensor.shape, tensor.dtype) for key, tensor in rows.items()))
        captured = self._captured.get(kind)
        if captured is not None:
            if self._may_change or kind in self._to_look_at:
                self._to_look_at.discard(kind)
                captured.look_again()
            return captured(rows)
        outputs = self._called_on(rows)
        if len(self._captured) < MAX_KINDS and all(isinstance(value, torch.Tensor) for value in outputs.values()):
            self._captured[kind] = CapturedRows(self.model, rows, outputs, self._called_on)
        return outputs

    def _called_on(self, rows: dict[Key, torch.Tensor]) -> dict[Key, Any]:
        calls = self._calls_for(rows)
        num_rows = next((len(tensor) for tensor in rows.values()), 0)
        if not all(isinstance(call, TensorCall) for call in calls):
            return self._outputs_of(TensorDict(nested(rows), batch_size=[num_rows]))
        values: dict[Key, Any] = dict(rows)
        written: dict[Key, Any] = {}
        for call in calls:
            assert isinstance(call, TensorCall)
            require_inputs(call, values)
            result = self._run(call, values)
            if result is None:
                raise PolicyOutputError("the policy returned None; it must return its action")
            if isinstance(result, list):
                result = tuple(result)
            elif not isinstance(result, (torch.Tensor, tuple)):  # a dictionary, say, which the module itself unpacks
                return self._outputs_of(TensorDict(nested(rows), batch_size=[num_rows]))
            names = name_outputs(result, call.out_keys, [_ACTION])
            written.update(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
            values.update(written)
        chosen = self._out_keys if isinstance(self.model, TensorDictModuleBase) else None
        return {key: written[key] for key in (written if chosen is None else chosen) if key != ("_",)}

    def _run(self, call: TensorCall, values: dict[Key, Any]) -> Any:
        """A stack of known layers as a list of functions, bound once for each number of rows; others as they are."""
        if not (self._gives_new_memory and len(call.in_keys) == 1):
            return call.function(*[values[key] for key in call.in_keys])
        value = values[call.in_keys[0]]
        functions = self._stacks.get((call, value.shape))
        if functions is None:
            functions = self._stacks[call, value.shape] = stack_functions(call.function, value.shape)
        for function in functions:
            value = function(value)
        return value

    def _calls_for(self, rows: dict[Key, torch.Tensor]) -> list[PolicyCall]:
        if self._calls is None or self._may_change:
            self._calls = policy_calls(self.model, _like_an_env(rows))
            self._stacks.clear()
            self._gives_new_memory = all(
                isinstance(call, TensorCall) and is_known_stack(call.function) for call in self._calls
            )
        return self._calls

    def _outputs_of(self, given: TensorDictBase) -> dict[Key, Any]:
        """What the policy writes when it is called with a TensorDict."""
        before = {as_key(key): value for key, value in given.items(True, True)}
        result = tensordict_callable(self.model, _like_an_env(before))(given)
        if not isinstance(result, TensorDictBase):
            raise PolicyOutputError(f"the policy returned {type(result).__name__}, not a TensorDict")
        if self._out_keys is not None:
            missing = [key for key in self._out_keys if key != ("_",) and result.get(key, None) is None]
            if missing:
                raise PolicyOutputError(f"the policy declares {show(missing[0])} among its out_keys, but wrote it not")
            return {key: result.get(key) for key in self._out_keys if key != ("_",)}
        found = {as_key(key): value for key, value in result.items(True, True)}
        return {key: value for key, value in found.items() if value is not before.get(key)}

    def _answer_whole(self, contents: Sequence[Content]) -> Iterator[Answer]:
        """For ``collate_fn``, and for what has more in it than tensors: TensorDicts in, TensorDicts out."""
        count = len(contents)
        batch = (self._collate or lazy_stack)([content.as_tensordict() for content in contents])
        if self._device is not None:
            batch = batch.to(self._device)
        before = set(_all_keys(batch))
        result = tensordict_callable(self.model, _like_an_env(dict.fromkeys(before)))(batch)
        if self._output_device is not None:
            result = result.to(self._output_device)
        if not result.batch_size or result.batch_size[0] != count:
            raise PolicyOutputError(
                f"the policy answered {count} requests with a TensorDict of batch size {tuple(result.batch_size)}; its "
                "first dimension must be the requests'"
            )
        names = self._out_keys or tuple(key for key in _all_keys(result) if key not in before)
        names = tuple(name for name in names if name != ("_",))
        answers = []
        for content, piece in zip(contents, result.unbind(0), strict=True):
            values = [_copied(piece.get(name)) for name in names]
            if self._version_key is not None:
                values.append(torch.full(content.batch_size, self.version))
            answers.append((names if self._version_key is None else (*names, self._version_key), values))
        return iter(answers)


def _own(given: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(given)
    except Exception as error:
        add_note(
            error,
            "swath: an InferenceServer serves a copy of the policy, and this one cannot be copied; give a "
            "policy_factory, or share_weights=True to serve the module itself",
        )
        raise


def _like_an_env(leaves: dict[Key, Any]) -> Any:
    """What ``rollout.policies`` wants to know of an env."""
    keys = [key[0] if len(key) == 1 else key for key in leaves]
    return SimpleNamespace(observation_keys=keys, action_keys=["action"])


def _all_keys(tensordict: TensorDictBase) -> list[Key]:
    return [as_key(key) for key in tensordict.keys(True, True, is_leaf=is_leaf_nontensor)]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _describe(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"

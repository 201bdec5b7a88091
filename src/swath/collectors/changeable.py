"""Arguments of a collector that can be changed later, by assigning them; all others are refused."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tensordict import TensorDictBase

from swath.hints import ExplainsGuesses

if TYPE_CHECKING:
    from swath.data.postprocessing import Postprocessing

_ANEW = "make a new collector"
#: What to do instead of assigning an argument.
_INSTEAD = {
    "policy": "update_policy_weights_() gives it other weights; for another policy, make a new collector",
    "weight_updater": "give it to the constructor, or call update_policy_weights_()",
}


@functools.cache
def arguments_of(kind: type) -> frozenset[str]:
    """What the constructors of a collector can be given, and its env. (What a user's subclass adds is its own.)"""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("swath.")]
    makers = [base for base in ours if getattr(base, "_config_class", None) and "__init__" in vars(base)]
    named = (
        parameter.name
        for maker in makers
        for parameter in inspect.signature(vars(maker)["__init__"]).parameters.values()
        if parameter.name not in vars(maker).get("_not_kept", ()) and parameter.kind is not parameter.VAR_KEYWORD
    )
    return frozenset((*named, "env")) - {"self"}


class ChangeableArguments(ExplainsGuesses):
    """What was an argument takes effect when it is assigned, or raises: it is never ignored."""

    _postprocessing: Postprocessing
    #: Whether each step is written to a replay buffer by itself.
    _writes_steps: bool
    #: Where the arguments are documented: a dataclass of ``config.py``.
    _config_class: ClassVar[type | None] = None
    #: Arguments of the constructor that nothing is kept of.
    _not_kept: ClassVar[Sequence[str]] = ()
    #: Arguments that can be assigned later, too.
    _assignable: ClassVar[frozenset[str]] = frozenset(
        {"postproc", "check_finite", "pre_collect_hook", "post_collect_hook"}
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """What was an argument takes effect when it is assigned, or is refused: it is never ignored."""
        is_made = not self.__dict__.get("_closed", True)
        if is_made and name not in self._assignable and name in arguments_of(type(self)):
            raise AttributeError(f"{name} of {type(self).__name__} cannot be changed: {_INSTEAD.get(name, _ANEW)}")
        super().__setattr__(name, value)

    @property
    def _is_processed_elsewhere(self) -> bool:
        """Whether workers or nodes post-process what they write to a replay buffer by themselves."""
        return False

    def _checked(self, postprocessing: Postprocessing) -> Postprocessing:
        if self._writes_steps and (postprocessing.postproc or postprocessing.split_trajs):
            raise TypeError("extend_buffer=False writes step by step: postproc and split_trajs need whole batches")
        return postprocessing

    def _process_otherwise(self, **change: Any) -> None:
        ((name, value),) = change.items()
        if name != "check_finite" and value is not None and not callable(value):
            raise TypeError(f"{name} must be a function, or None; got {value!r}")
        if self._is_processed_elsewhere:
            raise RuntimeError(
                f"{name}: batches go from where they are collected into the replay buffer, and what is done to them "
                "was sent there; assign it before start(), or give it to the constructor"
            )
        self._postprocessing = self._checked(dataclasses.replace(self._postprocessing, **change))

    @property
    def postproc(self) -> Callable[[TensorDictBase], Any] | None:
        """Applied to each batch before it is delivered. May be assigned."""
        return self._postprocessing.postproc

    @postproc.setter
    def postproc(self, postproc: Callable[[TensorDictBase], Any] | None) -> None:
        self._process_otherwise(postproc=postproc)

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Called before each batch. May be assigned."""
        return self._postprocessing.pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        self._process_otherwise(pre_collect_hook=hook)

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """Called with each batch. May be assigned."""
        return self._postprocessing.post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        self._process_otherwise(post_collect_hook=hook)

    @property
    def check_finite(self) -> bool:
        """Whether NaN and infinity are errors. May be assigned."""
        return self._postprocessing.check_finite

    @check_finite.setter
    def check_finite(self, check_finite: bool) -> None:
        self._process_otherwise(check_finite=bool(check_finite))

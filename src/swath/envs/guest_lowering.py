"""A guest's own envs on rows, for as long as that is the same as stepping it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swath.envs.guest_stepper import GuestStepper
from swath.rollout.strip import Strip

if TYPE_CHECKING:
    from swath.envs.guest import GuestEnv


class Lowering:
    """Whether a guest's own envs are stepped on rows: what was made of it, and whether it still is what it was."""

    def __init__(self, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        #: How the guest is stepped, in words.
        self.plan = "not stepped yet"
        self.forget()

    def forget(self) -> None:
        """The guest is another one, or has other transforms."""
        self._env: Any = None
        #: Tells whether the guest has changed since.
        self.watch: Any = None
        self.was_reset = False

    def bind(self, guest: Any, strip: Strip) -> Any:
        """Its envs on these rows; None where it must be stepped as it is."""
        from swath.envs.lowering import bind_lowered, lowered
        from swath.envs.recognising import NotLowered

        try:
            if not self.is_allowed:
                raise NotLowered("lower=False")
            is_new = self._env is None or self.watch.has_changed()
            if is_new:
                self._env, self.watch = lowered(guest)
            own: Any = self._env
            stepper = bind_lowered(own, strip)
            if is_new:
                self.watch, self.was_reset = self.watch.again(), False
        except NotLowered as reason:
            self.plan = f"stepped as it is: {reason}"
            return None
        self.plan = f"lowered: {own.plan()}"
        return stepper


class LoweredStepper:
    """A guest's own envs on rows, for as long as its objects stay what they were when that was decided."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: GuestEnv, strip: Strip, stepper: Any) -> None:
        self._env = env
        self._strip = strip
        self._stepper = stepper
        self._lowering = env.lowering
        self._watch = env.lowering.watch
        self._has_changed = False
        self._in_batch = False
        self._expects_resets = False

    def expect_resets(self) -> None:
        """Whoever steps will always reset the envs that are done."""
        self._expects_resets = True
        if hasattr(self._stepper, "expect_resets"):
            self._stepper.expect_resets()

    def prepare(self) -> None:
        """Before a batch: its user may have changed something."""
        if self._watch is not None:
            self._has_changed = self._watch.has_changed()
        self._stepper.prepare()
        self._in_batch = True

    def settle(self) -> None:
        """After a batch: its user may use it."""
        self._in_batch = False
        if hasattr(self._stepper, "settle"):
            self._stepper.settle()

    def _change(self, row: int) -> None:
        """Lower it as it is now, or step it as it is; from where it stands, which ``row`` says."""
        env = self._env
        self._has_changed = False
        if hasattr(self._stepper, "settle"):
            self._stepper.settle()
        self._stepper = self._lowering.bind(env.guest, self._strip)
        self._watch = self._lowering.watch
        if self._stepper is None:
            self._watch = None
            self._stepper = GuestStepper(env, self._strip)
        if self._in_batch or self._watch is None:
            self._stepper.prepare()
        if self._expects_resets:
            self.expect_resets()
        self._stepper.resume(row)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        if self._has_changed:
            self._change(t)
        return self._stepper.step(t, env_ids)

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        if self._has_changed:
            self._change(row)
        self._stepper.reset(row, env_ids, **kwargs)
        if self._watch is not None and not self._lowering.was_reset:
            self._lowering.was_reset = True
            self._watch = self._lowering.watch = self._watch.again()

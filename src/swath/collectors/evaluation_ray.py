"""Evaluations in a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from swath.collectors.evaluation import Evaluation, EvaluationPlan, Weights, on_cpu
from swath.process.late_actor import RayHelper
from swath.process.seeding import draw_base_seed, seed_process

_SECONDS_TO_CLOSE = 2.0


class RayBackend:
    """See ``EvaluationBackend``.

    Args:
        options: of the actor, for ``ray.remote``.
    """

    pid: int | None = None

    def __init__(self, plan: EvaluationPlan, init_fn: Callable[[], Any] | None, options: Mapping[str, Any]) -> None:
        # One with a name is for others, too: it outlives the program, until shutdown().
        lifetime = {"lifetime": "detached"} if options.get("name") else {}
        self._helper = RayHelper.launch(
            "the Evaluator", {**lifetime, **options}, init_fn, (__name__, "Evaluating"), (plan, draw_base_seed())
        )

    def prepare(self) -> None:
        """It is made."""

    def run(self, weights: Weights, step: int) -> dict[str, Any]:
        return self._ask("run", on_cpu(weights), step)

    def set_seed(self, seed: int, static_seed: bool) -> int | None:
        return self._ask("set_seed", seed, static_seed)

    def _ask(self, method: str, *args: Any) -> Any:
        return self._helper.result(self._helper.start(method, *args))

    def interrupt(self) -> None:
        self._helper.interrupt()

    def kill(self) -> None:
        self._helper.kill()

    def close(self) -> None:
        self._helper.close(_SECONDS_TO_CLOSE)


class Evaluating(Evaluation):
    """In the actor."""

    def __init__(self, given: tuple[EvaluationPlan, int], should_stop: Callable[[], bool]) -> None:
        plan, seed = given
        torch.set_num_threads(1)
        seed_process(seed)
        super().__init__(plan, should_stop, has_own_process=True)

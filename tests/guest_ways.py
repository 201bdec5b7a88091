"""The two ways in which swath steps an env of TorchRL: on rows where it knows all of it, and as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swath.collectors import Collector
from swath.envs import GuestEnv

#: For tests of envs that are known as a whole: they must give the same in both ways.
both_ways = pytest.mark.parametrize("lower", [True, False], ids=["lowered", "as it is"])


def in_this_way(make: Callable[[], Any], lower: bool) -> Callable[[], Any]:
    """What makes the env: as it is given, or one that is never lowered."""
    return make if lower else lambda: GuestEnv(make(), lower=False)


def assert_way(collector: Any, lower: bool) -> None:
    """That it was stepped in this way; of envs in workers nothing is known here."""
    if type(collector) is Collector:
        assert collector.env_plan().startswith("lowered: " if lower else "stepped as it is: "), collector.env_plan()

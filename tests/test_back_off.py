"""How long a worker's next start is put off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from swath.workers.handle import WorkerHandle
from swath.workers.status_page import PAGE_BYTES, StatusPage


@dataclass
class NoEnvs:
    worker: int = 0
    shown: str = "none"


def a_handle() -> WorkerHandle:
    page = StatusPage(torch.zeros(PAGE_BYTES, dtype=torch.uint8), 0)
    spec: Any = NoEnvs()
    return WorkerHandle(spec, page, b"")


def test_starts_that_nothing_comes_of_are_put_off_longer_and_longer() -> None:
    handle = a_handle()
    waits = [handle.back_off_s() for _ in range(2000)]
    assert waits[:8] == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5])
    assert set(waits[8:]) == {5.0}


@pytest.mark.parametrize("of", ["frames", "beat"])
def test_who_has_collected_is_started_again_at_once(of: str) -> None:
    handle = a_handle()
    for _ in range(100):
        handle.page.write(**{of: 1})  # a whole batch, or a step of one
        assert handle.back_off_s() == 0
    handle.page.clear()
    assert [handle.back_off_s() for _ in range(3)] == pytest.approx([0, 0.1, 0.2])
    handle.page.write(**{of: 1})
    assert handle.back_off_s() == 0

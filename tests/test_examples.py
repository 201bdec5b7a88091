"""Examples: the one argument that says where rollouts run makes no difference to whether the policy learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from leaks import no_leaks  # noqa: F401

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "backend",
    ["direct", "process", "distributed", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_one_argument(backend: str) -> None:
    """A policy that has learned nothing gets about 22."""
    assert load("one_argument").train(backend, total_frames=24_000) > 60

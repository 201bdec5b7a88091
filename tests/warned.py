"""Warnings are about the user's line: whoever looks for one looks where it points, too."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@contextlib.contextmanager
def warned_here(category: type[Warning] = UserWarning, *, match: str) -> Iterator[list[warnings.WarningMessage]]:
    """``pytest.warns`` for warnings that must point at a file of the tests."""
    with pytest.warns(category, match=match) as told:
        yield told.list
    where = {Path(each.filename).parent for each in told if re.search(match, str(each.message))}
    assert where <= {HERE, HERE / "cli"}

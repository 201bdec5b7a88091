"""What the program has set, and a collector sets otherwise while it collects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swath.rollout.exploration import end_scopes, open_scopes


@dataclass(frozen=True)
class OutsideState:
    """What the program has set and a collector sets otherwise while it collects."""

    scopes: tuple[Any, ...]
    grad_enabled: bool
    num_threads: int

    @classmethod
    def now(cls) -> OutsideState:
        return cls(open_scopes(), torch.is_grad_enabled(), torch.get_num_threads())

    def put_back(self) -> None:
        end_scopes(except_for=self.scopes)
        torch.set_grad_enabled(self.grad_enabled)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

"""``Collector.enable_profile``: a torch profiler around some of the rollouts."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class ProfileConfig:
    """What to profile: ``num_rollouts`` in all, of which the first ``warmup_rollouts`` do not count.

    The trace (Chrome's format) goes to ``save_path``, or the profiler to ``on_trace_ready``. Without either, it goes to
    a new ``swath-trace-….json`` in the folder of temporary files, and that is said when it is written.
    """

    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: Sequence[str] = ("cpu",)
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    on_trace_ready: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"num_rollouts ({self.num_rollouts}) must be more than warmup_rollouts ({self.warmup_rollouts}), or "
                "nothing is profiled"
            )
        unknown = set(self.activities) - {"cpu", "cuda"}
        if unknown:
            raise ValueError(f"activities are 'cpu' and 'cuda', got {sorted(unknown)}")


class RolloutProfiler:
    """Counts rollouts and profiles those that were asked for."""

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._seen = 0
        kinds = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        self._profiler = torch.profiler.profile(
            activities=[kinds[name] for name in config.activities],
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        config = self._config
        if self._seen == config.warmup_rollouts:
            self._profiler.start()
        yield
        self._seen += 1
        if self._seen == config.num_rollouts:
            self._profiler.stop()
            if config.on_trace_ready is not None:
                config.on_trace_ready(self._profiler)
            if config.save_path is not None:
                Path(config.save_path).parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(config.save_path))
            elif config.on_trace_ready is None:
                descriptor, path = tempfile.mkstemp(prefix=f"swath-trace-{os.getpid()}-", suffix=".json")
                os.close(descriptor)
                self._profiler.export_chrome_trace(path)
                print(f"swath: the profile is in {path}; open it with ui.perfetto.dev", file=sys.stderr, flush=True)

    @property
    def finished(self) -> bool:
        return self._seen >= self._config.num_rollouts

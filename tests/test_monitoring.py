"""``stats()`` of all objects, ``swath.scalars``, and loggers that take it: names are those of docs/monitoring.md."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from counting import make_counting
from swath import Collector, Evaluator, InferenceServer, RandomPolicy, ReplayBuffer, scalars
from swath.collectors import AsyncBatchedCollector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.distributed import DistributedCollector
from swath.data import LazyTensorStorage

PAGE = (Path(__file__).parent.parent / "docs" / "monitoring.md").read_text()
PLAIN = (int, float, bool, str, type(None))


def documented(heading: str) -> set[str]:
    section = PAGE.partition(f"### {heading}\n")[2].partition("\n### ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def names_in(stats: dict[str, Any]) -> Iterator[str]:
    """Of what is no more than it should be: flat, but for the lines of workers and nodes."""
    for name, value in stats.items():
        if name in ("workers", "nodes"):
            for line in value:
                for own, entry in line.items():
                    assert isinstance(entry, PLAIN) or own == "envs", (name, own, entry)
                    yield f"{name}/N/{own}"
        else:
            assert isinstance(value, PLAIN), (name, value)
            yield name


@pytest.mark.processes
def test_stats_of_collectors_are_documented() -> None:
    made: list[Any] = [
        Collector(make_counting, frames_per_batch=20, total_frames=40),
        MultiSyncCollector([make_counting] * 2, frames_per_batch=20, total_frames=40, num_workers=2),
        MultiAsyncCollector([make_counting], frames_per_batch=20, total_frames=40),
        AsyncBatchedCollector([make_counting] * 2, RandomPolicy(), frames_per_batch=20, total_frames=40),
        DistributedCollector([make_counting], frames_per_batch=20, total_frames=40),
    ]
    seen: set[str] = set()
    for collector in made:
        seen |= set(names_in(collector.stats()))
        for _ in collector:
            seen |= set(names_in(collector.stats()))
        seen |= set(names_in(collector.stats()))
    assert seen == documented("Collectors")


def test_stats_of_buffers_evaluators_and_servers_are_documented() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=10)
    before = rb.stats()
    list(Collector(make_counting, frames_per_batch=20, total_frames=40, replay_buffer=rb))
    rb.sample()
    assert set(names_in(before)) == set(names_in(rb.stats())) == documented("Replay buffers")
    counts = {"size": 40, "capacity": 100, "write_count": 40, "num_sampled": 10, "samples_per_insert": 0.25}
    assert rb.stats() == counts
    evaluator = Evaluator(
        make_counting, policy=RandomPolicy(), num_trajectories=2, metrics_fn=lambda _: {"odd": "text"}
    )
    assert evaluator.stats() == {"evaluations": 0, "pending": False}
    evaluator.evaluate(step=3)
    stats = evaluator.stats()
    assert set(names_in(stats)) == documented("Evaluators")
    assert (stats["evaluations"], stats["eval/step"], stats["eval/num_episodes"]) == (1, 3, 2)
    evaluator.shutdown()
    with InferenceServer(torch.nn.Linear(4, 2)) as server:
        assert set(names_in(server.stats())) == documented("Inference servers")


@pytest.mark.processes
def test_scalars_are_numbers_and_nothing_else() -> None:
    collector = MultiSyncCollector([make_counting] * 2, frames_per_batch=20, num_workers=2)
    next(iter(collector))
    stats, flat = collector.stats(), scalars(collector, "train")
    assert all(type(value) in (int, float) and math.isfinite(value) for value in flat.values())
    assert flat["train/frames"] == stats["frames"] == 20
    assert flat["train/workers/1/alive"] == 1
    assert not {"train/layout", "train/failure", "train/total_frames", "train/workers/0/envs"} & set(flat)
    assert set(scalars(stats)) == {name.removeprefix("train/") for name in flat}
    collector.shutdown()


@pytest.mark.parametrize("given", [None, 3, [1.0]])
def test_scalars_of_what_has_no_stats(given: Any) -> None:
    with pytest.raises(TypeError, match=r"what its stats\(\) returned; got"):
        scalars(given)


def test_the_tensorboard_writer_takes_them(tmp_path: Path) -> None:
    """Written by the real one, and read back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    collector = Collector(make_counting, frames_per_batch=50, total_frames=200)
    with SummaryWriter(tmp_path) as writer:
        for _ in collector:
            for name, value in scalars(collector, "collector").items():
                writer.add_scalar(name, value, collector.stats()["frames"])
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("collector/frames")] == [
        (frames, frames) for frames in (50, 100, 150, 200)
    ]
    assert read.Scalars("collector/episode_return")[-1].value == pytest.approx(collector.stats()["episode_return"])


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_examples_for_other_loggers_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has the methods which the example calls: the packages are large, and want a server."""
    logged: list[tuple[dict[str, float], int]] = []

    class Run:
        def __enter__(self) -> Run:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def log(self, data: dict[str, float], step: int) -> None:
            logged.append((data, step))

    stand_in: Any = types.ModuleType(name)
    stand_in.init = lambda project: Run()
    stand_in.start_run = Run
    stand_in.log_metrics = lambda metrics, step: logged.append((metrics, step))
    monkeypatch.setitem(sys.modules, name, stand_in)
    (code,) = [
        code for code in re.findall(r"```{code-block} python\n(.*?)```", PAGE, re.DOTALL) if f"import {name}" in code
    ]
    exec(compile(code, name, "exec"), {})
    assert [step for _, step in logged] == [200, 400, 600, 800, 1000]
    assert logged[-1][0]["collector/frames"] == 1000

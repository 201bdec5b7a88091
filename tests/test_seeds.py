"""Every code block of the documents that swath's API comes from runs when ``torchrl`` becomes ``swath``."""

from __future__ import annotations

import ast
import os
import re
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from leaks import wait_until
from swath import collectors
from swath.data import LazyTensorStorage, ReplayBuffer
from swath.envs import GymEnv

ROOT = Path(__file__).parent.parent
COPIES = ROOT / "tests" / "seeds"
ORIGINALS = Path(os.environ.get("SWATH_SEEDS", ROOT.parent / "shared" / "seeds"))
SEEDS = ORIGINALS if ORIGINALS.is_dir() or "SWATH_SEEDS" in os.environ else COPIES

WEB_PAGE = "000_5f950cb1ea9aadd3.txt"
ONE_LINE = "001_c2d7c733592eaecf.txt"
PACKAGE_PAGE = "002_811ec4bbd05c5c50.txt"
SOURCE_PAGE = "003_af3e50dabc54ecff.txt"
NUM_BLOCKS = {WEB_PAGE: 2, ONE_LINE: 1, PACKAGE_PAGE: 1, SOURCE_PAGE: 3}

# -- extraction ----------------------------------------------------------------------------------------------------

#: The directive, and all lines behind it that are blank or indented.
CODE_BLOCK = re.compile(r"^\.\. code-block:: python\n((?:[ ]+.*\n|\s*\n)+)", re.MULTILINE)
#: Lines that begin with a prompt.
DOCTEST = re.compile(r"(?:^[ ]*(?:>>>|\.\.\.)(?: .*)?\n)+", re.MULTILINE)
PROMPT = re.compile(r"^ *(>>>|\.\.\.) ?", re.MULTILINE)
#: A page whose line ends were lost: the first prompt, and everything behind it.
DOCTEST_IN_ONE_LINE = re.compile(r"(?<=\S) >>> .*$", re.MULTILINE)
#: Code without any markup begins with an import at the beginning of a line, behind prose.
UNMARKED = re.compile(r"(?<=[.:]\n\n)^from torchrl", re.MULTILINE)


def blocks_of(text: str) -> list[str]:
    """The code blocks of a page, in the order in which they stand there."""
    found = [(match.start(), textwrap.dedent(match[1])) for match in CODE_BLOCK.finditer(text)]
    found += [(match.start(), PROMPT.sub("", match[0])) for match in DOCTEST.finditer(text)]
    found += [(match.start(), _one_line_doctest(match[0])) for match in DOCTEST_IN_ONE_LINE.finditer(text)]
    found += [(match.start(), _longest_code(text[match.start() :])) for match in UNMARKED.finditer(text)]
    return [block for _, block in sorted(found)]


def _one_line_doctest(line: str) -> str:
    """``>>> for … : ... body`` on several lines again; the prose behind it is part of the last line's comment."""
    prompts = re.split(r" (>>>|\.\.\.) ", line)[1:]
    pairs = zip(prompts[::2], prompts[1::2], strict=True)
    return "\n".join(("" if prompt == ">>>" else "    ") + code for prompt, code in pairs)


def _longest_code(text: str) -> str:
    """As many of its first lines as are Python."""
    lines = text.splitlines()
    for num_lines in range(len(lines), 0, -1):
        code = "\n".join(lines[:num_lines])
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        return code
    raise AssertionError(f"no code in {text[:80]!r}")


@pytest.mark.parametrize("page", NUM_BLOCKS)
def test_every_block_is_found(page: str) -> None:
    text = (SEEDS / page).read_text()
    blocks = blocks_of(text)
    assert len(blocks) == NUM_BLOCKS[page]
    code = "\n".join(blocks)
    ast.parse(code)
    assert code.count("from torchrl") == text.count("from torchrl")
    assert code.count("collector.shutdown()") == text.count("collector.shutdown()")
    assert code.count("collector.start()") == text.count("collector.start()")
    assert len(re.findall(r"= \w*Collector\(", code)) == len(re.findall(r"= \w*Collector\(", text))


def test_there_are_no_other_documents() -> None:
    assert sorted(path.name for path in SEEDS.glob("*.txt")) == sorted(NUM_BLOCKS)


@pytest.mark.skipif(SEEDS == COPIES, reason="the original documents are not here: set SWATH_SEEDS to their folder")
@pytest.mark.parametrize("page", NUM_BLOCKS)
def test_the_copies_are_true(page: str) -> None:
    assert (COPIES / page).read_bytes() == (ORIGINALS / page).read_bytes()


@pytest.mark.parametrize("page", [ONE_LINE, PACKAGE_PAGE, SOURCE_PAGE])
def test_every_class_that_a_page_names_exists(page: str) -> None:
    names = set(re.findall(r"\b_?[a-zA-Z]*Collector(?:Base)?\b", (SEEDS / page).read_text()))
    assert len(names) >= 3
    for name in names:
        assert isinstance(getattr(collectors, name), type), name


# -- running -------------------------------------------------------------------------------------------------------


def run(page: str, index: int, replace: dict[str, str] | None = None, **placeholders: Any) -> dict[str, Any]:
    """Run a block, with names that it takes for granted; returns all names when it is over."""
    code = blocks_of((SEEDS / page).read_text())[index].replace("torchrl", "swath")
    for old, new in (replace or {}).items():
        assert old in code
        code = code.replace(old, new)
    # As a script: what workers need of it travels by value.
    names: dict[str, Any] = {"__name__": "__main__", **placeholders}
    exec(compile(code, f"{page}, block {index}", "exec"), names)
    return names


def linear_policy(num_observations: int, num_actions: int) -> TensorDictModule:
    return TensorDictModule(nn.Linear(num_observations, num_actions), in_keys=["observation"], out_keys=["action"])


@pytest.mark.timeout(300)
@pytest.mark.processes
@pytest.mark.parametrize(("page", "index"), [(WEB_PAGE, 0), (SOURCE_PAGE, 1)])
def test_multi_collector(page: str, index: int) -> None:
    names = run(page, index, my_policy=linear_policy(4, 2))
    # "All workers complete before delivering batch"
    assert names["data"].shape == (4, 250)
    assert names["sync_collector"].stats()["frames"] == 100_000
    assert isinstance(names["sync_collector"], collectors.MultiSyncCollector)
    # "First-come-first-serve delivery": a batch is from one env.
    assert isinstance(names["async_collector"], collectors.MultiAsyncCollector)
    assert {batch.shape for batch in names["async_collector"]} == {(1000,)}
    assert names["async_collector"].stats()["frames"] == 100_000


@pytest.mark.processes
def test_async_batched_collector() -> None:
    names = run(SOURCE_PAGE, 0)
    # "data is a […] TensorDict of collected transitions"
    assert isinstance(names["data"], TensorDictBase)
    assert names["data"].shape == (200,)
    assert ("next", "reward") in names["data"].keys(True)
    assert names["collector"].stats()["frames"] == 10_000


@pytest.mark.processes
def test_quick_example() -> None:
    shapes: list[torch.Size] = []

    def saw(names: dict[str, Any]) -> bool:
        shapes.append(names["data"].shape)
        return True

    # (It points at a line of the document, which is no file.)
    with pytest.warns(DeprecationWarning, match="SyncDataCollector is now called Collector") as told:
        # The condition is a call, so that every batch is seen.
        names = run(
            PACKAGE_PAGE, 0, {"if should_update:": "if saw(globals()):"}, my_policy=linear_policy(3, 1), saw=saw
        )
    assert len(told) == 1
    # "data is a TensorDict with shape [4, 50] (4 envs, 50 steps each)"
    assert shapes == [(4, 50)] * 50
    assert names["collector"].stats()["frames"] == 10_000
    # "Update policy weights periodically"
    assert names["collector"].policy_version == 50


@pytest.mark.processes
@pytest.mark.parametrize(
    ("page", "index", "name"),
    [(WEB_PAGE, 1, "Collector"), (ONE_LINE, 0, "SyncDataCollector"), (SOURCE_PAGE, 2, "Collector")],
)
def test_background(page: str, index: int, name: str) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)

    def sleep(seconds: float) -> None:
        assert wait_until(lambda: len(buffer) > 0, timeout_s=seconds)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = run(
            page,
            index,
            {f"{name}(...,": f"{name}(make_env, my_policy, frames_per_batch=100,"},
            **{name: getattr(collectors, name)},
            make_env=lambda: GymEnv("CartPole-v1"),
            my_policy=linear_policy(4, 2),
            rb=buffer,
            time=SimpleNamespace(sleep=sleep),
            optim_steps=20,
        )
    legacy = [f"{name} is now called Collector"] if name != "Collector" else []
    assert [str(warning.message).partition(":")[0] for warning in told] == legacy
    assert (names["i"], names["data"].shape) == (19, (32,))
    collector = names["collector"]
    assert collector.is_running()
    # "Data collectors that have been started with start() should be shut down using async_shutdown()."
    collector.async_shutdown()
    assert not collector.is_running()
    assert buffer.write_count == collector.stats()["frames"] > 0

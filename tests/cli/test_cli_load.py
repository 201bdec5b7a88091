"""``swath.load``: nothing that is done to what it gives reaches the files, and no folder is believed blindly."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import swath
from command_checks import frame_files
from programs import WarmProgram


@pytest.fixture
def dataset(swath_here: Any) -> Path:
    assert swath_here("collect", "CartPole-v1", "--frames", "50", "--seed", "0", "--out", "data").code == 0
    return Path("data")


# -- what is given -----------------------------------------------------------------------------------------------------


def test_writing_to_what_was_loaded_does_not_change_the_dataset(dataset: Path) -> None:
    before = frame_files("data")
    frames = swath.load(dataset).frames
    frames["action"].zero_()
    frames["next", "reward"][3:5] = 7
    assert frames["next", "reward"].sum() == 48 + 14
    assert frame_files("data") == before
    assert swath.load(dataset).frames["action"].sum() == 50
    with pytest.raises(RuntimeError, match="lock"):
        frames["another"] = torch.zeros(50)


_SENDS = """
import torch.multiprocessing, swath

context = torch.multiprocessing.get_context("fork")
queue = context.SimpleQueue()

def zero():
    action = queue.get()
    print(int(action.sum()), flush=True)
    action.zero_()

process = context.Process(target=zero)
process.start()
queue.put(swath.load("data").frames["action"])
process.join()
"""


@pytest.mark.processes
def test_another_process_that_is_sent_frames_does_not_change_them_either(dataset: Path) -> None:
    before = frame_files("data")
    with WarmProgram(_SENDS) as program:
        assert program.communicate()[0] == "50\n"
    assert frame_files("data") == before


def test_a_dataset_is_sent_as_its_path(dataset: Path) -> None:
    sent = pickle.dumps(swath.load(dataset))
    assert len(sent) < 1000
    assert (pickle.loads(sent).frames == swath.load(dataset).frames).all()


def test_frames_may_be_more_than_there_is_memory(dataset: Path) -> None:
    memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    num_frames = (memory["MemTotal"] + memory["SwapTotal"]) * 1024 // 16 + 1_000_000
    metadata = json.loads((dataset / "metadata.json").read_text())
    (dataset / "metadata.json").write_text(json.dumps({**metadata, "frames": num_frames}))
    rows = "env,traj_id,start,length,return,terminated,truncated\n"
    (dataset / "episodes.csv").write_text(f"{rows}0,0,0,{num_frames},1.0,true,false\n")
    shutil.rmtree(dataset / "frames")
    example = TensorDict(observation=torch.zeros(1, 4), batch_size=1)
    example.expand(num_frames).memmap_like(str(dataset / "frames"))  # sparse: it takes no room
    frames = swath.load(dataset).frames
    frames["observation"][-1] = 3
    assert frames["observation"][-2:].sum() == 12


# -- what is refused ---------------------------------------------------------------------------------------------------


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("it ran").absolute(),)


def _plant_object(dataset: Path) -> None:
    note = dataset / "frames" / "note"
    note.mkdir()
    (note / "meta.json").write_text(
        '{"_type": "<class \'tensordict.NonTensorData\'>", "_non_tensor": {}, "_is_non_tensor": true}'
    )
    (note / "other.pickle").write_bytes(pickle.dumps(Trap()))
    _change_json(dataset / "frames" / "meta.json", note={"type": "NonTensorData"})


def _plant_object_as_tensordict(dataset: Path) -> None:
    _plant_object(dataset)
    _change_json(dataset / "frames" / "meta.json", note={"type": "TensorDict"})


def _plant_type(dataset: Path) -> None:
    """Its data are as they were, so it may open; nothing may be imported."""
    Path("evil.py").write_text("from pathlib import Path; Path('it ran').touch()")
    _change_json(dataset / "frames" / "meta.json", _type="<class 'evil.Frames'>")


def _change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def _change_leaf(dataset: Path, **changes: Any) -> None:
    meta = dataset / "frames" / "meta.json"
    _change_json(meta, action={**json.loads(meta.read_text())["action"], **changes})


def _rename_key(dataset: Path, name: str) -> None:
    meta = dataset / "frames" / "meta.json"
    content = json.loads(meta.read_text())
    content[name] = content.pop("action")
    meta.write_text(json.dumps(content))


def _link(path: Path) -> None:
    shutil.copy(path, "outside")
    path.unlink()
    path.symlink_to(Path("outside").absolute())


def _link_folder(path: Path) -> None:
    path.rename("outside")
    path.symlink_to(Path("outside").absolute())


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _nest(dataset: Path) -> None:
    folder = dataset / "frames"
    for _ in range(60):
        content = json.loads((folder / "meta.json").read_text()) if (folder / "meta.json").exists() else {}
        (folder / "meta.json").write_text(json.dumps({**content, "a": {"type": "TensorDict"}}))
        folder = folder / "a"
        folder.mkdir()


ACTION = Path("data/frames/action.memmap")
HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a pickle": _plant_object,
    "a pickle in a TensorDict": _plant_object_as_tensordict,
    "an absolute key": lambda data: _rename_key(data, str(Path("outside").absolute())),
    "a key above": lambda data: _rename_key(data, "../../outside"),
    "a link": lambda _: _link(ACTION),
    "a link for the description": lambda data: _link(data / "frames" / "meta.json"),
    "a link for the metadata": lambda data: _link(data / "metadata.json"),
    "a link for the episodes": lambda data: _link(data / "episodes.csv"),
    "a link for a folder": lambda data: _link_folder(data / "frames" / "next"),
    "links in a circle": lambda _: _replace(ACTION, lambda path: path.symlink_to(path.absolute())),
    "a pipe": lambda _: _replace(ACTION, os.mkfifo),
    "a pipe for the metadata": lambda data: _replace(data / "metadata.json", os.mkfifo),
    "a folder": lambda _: _replace(ACTION, Path.mkdir),
    "a file that is gone": lambda _: ACTION.unlink(),
    "a file that is shorter": lambda _: _cut(ACTION),
    "a file that is longer": lambda _: os.truncate(ACTION, 1_000_000),
    "episodes that are cut": lambda data: _cut(data / "episodes.csv"),
    "episodes that are fewer": lambda data: (data / "episodes.csv").write_text(
        "\n".join((data / "episodes.csv").read_text().splitlines()[:-1]) + "\n"
    ),
    "metadata that is cut": lambda data: os.truncate(data / "metadata.json", 500),
    "more frames than there are": lambda data: _change_json(data / "metadata.json", frames=10**15),
    "fewer frames than there are": lambda data: _change_json(data / "metadata.json", frames=10),
    "frames that are no number": lambda data: _change_json(data / "metadata.json", frames="many"),
    "a shape without end": lambda data: _change_leaf(data, shape=[50, 10**18, 10**18]),
    "a negative shape": lambda data: _change_leaf(data, shape=[50, -2]),
    "a shape that is none": lambda data: _change_leaf(data, shape={"a": 1}),
    "a dtype that is a function": lambda data: _change_leaf(data, dtype="torch.load"),
    "a version that is none": lambda data: _change_json(data / "metadata.json", format_version=[1]),
    "folders in folders": _nest,
    "JSON without end": lambda data: (data / "frames" / "meta.json").write_text("[" * 100_000),
    "commits of nothing": lambda data: (data / "commits.jsonl").write_text(""),
    "commits that are none": lambda data: (data / "commits.jsonl").write_text('{"offsets":[0]}\n{"pieces":7}\n'),
    "commits of an env too many": lambda data: (data / "commits.jsonl").write_text(
        '{"offsets":[0]}\n{"pieces":[[1,0,5]],"episodes":10}\n'
    ),
    "commits of more than there is": lambda data: (data / "commits.jsonl").write_text(
        '{"offsets":[0]}\n{"pieces":[[0,0,1000000000000000]],"episodes":10}\n'
    ),
}


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_folder_that_is_not_what_it_says_is_refused_and_left_as_it_is(
    dataset: Path, change: Callable[[Path], Any]
) -> None:
    Path("outside.memmap").write_bytes(ACTION.read_bytes())
    change(dataset)
    before = _state_of(Path())
    with pytest.raises(ValueError, match=r"data' is (damaged|no swath dataset): "):
        swath.load(dataset)
    assert _state_of(Path()) == before
    assert not Path("it ran").exists()


def test_a_type_that_a_folder_names_is_not_imported(dataset: Path) -> None:
    _plant_type(dataset)
    assert type(swath.load(dataset).frames) is TensorDict
    assert not Path("it ran").exists()


def test_the_folder_itself_may_be_a_link(dataset: Path) -> None:
    Path("elsewhere").symlink_to(dataset.absolute())
    assert len(swath.load("elsewhere").frames) == 50


def test_keys_with_signs_that_files_cannot_have(dataset: Path) -> None:
    shutil.rmtree(dataset / "frames")
    odd = ["left/right", "..", "a b", "ü%", "x.y"]
    frames = TensorDict({name: torch.full((50,), i) for i, name in enumerate(odd)}, batch_size=50)
    frames["empty"] = torch.zeros(50, 0)
    frames.memmap(str(dataset / "frames"))
    loaded = swath.load(dataset).frames
    assert set(loaded.keys()) == {*odd, "empty"}
    assert [int(loaded[name][0]) for name in odd] == [0, 1, 2, 3, 4]

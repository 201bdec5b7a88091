"""Pages for those who come from elsewhere: their scripts learn, log and go on; recordings show what there is."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swath.cli.main import main

ROOT = Path(__file__).parent.parent
GUIDES = ["cleanrl", "stable-baselines3", "own-loop"]


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record, show_scripts = load(ROOT / "tools" / "record.py"), load(ROOT / "tools" / "show_scripts.py")


def run(folder: Path, *arguments: str) -> str:
    """What a script of ``examples/`` prints, alone in a folder."""
    (folder / arguments[0]).write_text((ROOT / "examples" / arguments[0]).read_text())
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def scalars(folder: Path, tag: str) -> dict[int, list[float]]:
    """What TensorBoard shows under a name, by step."""
    # Here, since those who run other tests have no need of it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload().Scalars(tag)
    return {step: [event.value for event in events if event.step == step] for step in {event.step for event in events}}


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_shows_the_script_that_is_tested(guide: str) -> None:
    text = (ROOT / "docs" / f"coming-from-{guide}.md").read_text()
    assert show_scripts.shown_in(text) == [f"examples/from_{guide.replace('-', '_')}.py"]
    assert text == show_scripts.with_scripts(text), "python tools/show_scripts.py"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_found_from_where_newcomers_begin(guide: str) -> None:
    for page in ("README.md", "docs/index.md", "docs/getting-started.md"):
        assert f"coming-from-{guide}.md" in (ROOT / page).read_text(), page


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_what_people_search_for_in_its_headings(guide: str) -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / f"coming-from-{guide}.md").read_text(), re.MULTILINE)
    assert {"Episode returns", "TensorBoard", "Checkpoint and resume", "The script"} <= set(headings)


@pytest.mark.processes
def test_the_script_of_cleanrl_learns_logs_and_goes_on(tmp_path: Path) -> None:
    """A policy that has learned nothing gets 22."""
    said = run(tmp_path, "from_cleanrl.py", "--total-timesteps", "10240")
    lines = re.findall(r"global_step=(\d+), episodic_return=([\d.]+) \((\d+) episodes\)", said)
    assert [int(step) for step, _, _ in lines] == [5_120, 10_240]
    first, last = (float(mean) for _, mean, _ in lines)
    assert 22 < first < last
    assert last > 80
    logged = scalars(tmp_path / "runs" / "from_cleanrl", "charts/episodic_return")
    returns = [value for step in sorted(logged) for value in logged[step] if step > 5_120]
    assert len(returns) == int(lines[1][2])
    assert sum(returns) / len(returns) == pytest.approx(last, abs=0.05)

    checkpoint = ["--resume", "runs/from_cleanrl/checkpoint.pt"]
    said = run(tmp_path, "from_cleanrl.py", *checkpoint, "--total-timesteps", "12288", "--workers", "0")
    step, mean, _ = re.findall(r"global_step=(\d+), episodic_return=([\d.]+) \((\d+) episodes\)", said)[-1]
    assert int(step) == 12_288
    assert float(mean) > 60  # what was learned is there


@pytest.mark.processes
def test_the_script_of_cleanrl_gives_the_same_shapes_with_workers(tmp_path: Path) -> None:
    said = run(tmp_path, "from_cleanrl.py", "--total-timesteps", "5120", "--workers", "4")
    ((step, mean),) = re.findall(r"global_step=(\d+), episodic_return=([\d.]+)", said)
    assert int(step) == 5_120
    assert float(mean) > 25


@pytest.mark.processes
def test_the_script_of_stable_baselines3_learns_logs_and_goes_on(tmp_path: Path) -> None:
    """Both near 100 with seeds 0, 1 and 2."""
    pattern = r"num_timesteps=(\d+), ep_rew_mean=([\d.]+), episode_reward=([\d.]+)"
    said = run(tmp_path, "from_stable_baselines3.py", "--total-timesteps", "16384")
    step, mean, evaluated = re.findall(pattern, said)[-1]
    assert int(step) == 16_384
    assert float(mean) > 50  # of the last 100 training episodes; the first ones got 22
    assert float(evaluated) > 60
    logged = scalars(tmp_path / "runs" / "from_stable_baselines3", "eval/mean_reward")
    assert logged[16_384] == [pytest.approx(float(evaluated), abs=0.05)]

    checkpoint = ["--resume", "runs/from_stable_baselines3/checkpoint.pt"]
    said = run(tmp_path, "from_stable_baselines3.py", *checkpoint, "--total-timesteps", "17408")
    step, _, evaluated = re.findall(pattern, said)[-1]
    assert int(step) == 17_408
    assert float(evaluated) > 60  # the network is there, and so are the statistics that it saw observations by


@pytest.mark.processes
def test_the_script_of_an_own_loop_learns_logs_and_goes_on(tmp_path: Path) -> None:
    pattern = r"step (\d+): return ([\d.]+) over (\d+) episodes"
    said = run(tmp_path, "from_own_loop.py", "--steps", "4000")
    (_, first, _), (step, last, count) = re.findall(pattern, said)
    assert int(step) == 4_000
    assert float(first) < 40 < float(last)
    logged = scalars(tmp_path / "runs" / "from_own_loop", "episode/return")
    assert sum(map(len, logged.values())) > int(count)

    said = run(tmp_path, "from_own_loop.py", "--resume", "runs/from_own_loop", "--steps", "4512")
    ((step, _, _),) = re.findall(pattern, said)
    assert int(step) == 4_512


# -- recordings --------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "recordings.md").read_text()
#: For a test: the same commands, and less of everything.
SHORTER = {"40000": "1024", "50000": "1536", "6000": "1200", "100k": "400"}


@pytest.mark.parametrize("name", record.RECORDINGS)
def test_a_recording_is_of_the_commands_that_are_recorded(name: str) -> None:
    (shown,) = [found[2] for found in record.block_of(name).finditer(PAGE)]
    assert re.findall(r"^\$ (.*)$", shown, re.MULTILINE) == list(record.RECORDINGS[name])
    for private in (str(ROOT), str(Path.home()), "/tmp/", "/home/", "/opt/", "Traceback"):
        assert private not in shown
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", shown)


@pytest.mark.parametrize("name", record.RECORDINGS)
def test_what_a_recording_installs_is_there(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [command for command in record.RECORDINGS[name] if command.startswith("pip ")]
    assert installs
    for command in installs:
        *_, constraints, package = shlex.split(command)
        assert (ROOT / constraints.removeprefix("~/swath/")).exists()
        asked = re.fullmatch(r"(torch)|\$HOME/swath\[(\w+)\]", package)
        assert asked is not None
        assert asked[1] or asked[2] in extras


def scripts_of(name: str) -> list[list[str]]:
    """The command lines of a recording that run a script, without ``python``."""
    words = [shlex.split(command) for command in record.RECORDINGS[name]]
    return [line[1:] for line in words if line[0] == "python" and line[1].endswith(".py")]


@pytest.mark.parametrize("name", ["cleanrl", "sac"])
def test_scripts_of_a_recording_are_copied_first_and_know_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = [word for line in record.RECORDINGS[name] if line.startswith("cp ") for word in line.split()[1:-1]]
    scripts = scripts_of(name)
    assert scripts
    for script, *options in scripts:
        assert f"~/swath/examples/{script}" in copied
        assert all((ROOT / file.removeprefix("~/swath/")).exists() for file in copied)
        monkeypatch.setattr(sys, "argv", [script, *options])
        module = load(ROOT / "examples" / script)
        given = module.parse_args() if name == "cleanrl" else module.read_options("", frames=1)  # exits if it knows not
        assert str(given.total_timesteps if name == "cleanrl" else given.frames) in options


def test_names_that_recordings_look_for_are_written() -> None:
    (tag,) = [line.split("--tag ")[1].split()[0] for line in record.RECORDINGS["cleanrl"] if "--tag" in line]
    assert f'"{tag}"' in (ROOT / "examples" / "from_cleanrl.py").read_text()
    (line,) = [line for line in record.RECORDINGS["sac"] if line.startswith("grep ")]
    *_, pattern, script = shlex.split(line)
    assert pattern in (ROOT / "examples" / script).read_text()


def test_the_dataset_of_a_recording_is_collected_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line) for line in record.RECORDINGS["dataset"]]
    (collect,) = [line[1:] for line in lines if line[0] == "swath"]
    assert main([word.replace("100k", "400") for word in collect]) == 0
    (listed,) = [line for line in lines if line[0] == "ls" and line[1:] != ["-A"]]
    assert Path(listed[1]).is_dir()
    programs = [line[2] for line in lines if line[:2] == ["python", "-c"]]
    assert programs
    for program in programs:
        exec(program, {})


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", record.RECORDINGS)
def test_the_commands_of_a_recording_work(name: str, tmp_path: Path) -> None:
    """In an empty folder, with this environment instead of a new one, and for a shorter time."""
    commands = [command for command in record.RECORDINGS[name] if not re.match(r"(pip|python3 -m venv) ", command)]
    short = re.sub("|".join(SHORTER), lambda long: SHORTER[long[0]], "\n".join(commands))
    assert short != "\n".join(commands)
    (tmp_path / "swath").symlink_to(ROOT)
    (folder := tmp_path / "new").mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(tmp_path), "PATH": path}
    command = ["bash", "-e", "-o", "pipefail", "-c", short]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""The wheel: what is in it, and that it works where there is nothing else of this repository."""

from __future__ import annotations

import email
import email.message
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import swath

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("wheel"), pytest.mark.timeout(120)]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that knows of no environment but its own; what it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command[1:]}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", ROOT, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel. Dependencies are those of this one, not installed again."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    pip("--python", programs / "python", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A path in a .pth file is searched, but .pth files that lie there are not read: this swath's is one of them.
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours))
    return programs


def test_the_wheel_is_of_this_version_and_for_any_python_3(wheel: Path) -> None:
    assert wheel.name == f"swath-{swath.__version__}-py3-none-any.whl"


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    about = f"swath-{swath.__version__}.dist-info"
    files |= {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert set(zipfile.ZipFile(wheel).namelist()) == files
    assert "swath/py.typed" in files  # as "Typing :: Typed" claims


def metadata(wheel: Path) -> email.message.Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    about = metadata(wheel)
    assert about["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"
    assert about["License-Expression"] == "MIT"
    assert about.get_all("Classifier") == PROJECT["classifiers"]
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    extras = about.get_all("Provides-Extra") or []
    assert sorted(extras) == sorted(PROJECT["optional-dependencies"])
    required = [name_of(entry) for entry in about.get_all("Requires-Dist") or [] if "extra ==" not in entry]
    assert sorted(required) == sorted(map(name_of, PROJECT["dependencies"]))


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_versions_said_to_be_tested_are_those_of_the_constraints(page: str) -> None:
    said = (ROOT / page).read_text().partition("## Supported and tested")[2]
    constraints = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package in ("torch", "tensordict", "gymnasium"):
        assert f"{package} {constraints[package]}" in said


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def test_the_command_and_the_module_tell_the_version(clean_bin: Path, tmp_path: Path) -> None:
    said = f"swath {swath.__version__}\n"
    assert run(clean_bin / "swath", "--version", cwd=tmp_path) == said
    assert run(clean_bin / "python", "-m", "swath", "--version", cwd=tmp_path) == said


def test_it_collects_outside_of_the_repository(clean_bin: Path, tmp_path: Path) -> None:
    run(clean_bin / "python", "-m", "swath", "collect", "CartPole-v1", "--frames", "100", "--out", "data", cwd=tmp_path)
    assert len(swath.load(tmp_path / "data").frames) == 100


def test_the_example_of_the_readme_runs_outside_of_the_repository(clean_bin: Path, tmp_path: Path) -> None:
    example = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert example is not None
    script = tmp_path / "example.py"
    script.write_text(f"{example[1]}\nimport swath\nprint(swath.__file__, batch.numel())\n")
    where, frames = run(clean_bin / "python", script, cwd=tmp_path).split()
    assert Path(where).is_relative_to(clean_bin.parent)
    assert frames == "1000"

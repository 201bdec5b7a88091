"""``swath doctor``: what is concluded from made-up facts, what is gathered for real, and probes that fail or hang."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swath.cli.doctor import cluster, command, machine, packages, trial
from swath.cli.doctor.findings import Finding, Probe, run, tidy
from swath.cli.doctor.trial import Trial
from swath.process.cgroups import CgroupLimits

# -- what follows from facts -------------------------------------------------------------------------------------------

SYSTEM = machine.System("Linux", "6.1", "x86_64", "3.11.7 (CPython)", None, "fork", (), (), True)
CORES = machine.Cores(8, 8, None, 0.5)
MEMORY = machine.Memory(16 * 10**9, 8 * 10**9, None, None)
SHARED = machine.SharedMemory(8 * 10**9, 8 * 10**9, True)
FILES = machine.Descriptors(1024, 4096, 8)
PROCESSES = machine.Processes(4000, 100, CgroupLimits(), 8)
FOLDER = machine.Folder(10**11, True, length=4)
RAY = cluster.Ray(True, None, None, False)
TORCH: dict[str, Any] = {
    "seconds_to_import": {"numpy": 0.1, "torch": 1.9},
    "cpu_seconds": 1.5,
    "threads": 8,
    "cores": 8,
    "openmp": True,
    "mkl": False,
    "variables": {},
}
GPU: dict[str, Any] = {"devices": [], "why_not": None, "driver": False, "visible": None, "built_for": None}
DRIVER = {**GPU, "driver": True}
WORKER: dict[str, Any] = {
    "seconds_to_start": 1.0,
    "seconds_of_batch": 0.01,
    "seconds_to_end": 0.1,
    "own_bytes": 15_000_000,
}


def but(facts: Any, **changes: Any) -> Any:
    return {**facts, **changes} if isinstance(facts, dict) else dataclasses.replace(facts, **changes)


FINE: list[tuple[Callable[[Any], Sequence[Finding]], Any]] = [
    (machine.conclude_system, SYSTEM),
    (machine.conclude_cores, CORES),
    (machine.conclude_cores, but(CORES, quota=2.5)),
    (machine.conclude_memory, MEMORY),
    (machine.conclude_memory, machine.Memory(None, None, None, None)),
    (machine.conclude_shared_memory, SHARED),
    (machine.conclude_shared_memory, but(SHARED, total=None, free=None)),
    (machine.conclude_descriptors, FILES),
    (machine.conclude_descriptors, but(FILES, soft=None)),
    (machine.conclude_processes, PROCESSES),
    (machine.conclude_processes, machine.Processes(None, None, CgroupLimits(), 8)),
    (machine.conclude_here, FOLDER),
    (machine.conclude_temporary, FOLDER),
    (cluster.conclude_ray, RAY),
    (cluster.conclude_ray, but(RAY, installed=False)),
    (cluster.conclude_ray, but(RAY, address="head:6379", answers=True)),
    (cluster.conclude_ray, but(RAY, local="10.0.0.1:6379", answers=True)),
    (cluster.conclude_ray, but(RAY, address="local", local="10.0.0.1:6379")),
    (trial.conclude_torch, TORCH),
    (trial.conclude_torch, but(TORCH, variables={"OMP_NUM_THREADS": "4,2"})),
    (trial.conclude_gpu, GPU),
    (trial.conclude_gpu, but(DRIVER, visible="", built_for="12.8")),
    (trial.conclude_gpu, but(DRIVER, built_for="12.8", devices=[{"name": "H100", "free": 10**9, "total": 10**10}])),
    (trial.conclude_worker, WORKER),
    (trial.conclude_worker, but(WORKER, own_bytes=None)),
]


@pytest.mark.parametrize(("conclude", "facts"), FINE)
def test_nothing_is_wrong(conclude: Callable[[Any], Sequence[Finding]], facts: Any) -> None:
    for finding in conclude(facts):
        assert (finding.level, finding.follows, finding.mend) == ("ok", "", ())


#: Facts, how bad it is, what stands in the line, what follows, and the command.
WRONG: list[tuple[Callable[[Any], Sequence[Finding]], Any, str, str, str, str]] = [
    (machine.conclude_system, but(SYSTEM, lacks=("fork",)), "error", "Linux 6.1", "Only Collector", "run it on Linux"),
    (
        machine.conclude_system,
        but(SYSTEM, lacks_for_stepping=("order",)),
        "warning",
        "x86_64",
        "No ParallelEnv and no AsyncBatchedCollector here: they need order",
        "MultiSyncCollector",
    ),
    (machine.conclude_system, but(SYSTEM, has_pidfd=False), "warning", "none", "older than 5.3", "seccomp=unconfined"),
    (machine.conclude_cores, but(CORES, affinity=1), "warning", "1 of 8; affinity: 1", "take turns", "--cpus=2"),
    (machine.conclude_cores, but(CORES, quota=0.5), "warning", "0.5 of 8; quota", "take turns", "--cpus=2"),
    (machine.conclude_cores, machine.Cores(1, 1, None, None), "warning", "1", "take turns", "num_workers=1"),
    (machine.conclude_cores, but(CORES, load=40.0), "warning", "8; load: 40", "Others compute", "top"),
    (machine.conclude_memory, but(MEMORY, available=10**8), "warning", "100.0 MB free", "SIGKILL", "--memory"),
    (
        machine.conclude_memory,
        but(MEMORY, limit=10**9, limit_left=10**8),
        "warning",
        "100.0 MB free of 16.0 GB; limit of the control group: 1.0 GB",
        "OutOfSharedMemory",
        "--memory",
    ),
    (
        machine.conclude_shared_memory,
        but(SHARED, total=64 * 10**6, free=64 * 10**6),
        "warning",
        "64.0 MB free",
        "No limit for swath",
        "--shm-size=2g",
    ),
    (
        machine.conclude_shared_memory,
        machine.SharedMemory(None, None, False, "OSError: no /proc"),
        "error",
        "no memfd",
        "no /proc",
        "mount -t proc",
    ),
    (
        machine.conclude_descriptors,
        but(FILES, soft=64),
        "warning",
        "64 at most",
        "enough for 11 workers",
        "ulimit -n 1024",
    ),
    (
        machine.conclude_descriptors,
        but(FILES, soft=64, hard=64),
        "warning",
        "(hard limit: 64)",
        "Too many open files",
        "docker run --ulimit nofile=1024",
    ),
    (
        machine.conclude_descriptors,
        but(FILES, soft=20, hard=None),
        "warning",
        "none",
        "for 0 workers",
        "ulimit -n 1024",
    ),
    (
        machine.conclude_processes,
        but(PROCESSES, limit=120),
        "warning",
        "120 of this user at most, 100 in use",
        "room for some 1 workers",
        "ulimit -u 1120",
    ),
    (
        machine.conclude_processes,
        but(PROCESSES, limits=CgroupLimits(processes=64, processes_left=60)),
        "warning",
        "64 in the control group, 60 left",
        "Resource temporarily unavailable",
        "docker run --pids-limit=1064",
    ),
    (machine.conclude_here, but(FOLDER, free=10**6), "warning", "1.0 MB free", "DiskFull", "df -h"),
    (machine.conclude_here, but(FOLDER, writable=False), "warning", "read-only", "cannot be written", "cd to"),
    (machine.conclude_here, machine.Folder(None, False, "gone"), "error", "gone", "Torch cannot be imported", "cd"),
    (machine.conclude_temporary, but(FOLDER, writable=False), "error", "read-only", "No worker", "export TMPDIR"),
    (
        machine.conclude_temporary,
        but(FOLDER, length=90),
        "error",
        "90 characters",
        "AF_UNIX path too long",
        "TMPDIR=/tmp",
    ),
    (machine.conclude_temporary, but(FOLDER, free=10), "warning", "10 B free", "No room", "export TMPDIR"),
    (
        cluster.conclude_ray,
        but(RAY, address="head:6379", why_not="Connection refused"),
        "error",
        "nobody answers at RAY_ADDRESS",
        "Connection refused",
        "unset RAY_ADDRESS",
    ),
    (
        cluster.conclude_ray,
        but(RAY, address="auto"),
        "error",
        "no cluster",
        "RayCollector would fail",
        "ray start --head",
    ),
    (
        cluster.conclude_ray,
        but(RAY, local="10.0.0.1:6379"),
        "warning",
        "does not answer",
        "without ray stop",
        "ray stop",
    ),
    (
        cluster.conclude_ray,
        but(RAY, installed=False, address="head:1"),
        "warning",
        "not installed",
        "needs Ray",
        "pip install 'swath[ray]'",
    ),
    (
        trial.conclude_torch,
        but(TORCH, threads=64),
        "warning",
        "torch: 64 (OpenMP)",
        "cores (8)",
        "export OMP_NUM_THREADS=8",
    ),
    (
        trial.conclude_torch,
        but(TORCH, variables={"MKL_NUM_THREADS": "64"}),
        "warning",
        "torch: 8 (OpenMP); MKL_NUM_THREADS=64",
        "spinning",
        "export MKL_NUM_THREADS=8",
    ),
    (
        trial.conclude_torch,
        but(TORCH, variables={"OMP_NUM_THREADS": "many"}),
        "warning",
        "OMP_NUM_THREADS=many",
        "No number",
        "export OMP_NUM_THREADS=8",
    ),
    (
        trial.conclude_torch,
        but(TORCH, seconds_to_import={"numpy": 1.0, "torch": 30.0}),
        "warning",
        "31.0 s, of which computing 1.5 s; longest: torch",
        "Every program",
        "python -m venv",
    ),
    (trial.conclude_gpu, DRIVER, "warning", "not used", "built for CPUs", "pytorch.org"),
    (
        trial.conclude_gpu,
        but(DRIVER, built_for="12.8", why_not="the driver is too old"),
        "warning",
        "not available",
        "(the driver is too old)",
        "nvidia-smi",
    ),
    (trial.conclude_worker, but(WORKER, seconds_to_start=60.0), "warning", "started in 60.0 s", "Imports", "venv"),
]


@pytest.mark.parametrize(("conclude", "facts", "level", "value", "follows", "mend"), WRONG)
def test_what_is_wrong_is_told_with_what_follows_and_what_mends_it(
    conclude: Callable[[Any], Sequence[Finding]], facts: Any, level: str, value: str, follows: str, mend: str
) -> None:
    (found,) = [finding for finding in conclude(facts) if finding.level != "ok"]
    assert found.level == level
    assert value in found.value
    assert follows in found.follows
    assert mend in "\n".join(found.mend)
    for line in command.lines_of(found):
        assert len(line) <= 80 or line.startswith("      -> ")


# -- versions ----------------------------------------------------------------------------------------------------------


def versions(*given: packages.Package, **others: Any) -> dict[str, Finding]:
    facts = packages.Packages("0.1.0", given, True, **others)
    return {finding.name: finding for finding in packages.conclude_packages(facts)}


def test_versions_that_swath_does_not_support() -> None:
    package = packages.Package
    found = versions(
        package("torch", "2.4.1+cu121", ">=2.5"),
        package("numpy", "2.4.6", ">=1.26"),
        package("tensordict", None, ">=0.12"),
        package("torchrl", "0.15.0", ">=0.14.1,<0.15", "torchrl"),
        package("ray", "2.60.0", ">=2.60,<3", "ray"),
        package("mujoco", "4.0", "<4", "dm-control"),
        package("envpool", None, ">=1.2.5", "envpool"),
    )
    assert found["packages"].value == "numpy 2.4.6"
    assert found["torch"].level == found["tensordict"].level == "error"
    assert found["torch"].mend == ("pip install 'torch>=2.5'",)
    assert found["torchrl"].level == "warning"
    assert found["torchrl"].mend == ("pip install 'swath[torchrl]'",)
    assert found["optional packages"].value == "ray 2.60.0, mujoco 4.0"  # MuJoCo 4 is fine without dm_control
    assert found["not installed"].value == "envpool"
    found = versions(package("mujoco", "4.0", "<4", "dm-control"), package("dm-control", "1.1", ">=1", "dm-control"))
    assert found["mujoco"].level == "warning"


def test_every_requirement_of_pyproject_is_understood() -> None:
    import tomllib

    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    lines = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for line in lines:
        found = packages.parse_requirement(line)
        assert found.name == line.partition("[")[0].partition(">")[0].partition("<")[0].lower().replace("_", "-")
        assert line.endswith(found.versions)
        if found.versions:
            assert not packages.is_within("0.0.1" if ">=" in line else "99999", found.versions), line


def test_files_that_hide_modules(folder: Path) -> None:
    assert packages.gather_packages().hidden_by == ()
    for name in ("random.py", "torch.py", "my_train.py"):
        (folder / name).write_text("")
    facts = packages.gather_packages()
    assert facts.hidden_by == ("random.py", "torch.py")
    found = {finding.name: finding for finding in packages.conclude_packages(facts)}["hiding modules"]
    assert found.mend == ("mv random.py my_random.py", "mv torch.py my_torch.py")


# -- facts are those of this machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [*machine.PROBES, *packages.PROBES, *cluster.PROBES], ids=lambda probe: probe.name)
def test_gathering(probe: Probe[Any]) -> None:
    result = run(probe)
    assert result.findings
    assert not any("cannot be told" in finding.value for finding in result.findings)
    json.dumps(result.facts_for_json, allow_nan=False)


def test_facts_agree_with_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.gather_descriptors().soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert machine.gather_cores().affinity == len(os.sched_getaffinity(0))
    assert machine.gather_shared_memory().memfd
    assert packages.gather_packages().packages[0].installed is not None
    assert machine._threads_of_user() >= threading.active_count()  # type: ignore[operator]
    monkeypatch.setattr(os, "memfd_create", lambda name: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    assert "not permitted" in str(machine.gather_shared_memory().why_not)


def test_a_cluster_that_answers_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster.gather_ray() == cluster.Ray(True, None, None, False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        assert cluster.gather_ray().answers
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert cluster.gather_ray().answers
    facts = cluster.gather_ray()
    assert not facts.answers
    assert "refused" in str(facts.why_not)
    monkeypatch.setenv("RAY_ADDRESS", "http://x y/z")
    assert "host:port" in str(cluster.gather_ray().why_not)


# -- what fails, or hangs, is a line -----------------------------------------------------------------------------------


def test_a_probe_that_fails_or_hangs_is_a_line() -> None:
    def fails() -> None:
        raise PermissionError(13, "Permission denied", str(Path.home() / "secret"))

    hold = threading.Event()
    (failed,) = run(Probe("one", fails, lambda facts: [])).findings
    assert failed == Finding(
        "one", "cannot be told: PermissionError: [Errno 13] Permission denied: 'secret'", "warning"
    )
    (hangs,) = run(Probe("two", hold.wait, lambda facts: []), seconds=0.05).findings
    hold.set()
    assert hangs.value == "cannot be told: no answer within 0 s"


def trial_of(code: str, **limits: float) -> list[Finding]:
    asked = Trial(limits, code)
    try:
        return [finding for _, result in asked.results() for finding in result.findings]
    finally:
        asked.close()


SAYS = "import os, sys; out = os.fdopen(int(sys.argv[1]), 'w'); say = lambda t: print(t, file=out, flush=True); "


@pytest.mark.processes
def test_a_trial_whose_process_dies_hangs_or_raises() -> None:
    (died,) = trial_of(
        "import os, sys; print('Illegal instruction', file=sys.stderr, flush=True); os.kill(os.getpid(), 4)"
    )
    assert died.value == "the process was killed by SIGILL, while importing torch: Illegal instruction"
    assert died.level == "error"
    (hangs,) = trial_of("import time; time.sleep(100)", torch=0.2)
    assert hangs.value == "no answer within 0 s, while importing torch"
    (raised,) = trial_of(SAYS + """say('{{"ended": "torch", "error": "ImportError: libgomp"}}'); sys.stdin.read()""")
    assert raised.value == "failed: ImportError: libgomp"
    assert raised.mend[1].startswith("pip install")
    # It writes more to stderr than fits into a pipe, and ends in the middle of a line.
    (left,) = trial_of(
        SAYS + "sys.stderr.write('x' * 300_000 + chr(10)); say('no JSON'); out.write('half'); sys.exit(3)"
    )
    assert left.value.startswith("the process left with exit code 3, while importing torch: xxx")


@pytest.mark.processes
def test_a_trial_without_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (found,) = trial_of("")
    assert found.value.startswith("no process can be started: FileNotFoundError")


@pytest.mark.processes
def test_a_worker_is_really_started() -> None:
    facts = {}
    asked = Trial()
    try:
        for name, result in asked.results():
            facts[name] = result.facts
            assert not any(finding.level == "error" for finding in result.findings), result
    finally:
        asked.close()
    assert set(facts) == {"torch", "gpu", "worker"}
    assert facts["torch"]["threads"] >= 1
    assert facts["worker"]["seconds_to_start"] > 0 < facts["worker"]["own_bytes"]


@pytest.mark.processes
def test_the_worker_of_the_trial_cannot_be_started(tmp_path: Path) -> None:
    """What the doctor is about: 16 open files are too few, and it says so instead of failing itself."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    done = subprocess.run(
        [sys.executable, "-m", "swath", "doctor"], preexec_fn=limit, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Too many open files" in done.stdout
    assert "WARN  open files         16 at most" in done.stdout
    assert "ERROR " in done.stdout
    assert done.stdout.endswith("collecting would fail.\n")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_command_where_much_is_wrong_but_collecting_works() -> None:
    """With few descriptors, one core, too many threads, no HOME, errors for warnings, a folder to read only."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.chdir("/proc")  # which root may not write to either

    environment = {**os.environ, "OMP_NUM_THREADS": "64", "RAY_ADDRESS": "127.0.0.1:1"}
    del environment["HOME"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "swath", "doctor", "--json"],
        preexec_fn=limit,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stderr == ""
    told = json.loads(done.stdout)
    levels = {finding["name"]: finding["level"] for finding in told["findings"]}
    assert {name for name, level in levels.items() if level == "warning"} >= {
        "cores",
        "open files",
        "current folder",
        "threads",
    }
    assert [name for name, level in levels.items() if level == "error"] == ["ray"]
    assert levels["worker"] == "ok"
    assert done.returncode == 1
    assert (told["ok"], told["errors"]) == (False, 1)
    assert told["facts"]["cores"]["affinity"] == 1
    assert told["facts"]["torch"]["variables"] == {"OMP_NUM_THREADS": "64"}


@pytest.mark.processes
def test_a_folder_that_is_not_there_any_more(folder: Path) -> None:
    """Torch ends the process that imports it there, which must not be the doctor's."""
    gone = folder / "gone"
    gone.mkdir()

    def leave() -> None:
        os.chdir(gone)
        os.rmdir(gone)

    command_line = [sys.executable, "-m", "swath", "doctor"]
    done = subprocess.run(command_line, preexec_fn=leave, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "ERROR current folder     it is not there any more\n" in done.stdout
    assert "while importing" in done.stdout


class NoTrial:
    """Instead of a process: the lines are what is looked at."""

    found = Finding("worker", "started in 1.0 s")

    def results(self, say: Callable[[str], Any]) -> Any:
        from swath.cli.doctor.findings import Result

        say("starting a worker")
        yield "worker", Result((self.found,))

    def close(self) -> None:
        pass


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Trial", NoTrial)


@pytest.mark.usefixtures("no_trial")
def test_what_is_printed_can_be_pasted(swath_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://someone-private:1")
    monkeypatch.setattr(cluster, "_why_nobody_answers", lambda address: "Connection refused")
    said = swath_here("doctor")
    assert said.code == 1
    assert said.stderr == ""
    assert said.stdout.startswith("swath doctor\n\nok    system             Linux")
    assert "\x1b" not in said.stdout
    for line in said.stdout.splitlines():
        assert len(line) <= 80 or line.startswith("      -> "), line
    for private in (str(Path.home()), os.getcwd(), "someone-private"):
        assert private not in said.stdout
    monkeypatch.delenv("RAY_ADDRESS")
    said = swath_here("doctor")
    assert said.code == 0
    assert said.stdout.splitlines()[-1] == "Nothing is wrong." or "collecting works" in said.stdout
    monkeypatch.setattr(NoTrial, "found", Finding("worker", "failed: ValueError", "error", "All fail.", ("mend it",)))
    said = swath_here("doctor")
    assert said.code == 1
    assert "ERROR worker             failed: ValueError\n      All fail.\n      -> mend it\n" in said.stdout


@pytest.mark.usefixtures("no_trial")
def test_output_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it where descriptor 1 is closed
    assert command.examine(as_json=False) in (0, 1)
    assert command.examine(as_json=True) in (0, 1)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert command.examine(as_json=False) == 0


@pytest.mark.usefixtures("no_trial")
def test_a_terminal_sees_colours_and_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    command.examine(as_json=False)
    assert "\x1b[32mok    \x1b[0m" in out.getvalue()
    assert "starting a worker …" in err.getvalue()
    assert err.getvalue().endswith("\r")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    command.examine(as_json=False)
    assert "\x1b" not in sys.stdout.getvalue()  # type: ignore[attr-defined]


@pytest.mark.processes
def test_ctrl_c_ends_it_and_its_process(swath_process: Callable[..., Any]) -> None:
    process = swath_process("doctor")
    assert process.stdout.readline() == "swath doctor\n"
    while "ray" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "swath: stopped\n"


def test_paths_and_control_characters_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/my name")
    assert tidy("\n\nOSError: no '/home/my name/deep/x.so'\x1b[0m\nmore") == "OSError: no 'x.so'[0m"

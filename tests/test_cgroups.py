"""What control groups allow: made-up trees of both versions, with this process at the root and further down."""

from __future__ import annotations

from pathlib import Path

from swath.process.cgroups import CgroupLimits, read_limits


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "tree").mkdir(exist_ok=True)
    return root / "tree"


def own(root: Path, text: str) -> Path:
    (root / "own").write_text(text)
    return root / "own"


def test_the_second_version_in_a_container(tmp_path: Path) -> None:
    files = {
        "cpu.max": "150000 100000",
        "memory.max": "8000",
        "memory.current": "5000",
        "memory.stat": "anon 1000\ninactive_file 3000\nactive_file 1000",
        "pids.max": "100",
        "pids.current": "40",
    }
    assert read_limits(tree(tmp_path, files), own(tmp_path, "0::/\n")) == CgroupLimits(1.5, 8000, 6000, 100, 60)


def test_limits_are_those_of_the_narrowest_group_above(tmp_path: Path) -> None:
    """As under Slurm, and in services of systemd: where this process is, there may be none."""
    files = {
        "system.slice/cpu.max": "400000 100000",
        "system.slice/job_1/cpu.max": "200000 100000",
        "system.slice/job_1/step/cpu.max": "max 100000",
        "system.slice/job_2/cpu.max": "50000 100000",
        "system.slice/memory.max": "9000",
        "system.slice/memory.current": "8500",
        "system.slice/job_1/memory.max": "4000",
        "system.slice/job_1/memory.current": "1000",
    }
    limits = read_limits(tree(tmp_path, files), own(tmp_path, "0::/system.slice/job_1/step\n"))
    assert limits == CgroupLimits(2.0, 4000, 500, None, None)


def test_the_first_version(tmp_path: Path) -> None:
    files = {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "cpu/docker/1/cpu.cfs_quota_us": "50000",
        "cpu/docker/1/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "5",
        "memory/docker/1/memory.limit_in_bytes": "7000",
        "memory/docker/1/memory.usage_in_bytes": "6000",
        "memory/docker/1/memory.stat": "cache 10\ntotal_inactive_file 500",
        "pids/docker/1/pids.max": "max",
    }
    named = own(tmp_path, "5:memory:/docker/1\n4:cpuacct,cpu:/docker/1\n3:pids:/docker/1\n0::/\n")
    assert read_limits(tree(tmp_path, files), named) == CgroupLimits(0.5, 7000, 1500, None, None)
    # In a container without a view of its own, these paths are the machine's, and what is mounted is the group itself.
    (tmp_path / "inside").mkdir()
    inside = tree(tmp_path / "inside", {"memory/memory.limit_in_bytes": "300", "memory/memory.usage_in_bytes": "100"})
    assert read_limits(inside, named).memory_left == 200


def test_no_limits_and_nonsense(tmp_path: Path) -> None:
    nothing = CgroupLimits()
    assert read_limits(tmp_path / "nowhere", tmp_path / "nothing") == nothing
    files = {"cpu.max": "much", "memory.max": "", "pids.max": "-"}
    assert read_limits(tree(tmp_path, files), own(tmp_path, "0::/../elsewhere\n")) == nothing
    assert isinstance(read_limits(), CgroupLimits)

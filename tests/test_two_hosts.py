"""A DistributedCollector across two hosts: network namespaces with a cable between them, which is then cut."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

DRIVER = """
import sys, time
from swath.collectors.distributed import DistributedCollector
folder, address = sys.argv[1:]
collector = DistributedCollector(
    ["CartPole-v1"] * 2, frames_per_batch=100, launcher="folder", folder=folder, address=address, secret="quince"
)
try:
    for number, batch in enumerate(collector):
        if number == 20:
            print("collecting", collector.stats()["frames"], flush=True)
        if number > 20:
            time.sleep(0.02)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    raise SystemExit(3)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Hosts:
    """Two namespaces; the first one's address, and its end of the cable."""

    driver: str
    nodes: str
    address: str
    cable: str

    def start(self, where: str, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", where, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def cut(self) -> None:
        """No packet gets through any more, and nobody is told."""
        rule = ["tc", "qdisc", "add", "dev", self.cable, "root", "netem", "loss", "100%"]
        if run("ip", "netns", "exec", self.driver, *rule).returncode:
            assert run("ip", "-n", self.driver, "link", "set", self.cable, "down").returncode == 0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    name = f"swath{uuid.uuid4().hex[:6]}"
    made = Hosts(f"{name}a", f"{name}b", "10.77.0.1", f"{name}0")
    try:
        steps = [
            f"netns add {made.driver}",
            f"netns add {made.nodes}",
            f"link add {made.cable} netns {made.driver} type veth peer name {name}1 netns {made.nodes}",
            f"-n {made.driver} addr add {made.address}/24 dev {made.cable}",
            f"-n {made.nodes} addr add 10.77.0.2/24 dev {name}1",
            *(f"-n {made.driver} link set {each} up" for each in ("lo", made.cable)),
            *(f"-n {made.nodes} link set {each} up" for each in ("lo", f"{name}1")),
        ]
        for step in steps:
            try:
                done = run("ip", *step.split())
            except FileNotFoundError:
                pytest.skip("there is no `ip` (iproute2) to make network namespaces with")
            if done.returncode:
                pytest.skip(f"this machine does not allow network namespaces: ip {step}: {done.stderr.strip()}")
        yield made
    finally:
        for each in (made.driver, made.nodes):
            run("ip", "netns", "delete", each)


@pytest.mark.alone
def test_a_cable_that_is_cut_is_an_error_on_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    folder = tmp_path / "nodes"
    driver = hosts.start(hosts.driver, sys.executable, str(script), str(folder), hosts.address)
    nodes = [
        hosts.start(hosts.nodes, sys.executable, "-m", "swath.cli.main", "node", str(folder), str(i), "--wait", "60")
        for i in range(2)
    ]
    everybody = [driver, *nodes]
    try:
        assert driver.stdout is not None
        lines = iter(driver.stdout.readline, "")
        assert any(line.startswith("collecting") for line in lines)
        hosts.cut()
        cut_at = time.monotonic()
        codes = [each.wait(30) for each in everybody]
        seconds = time.monotonic() - cut_at
        said = [each.stdout.read() for each in everybody if each.stdout is not None]
        assert codes == [3, 1, 1], said
        assert seconds < 15
        assert "NodeLost node" in said[0]
        assert "has lost its driver" in said[1]
        assert "has lost its driver" in said[2]
        print(f"an error on both sides {seconds:.1f} s after the cut")
    finally:
        for each in everybody:
            each.kill()
            each.wait()
            if each.stdout is not None:
                each.stdout.close()

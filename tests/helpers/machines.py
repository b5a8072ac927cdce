"""Machines on one: network namespaces, each with a cable to one switch. Needs Linux, iproute2 and root."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ADDRESSES = tuple(f"10.177.0.{number + 1}" for number in range(8))
PORT = "29571"
CLONE_NEWNET = 0x40000000

_networks = itertools.count()


class Machine:
    """One end of a cable."""

    device = "zpv0"

    def __init__(self, network: str, number: int) -> None:
        self.number, self.name, self.address = number, f"{network}-{number}", ADDRESSES[number]
        self._switch, self._port = f"{network}-switch", f"zpp{number}"

    def plug(self) -> None:
        """A namespace with a cable to the switch."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self.device, "netns", self.name, "type", "veth", "peer", "name", self._port, "netns",
            self._switch)  # fmt: skip
        _ip("-n", self._switch, "link", "set", self._port, "master", "zpbr", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.device)
        for device in ("lo", self.device):
            _ip("-n", self.name, "link", "set", device, "up")

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told: connections neither close nor answer."""
        _ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def enter(self) -> None:
        """Let this thread, and those that it starts from now on, be on this machine."""
        with open(f"/run/netns/{self.name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")

    def start(self, words: Sequence[str], per_node: int, folder: Path, *more: str) -> subprocess.Popen[str]:
        """torchrun on this machine; both have the same words."""
        command = [
            "ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--node-rank", str(self.number), "--nproc-per-node", str(per_node), "--master-addr", ADDRESSES[0],
            "--master-port", PORT, *more, "-m", "zeropipe", *words,
        ]  # fmt: skip
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.device, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        return subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def speed(self, rate: str) -> None:
        """Let the cable send `rate`, like 8mbit."""
        _ip("netns", "exec", self.name, "tc", "qdisc", "replace", "dev", self.device, "root", "tbf", "rate", rate,
            "burst", "32kb", "latency", "400ms")  # fmt: skip

    def kill_a_rank(self) -> None:
        """One process that torchrun started here is gone at once; torchrun itself stays."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(OSError):  # it has just ended
                if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
                    return
        raise AssertionError(f"{self.name} has no rank")

    def switch_off(self) -> None:
        """Every process of the machine is gone at once."""
        for pid in _ip("netns", "pids", self.name).split():
            os.kill(int(pid), signal.SIGKILL)


@contextmanager
def connected_machines(number: int) -> Iterator[list[Machine]]:
    """Skips, with the reason, where there can be none."""
    if shutil.which("ip") is None:
        pytest.skip("several machines need iproute2: ip is not installed")
    network = f"zp{os.getpid()}-{next(_networks)}"
    machines = [Machine(network, one) for one in range(number)]
    try:
        try:
            _ip("netns", "add", f"{network}-switch")
            _ip("-n", f"{network}-switch", "link", "add", "zpbr", "type", "bridge")
            _ip("-n", f"{network}-switch", "link", "set", "zpbr", "up")
            for machine in machines:
                machine.plug()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip() or error}")
        yield machines
    finally:
        for machine in machines:
            if subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True).returncode == 0:
                machine.switch_off()
                subprocess.run(["ip", "netns", "del", machine.name], check=False)
        subprocess.run(["ip", "netns", "del", f"{network}-switch"], check=False, capture_output=True)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """With cables of 1 Gbit/s. Skips, with the reason, where there can be none."""
    if shutil.which("tc") is None:
        pytest.skip("cables of a given speed need iproute2: tc is not installed")
    with connected_machines(2) as machines:
        for machine in machines:
            machine.speed("1gbit")
        yield machines


def run_on(
    machines: Sequence[Machine], words: Sequence[str], folder: Path, per_node: int = 1
) -> list[tuple[int, str, str]]:
    """The same command on both: exit status, stdout and stderr of each."""
    running = [machine.start(words, per_node, folder) for machine in machines]
    return [ended(one) for one in running]


def ended(process: subprocess.Popen[str], patience: float = 400.0) -> tuple[int, str, str]:
    """How it ended; it is killed if it does not."""
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"no end within {patience:g} s:\n{out}{err}") from None
    return process.returncode, out, err


def waited_for(path: Path, text: str, process: subprocess.Popen[str], patience: float = 300.0) -> None:
    """Until a file has the text, while the process runs."""
    end = time.monotonic() + patience
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} does not get {text!r}"
        time.sleep(0.2)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

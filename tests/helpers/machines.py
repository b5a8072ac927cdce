"""Two machines on one: network namespaces, joined by a cable of a given speed. Needs Linux, iproute2 and root."""

from __future__ import annotations

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

ADDRESSES = ("10.177.0.1", "10.177.0.2")
PORT = "29571"


class Machine:
    """One side of the cable."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.device = number, f"zp{os.getpid()}-{number}", f"zpv{number}"

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
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Skips, with the reason, where there can be none."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("two machines need iproute2: ip and tc are not installed")
    machines = Machine(0), Machine(1)
    try:
        try:
            for machine in machines:
                _ip("netns", "add", machine.name)
            _ip("link", "add", machines[0].device, "netns", machines[0].name, "type", "veth", "peer", "name",
                machines[1].device, "netns", machines[1].name)  # fmt: skip
            for machine, address in zip(machines, ADDRESSES, strict=True):
                _ip("-n", machine.name, "addr", "add", f"{address}/24", "dev", machine.device)
                for device in ("lo", machine.device):
                    _ip("-n", machine.name, "link", "set", device, "up")
                machine.speed("1gbit")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip() or error}")
        yield machines
    finally:
        for machine in machines:
            if subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True).returncode == 0:
                machine.switch_off()
                subprocess.run(["ip", "netns", "del", machine.name], check=False)


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

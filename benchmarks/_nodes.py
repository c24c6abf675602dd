# SPDX-License-Identifier: Apache-2.0
"""Nodes on one machine: network namespaces joined by links of a given speed.

Every node is a namespace with one network card; the cards meet in a switch, which is
a namespace of its own. Both directions of each card go through a token bucket. The
machine's own network is not touched. Needs root and iproute2, Linux only.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

_NETNS = Path("/etc/netns")


class Nodes:
    """The nodes, as a context manager that leaves nothing behind."""

    def __init__(self, count: int, megabits: float):
        self.count = count
        self.megabits = megabits
        tag = f"npu{os.getpid() % 100000}"
        self.switch = f"{tag}s"
        self.names = [f"{tag}n{i}" for i in range(count)]
        self.addresses = [f"10.201.7.{i + 1}" for i in range(count)]

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def inside(self, node: int) -> list[str]:
        """What to put before a command that shall run on a node."""
        return ["ip", "netns", "exec", self.names[node]]

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        in_switch = ["ip", "-n", self.switch]
        _run(*in_switch, "link", "add", "name", "hub", "type", "bridge")
        _run(*in_switch, "link", "set", "hub", "up")
        for i, (name, address) in enumerate(
            zip(self.names, self.addresses, strict=True)
        ):
            _run("ip", "netns", "add", name)
            port, node = f"port{i}", ["ip", "-n", name]
            peer = ["peer", "name", "card", "netns", name]
            _run(*in_switch, "link", "add", "name", port, "type", "veth", *peer)
            _run(*in_switch, "link", "set", port, "master", "hub", "up")
            _run(*node, "addr", "add", f"{address}/24", "dev", "card")
            _run(*node, "link", "set", "card", "up")
            _run(*node, "link", "set", "lo", "up")
            self._limit(self.switch, port)
            self._limit(name, "card")
            self._name_the_host(name, address)

    def _limit(self, namespace: str, device: str) -> None:
        rate = ["rate", f"{self.megabits}mbit", "burst", "64kb", "latency", "400ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def _name_the_host(self, name: str, address: str) -> None:
        """Gloo listens on the address that the host name stands for."""
        folder = _NETNS / name
        folder.mkdir(parents=True)
        hosts = f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n"
        (folder / "hosts").write_text(hosts)

    def remove(self) -> None:
        """Removes the namespaces; their cards and limits go with them."""
        for name in (*self.names, self.switch):
            if name in namespaces():
                _run("ip", "netns", "del", name)
            shutil.rmtree(_NETNS / name, ignore_errors=True)


def namespaces() -> list[str]:
    """The names of all network namespaces."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

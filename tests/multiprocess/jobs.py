# SPDX-License-Identifier: Apache-2.0
"""Jobs of several processes that end when they should, whatever happens.

Nothing here imports JAX.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
_MARK = "OPTAX_NPU_JOB"


class Ended(NamedTuple):
    """A process that ended: its exit status (-9: killed) and what it printed."""

    returncode: int
    output: str


class Job:
    """Processes that run side by side; leaving the block ends all that is left.

    Every process carries a mark in its environment, which its children inherit. So the
    children of a launcher that died are found too, and nothing else is.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path,
        env: Mapping[str, str] | None = None,
    ):
        self.commands = commands
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.env = {**clean_environment(), **(env or {}), _MARK: self.mark}
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for i, command in enumerate(self.commands):
                with open(self._log(i), "wb") as log:
                    started = subprocess.Popen(
                        list(command),
                        cwd=ROOT,
                        env=self.env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                self.processes.append(started)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, seconds: float) -> list[Ended]:
        """All processes, once they have ended by themselves.

        Raises:
          TimeoutError: One has not, with the last lines of all of them.
        """
        limit = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"Not ended after {seconds:.0f} s.\n{self.tails()}"
                ) from None
        return [
            Ended(process.returncode, self._output(i))
            for i, process in enumerate(self.processes)
        ]

    def succeed(self, seconds: float) -> list[str]:
        """What the processes printed; all of them must end with status 0."""
        ended = self.wait(seconds)
        assert all(e.returncode == 0 for e in ended), self.tails()
        return [e.output for e in ended]

    def end(self) -> None:
        """Ends every process of the job by its id, and waits until it is gone."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        while self.alive():  # children of a launcher: killed, not yet gone
            time.sleep(0.01)

    def alive(self) -> list[int]:
        """The ids of the processes of this job that are running."""
        wanted = f"{_MARK}={self.mark}".encode()
        return [pid for pid in _pids() if wanted in _environment(pid)]

    def tails(self, lines: int = 30) -> str:
        """The last lines of every process, for messages."""
        return "\n".join(
            f"--- process {i}, status {process.poll()}\n"
            + "\n".join(self._output(i).splitlines()[-lines:])
            for i, process in enumerate(self.processes)
        )

    def _log(self, i: int) -> Path:
        return self.folder / f"process{i}.log"

    def _output(self, i: int) -> str:
        return self._log(i).read_text(errors="replace")


def _pids() -> list[int]:
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    ]


def _environment(pid: int) -> list[bytes]:
    """The environment of a process; empty if it is gone (or a zombie)."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def clean_environment() -> dict[str, str]:
    """Ours, without what would tell a process about devices, launchers or tests."""
    drop = ("XLA_", "JAX_", "OMPI_", "PMIX_", "SLURM_", "PYTEST_", "COV_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return {**env, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port that nobody listens on, outside of the range that clients draw from."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1 between 20000 and 32000")

# SPDX-License-Identifier: Apache-2.0
"""One process of a job: `python -m tests.multiprocess.worker TASK OPTIONS`."""

import argparse
import ctypes
import signal
import sys
import warnings
from pathlib import Path

import jax

DEVICES = 2
# A process that is silent for so long is dead; the others then end too.
HEARTBEAT_SECONDS = 8


def end_with_parent() -> None:
    """Linux kills this process when the test that started it dies."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["check", "train"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--coordinator",
        nargs=3,
        metavar=("ADDRESS", "PROCESSES", "ID"),
        help="by default found by JAX in what a launcher says",
    )
    parser.add_argument("--die-at", type=int, help="the step at which ...")
    parser.add_argument("--victim", type=int, help="... this process is killed")
    options = parser.parse_args()
    end_with_parent()
    found = options.coordinator or []
    found = [*found[:1], *map(int, found[1:])]
    warnings.simplefilter("error")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(
        *found,
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=HEARTBEAT_SECONDS,
    )
    from tests.multiprocess import checks, training

    if options.task == "check":
        checks.run(options.out)
    training.run(options.out, options.die_at, options.victim)


if __name__ == "__main__":
    main()

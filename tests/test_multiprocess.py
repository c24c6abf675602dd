# SPDX-License-Identifier: Apache-2.0
"""Two and four real processes of two devices each, joined by Gloo on this machine."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import optax_npu
from tests.multiprocess import checks, training
from tests.multiprocess.jobs import Job, free_port
from tests.multiprocess.worker import DEVICES

pytestmark = pytest.mark.multiprocess

# The slowest job takes 15 s on two free cores.
JOB_SECONDS = 150
WORKER = (sys.executable, "-m", "tests.multiprocess.worker")


def job(folder: Path, processes: int, task: str, *more: object) -> Job:
    """`processes` workers that find each other on a free port."""
    address = f"127.0.0.1:{free_port()}"
    found = [(address, str(processes), str(i)) for i in range(processes)]
    more = (task, "--out", folder, *more)
    commands = [(*WORKER, *map(str, more), "--coordinator", *place) for place in found]
    return Job(commands, folder)


def records(folder: Path, process: int) -> dict[str, np.ndarray]:
    with np.load(folder / f"records{process}.npz") as data:
        return dict(data)


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """A few units in the last place: sums in another order, over eight steps."""
    for name, x in got.items():
        ulp = np.finfo(x.dtype).eps if x.dtype.kind == "f" else 0
        size = np.abs(want[name]).max()
        atol = 8 * ulp * size if np.isfinite(size) else 0
        np.testing.assert_allclose(x, want[name], rtol=0, atol=atol, err_msg=name)


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == want[name].dtype
        assert x.tobytes() == want[name].tobytes(), name


def one_process(processes: int) -> dict[str, np.ndarray]:
    """The same run on simulated devices of this process."""
    devices = jax.devices()[: DEVICES * processes]
    return training.train(optax_npu.two_level_mesh(devices, devices_per_node=DEVICES))


def mpirun(processes: int) -> list[str]:
    """Open MPI's launcher, as the test extra installs it."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun: install the test extra, or Open MPI 4")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [found, *root, "--oversubscribe", "-n", str(processes)]


def check_results(folder: Path, processes: int) -> None:
    """Sums, means and drift were checked by every process."""
    want = ["check_mesh", "check_reductions", "check_pmap", "check_drift"]
    for i in range(processes):
        assert json.loads((folder / f"passed{i}.json").read_text()) == want


def check_same_bits(folder: Path, processes: int) -> None:
    """All processes hold the same parameters and loss scale after every step."""
    first = records(folder, 0)
    assert len(first) == training.STEPS * 7
    for i in range(1, processes):
        assert_same_bits(records(folder, i), first)


def check_skip(folder: Path) -> None:
    """One device of one process overflowed, and nobody moved in that step."""
    rows, bad = records(folder, 0), training.BAD_STEP
    skipped = [int(rows[f"{i}/skipped"]) for i in range(training.STEPS)]
    assert skipped == [0, 0, 0, 1, 1, 1, 1, 1]
    # Growth after three good steps, half on the bad one, growth again three later.
    scales = [float(rows[f"{i}/scale"]) for i in range(training.STEPS)]
    assert scales == [1024, 1024, 2048, 1024, 1024, 1024, 2048, 2048]
    for name in training.initial_params():
        before, after = rows[f"{bad - 1}/{name}"], rows[f"{bad}/{name}"]
        assert before.tobytes() == after.tobytes()
        assert (rows[f"{bad + 1}/{name}"] != after).any()


@pytest.mark.parametrize("processes", [2, 4], ids=["2-by-mpirun", "4-by-address"])
def test_many_processes_reduce_right_and_train_like_one(processes, tmp_path):
    started = job(tmp_path, processes, "check")
    if processes == 2:
        command = [*mpirun(2), *WORKER, "check", "--out", str(tmp_path)]
        started = Job([command], tmp_path)
    with started as running:
        running.succeed(JOB_SECONDS)
        assert not running.alive()
    check_results(tmp_path, processes)
    check_same_bits(tmp_path, processes)
    check_skip(tmp_path)
    got, want = records(tmp_path, 0), one_process(processes)
    assert got.keys() == want.keys()
    assert_close(got, want)


def test_gloo_in_one_process_gets_no_reduce_scatter_either(monkeypatch):
    mesh = optax_npu.two_level_mesh(devices_per_node=4)
    reduction = checks.REDUCTIONS["psum unchecked, in buckets"]
    assert "reduce-scatter" in reduction.compiled(mesh).as_text()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    program = reduction.compiled(mesh)
    assert "reduce-scatter" not in program.as_text()
    for key, leaf in program().items():
        np.testing.assert_array_equal(np.asarray(leaf), reduction.expected(8)[key])


def test_gloo_gets_large_messages_between_nodes_in_pieces(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    mesh = optax_npu.two_level_mesh(devices_per_node=4)
    reduction = checks.REDUCTIONS["pmean checked, bfloat16 between nodes"]
    program = reduction.compiled(mesh)
    rows = optax_npu.schedule_report(program, devices_per_node=4).rows
    sent = [row.bytes for row in rows if row.level == "inter"]
    share = checks.BIG // 4 * 2  # bytes of bfloat16 in one device's share
    assert len(sent) > 8
    assert max(sent) < share // 2
    for key, leaf in program().items():
        np.testing.assert_array_equal(np.asarray(leaf), reduction.expected(8)[key])


DIE_AT = 5


def run_until_killed(folder: Path, victim: int) -> None:
    """Process `victim` dies in a step; the other must end, and say why."""
    arguments = ("--die-at", DIE_AT, "--victim", victim)
    with job(folder, 2, "train", *arguments) as killed:
        ended = killed.wait(JOB_SECONDS)
        assert not killed.alive()
    assert ended[victim].returncode == -signal.SIGKILL
    other = ended[1 - victim]
    assert other.returncode not in (0, -signal.SIGKILL)
    assert any(
        reason in other.output
        for reason in ("another task died", "Connection reset", "Connection closed")
    ), killed.tails()
    step, _ = training.load(folder / "checkpoint.npz", training.initial_carry())
    assert step == DIE_AT


def test_a_job_whose_coordinator_is_killed_ends(tmp_path):
    run_until_killed(tmp_path, victim=0)


def test_a_job_with_a_killed_process_ends_and_its_checkpoint_resumes(tmp_path):
    run_until_killed(tmp_path, victim=1)
    with job(tmp_path, 2, "train") as resumed:
        resumed.succeed(JOB_SECONDS)
    rows = records(tmp_path, 0)
    assert {int(name.split("/")[0]) for name in rows} == {5, 6, 7}
    assert_same_bits(records(tmp_path, 1), rows)
    assert_close(rows, one_process(2))


BERT = ["examples/bert_pretrain.py", "--distributed", "--tailing", "--save-every=10"]
BERT += ["--corpus=LICENSE", "--vocab-size=300", "--batch-size=16", "--length=16"]
BERT += ["--layers=1", "--hidden=32", "--steps=10", "--warmup=4"]
BERT += ["--init-loss-scale=2**17"]


def bert(launcher: list[str], out: Path) -> tuple[np.ndarray, Any]:
    """The lines of metrics.csv, and the last checkpoint."""
    command = [*launcher, sys.executable, *BERT, "--out", str(out)]
    with Job([command], out.with_suffix(".logs")) as launched:
        launched.succeed(JOB_SECONDS)
        assert not launched.alive()
    rows = np.loadtxt(out / "metrics.csv", np.float32, delimiter=",", skiprows=1)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = (out / "checkpoints" / "10" / "state").absolute()
    with ocp.StandardCheckpointer() as checkpoints:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            checkpoints.metadata(saved).item_metadata,
        )
        return rows, jax.tree.map(np.asarray, checkpoints.restore(saved, shapes))


def test_the_bert_job_runs_unchanged_under_mpirun(tmp_path):
    got, state = bert(mpirun(2), tmp_path / "two")
    want, expected = bert([], tmp_path / "one")
    # Step, loss scale, applied, skipped: two overflows, then training.
    np.testing.assert_array_equal(got[:, [0, 2, 3, 4]], want[:, [0, 2, 3, 4]])
    assert got[:, 3].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=4 * 2**-23)
    flat = {
        jax.tree_util.keystr(path): (x, y)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(state),
            jax.tree.leaves(expected),
            strict=True,
        )
    }
    got, want = ({k: pair[i] for k, pair in flat.items()} for i in (0, 1))
    assert_close(got, want)


SLEEPS = (sys.executable, "-c", "import time; print('begun'); time.sleep(600)")


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_a_job_leaves_no_process_behind_when_a_test_fails(tmp_path):
    running = Job([SLEEPS, ("sh", "-c", shlex.join(SLEEPS) + " & wait")], tmp_path)

    def failing_test() -> None:
        with running:
            wait_until(lambda: len(running.alive()) == 3)  # the shell has a child
            raise RuntimeError("test failed")

    with pytest.raises(RuntimeError, match="test failed"):
        failing_test()
    assert not running.alive()
    assert [p.returncode for p in running.processes] == [-signal.SIGKILL] * 2


def test_a_job_that_hangs_is_ended_and_says_what_it_printed(tmp_path):
    with Job([SLEEPS], tmp_path) as running:
        wait_until(lambda: "begun" in running.tails())
        with pytest.raises(TimeoutError, match=r"Not ended after 0 s(?s:.*)begun"):
            running.wait(0)
    assert not running.alive()


def test_a_command_that_does_not_start_ends_the_others(tmp_path):
    running = Job([SLEEPS, (str(tmp_path / "no-such-program"),)], tmp_path)
    with pytest.raises(FileNotFoundError), running:
        pass
    assert not running.alive()

# SPDX-License-Identifier: Apache-2.0
"""The main job: pre-training, overflow, resuming, stopping, and bad input."""

import argparse
import csv
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import optax_npu
from examples.bert import cli, data, metrics, model, plot, train
from examples.bert.options import Options

ROOT = Path(__file__).parent.parent
TEXT = Path(argparse.__file__)  # real text, about 100 kB, on every machine
SMALL = (
    "--layers=1 --hidden=16 --heads=2 --length=16 --batch-size=8 --vocab-size=300"
    f" --warmup=4 --corpus={TEXT}"
).split()
# Overflows on its first steps and trains on the later ones.
OVERFLOWING = [*SMALL, "--init-loss-scale=2**19", "--loss-scale-interval=3"]
STEPS = 12
CACHE = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.01,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def run(out: Path, *arguments: str) -> int:
    return cli.main([f"--out={out}", *arguments])


def arrays(out: Path, step: int) -> list[np.ndarray]:
    """All arrays of a checkpoint, read without the example's own code."""
    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore((out / "checkpoints" / str(step) / "state").absolute())
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same_bits(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert len(left) == len(right) > 10
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, str]:
    """Every file and its hash."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """What one run compiled serves the others; the programs are the same."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CACHE.items():
            patch.setenv(name.upper(), str(value or folder))  # for other processes
            before = getattr(jax.config, name)
            jax.config.update(name, value or folder)
            patch.setitem(CACHE, name, before)
        compilation_cache.reset_cache()
        yield
        for name, value in CACHE.items():
            jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawn once, in `straight`, and looked at there."""
    monkeypatch.setattr(plot, "draw", lambda *_: None)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert run(out, *OVERFLOWING, f"--steps={STEPS}") == 0
    return out


@pytest.fixture
def half(straight, tmp_path_factory) -> Path:
    """A run of half the steps; tests change it, so each gets a copy."""
    source = straight.parent / "half"
    if not source.exists():
        assert run(source, *OVERFLOWING, f"--steps={STEPS // 2}") == 0
    copy = tmp_path_factory.mktemp("half") / "run"
    shutil.copytree(source, copy)
    return copy


# Data


@pytest.mark.parametrize("size", [258, 300])
def test_tokens_spell_the_text(size):
    text = TEXT.read_bytes() + "naïve ☃ \r\n\t\x7f  \n\n    x=1".encode()
    pieces = data._PIECE.findall(text)
    vocab = data.make_vocab(pieces, size)
    tokens = data.encode(pieces, vocab)
    assert len(vocab) == len(set(vocab)) == size
    assert b"".join(vocab[t] for t in tokens) == text
    assert data.MASK not in tokens


def test_held_out_text_is_not_trained_on():
    corpus = data.load_corpus(str(TEXT), 300, 16)
    pieces = data._PIECE.findall(TEXT.read_bytes())
    everything = data.encode(pieces, corpus.vocab)
    assert corpus.train.size + corpus.held_out.size == everything.size
    assert 0.04 < corpus.held_out.size / everything.size < 0.06


def test_a_batch_is_a_function_of_its_key_and_its_rows():
    tokens = np.arange(1000, dtype=np.int32) + 300
    whole = data.make_batch(tokens, (0, 0, 7), slice(None), 8, 20)
    halves = [
        data.make_batch(tokens, (0, 0, 7), r, 8, 20) for r in (slice(4), slice(4, 8))
    ]
    for full, parts in zip(whole, zip(*halves, strict=True), strict=True):
        np.testing.assert_array_equal(full, np.concatenate(parts))
    other = data.make_batch(tokens, (0, 0, 8), slice(None), 8, 20)
    assert (other.targets != whole.targets).any()
    # 15 % of 20 places are hidden, and the text around them is what it was.
    assert whole.places.shape == (8, 3)
    assert (np.take_along_axis(whole.tokens, whole.places, 1) == data.MASK).all()
    restored = whole.tokens.copy()
    np.put_along_axis(restored, whole.places, whole.targets, 1)
    assert (np.diff(restored, axis=1) == 1).all()


def test_unigram_entropy_by_hand():
    assert data.unigram_entropy(np.arange(4)) == pytest.approx(math.log(4))
    # Shares 1/2, 1/4, 1/4.
    tokens = np.array([5, 5, 9, 7])
    assert data.unigram_entropy(tokens) == pytest.approx(1.5 * math.log(2))


# Model and optimizer


@pytest.fixture(scope="module")
def bert():
    options = Options(vocab_size=300, length=16, layers=1, hidden=16, heads=2)
    net = train.make_model(options)
    params = train.init_state(net, train.make_optimizer(options), 0, None).params
    tokens = data.load_corpus(str(TEXT), 300, 16).train
    batch = data.make_batch(tokens, (0, 0, 0), slice(None), 8, 16)

    def scaled(params, scale):
        loss = model.loss_fn(net, params, batch)
        return loss * scale, loss

    return params, jax.jit(jax.grad(scaled, has_aux=True))


def _products(jaxpr):
    """The dtypes of all matrix products, also inside of calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.outvars[0].aval.dtype
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _products(inner.jaxpr)


def test_float32_parameters_float16_compute(bert):
    params, grad = bert
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    products = list(_products(jax.make_jaxpr(grad)(params, 1.0).jaxpr))
    # Query, key, value, scores, sums, out; up, down; head, output: there, and back
    # to both factors.
    assert len(products) == 3 * 10
    assert set(products) == {jnp.dtype(jnp.float16)}


@pytest.mark.parametrize(("scale", "finite"), [(2.0**30, False), (2.0**8, True)])
def test_the_overflow_is_a_real_one_of_float16(bert, scale, finite):
    params, grad = bert
    grads, loss = grad(params, scale)
    leaves = jax.device_get(jax.tree.leaves(grads))
    assert all(np.isfinite(x).all() for x in leaves) is finite
    # The loss itself is fine: an untrained model guesses among all tokens alike.
    assert abs(loss - math.log(300)) < 0.3


def test_layer_norms_and_biases_do_not_decay(bert):
    mask = optax_npu.exclude_from_weight_decay("LayerNorm", "layer_norm", "bias")
    flat = jax.tree_util.tree_leaves_with_path(mask(bert[0]))
    names = [
        jax.tree_util.keystr(p, simple=True, separator="/") for p, on in flat if on
    ]
    assert set(names) == {
        "word/embedding",
        "position",
        "head/kernel",
        "layer_0/up/kernel",
        "layer_0/down/kernel",
        *(f"layer_0/attention/{n}/kernel" for n in ("query", "key", "value", "out")),
    }


# Runs


def test_a_run_leaves_plot_metrics_and_checkpoints(straight, capsys):
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.stat().st_size > 0 for p in (straight / "tensorboard").iterdir()] == [
        True
    ]
    steps = sorted(int(p.name) for p in (straight / "checkpoints").iterdir())
    assert steps == [0, STEPS]
    table = rows(straight)
    assert [int(row["step"]) for row in table] == list(range(1, STEPS + 1))
    assert table[0]["loss_scale"] == str(2.0**19)
    applied = [int(row["applied"]) for row in table]
    assert applied[0] == 0
    assert 0 < sum(applied) < STEPS
    assert int(table[-1]["skipped_steps"]) == STEPS - sum(applied)
    scales = [float(row["loss_scale"]) for row in table]
    for before, after, good in zip(scales, scales[1:], applied, strict=False):
        assert after in ((before, 2 * before) if good else (before / 2,))
    # It says the same, and names the folder.
    assert run(straight, "--resume", f"--steps={STEPS}") == 0
    said = capsys.readouterr().out
    assert f"skipped steps: {STEPS - sum(applied)} of {STEPS}" in said
    assert "final loss" in said
    assert "unigram entropy" in said
    assert str(straight) in said


def test_skipped_steps_leave_no_trace(tmp_path):
    out = tmp_path / "run"
    assert run(out, *OVERFLOWING, "--steps=2") == 0
    assert [row["applied"] for row in rows(out)] == ["0", "0"]
    pairs = list(zip(arrays(out, 0), arrays(out, 2), strict=True))
    changed = [(a, b) for a, b in pairs if a.tobytes() != b.tobytes()]
    # The loss scale and its counters, but nothing of the parameters or of LAMB.
    assert 0 < len(changed) <= 4
    assert all(a.shape == () for a, _ in changed)
    assert (2.0**19, 2.0**17) in [(float(a), float(b)) for a, b in changed]


def test_resume_is_bit_identical(straight, half):
    assert len(rows(half)) == STEPS // 2
    assert run(half, "--resume", f"--steps={STEPS}") == 0
    assert_same_bits(arrays(half, STEPS), arrays(straight, STEPS))
    assert (half / "metrics.csv").read_bytes() == (
        straight / "metrics.csv"
    ).read_bytes()


def test_a_finished_run_goes_on_for_as_long_again(straight, half):
    assert run(half, "--resume") == 0
    assert_same_bits(arrays(half, STEPS), arrays(straight, STEPS))


def test_steps_that_no_checkpoint_holds_are_written_anew(straight, half):
    # What a killed process leaves: rows after the last checkpoint, the last one torn.
    with (half / "metrics.csv").open("a") as file:
        file.write("7,9.5,1.0,1,0\n8,9.")
    assert run(half, "--resume", f"--steps={STEPS}") == 0
    assert (half / "metrics.csv").read_bytes() == (
        straight / "metrics.csv"
    ).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(straight, half, number, monkeypatch, capfd):
    write, before = metrics.Log.write, signal.getsignal(number)

    def interrupted(self, step, told):
        write(self, step, told)
        if step == 9:
            signal.raise_signal(number)

    monkeypatch.setattr(metrics.Log, "write", interrupted)
    assert run(half, "--resume", f"--steps={STEPS}") == 0
    said = capfd.readouterr().out
    assert f"stopped and saved at step 9 of {STEPS}" in said
    assert f"--out {half} --resume" in said
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    assert len(rows(half)) == 9
    assert run(half, "--resume") == 0  # to the end that was asked for
    assert_same_bits(arrays(half, STEPS), arrays(straight, STEPS))


def test_a_second_ctrl_c_stops_at_once(half, monkeypatch, capfd):
    def twice(self, step, told):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)  # Python runs the first handler, so that signals do not merge
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(metrics.Log, "write", twice)
    assert run(half, "--resume", f"--steps={STEPS}") == 130
    assert "Traceback" not in capfd.readouterr().err
    steps = sorted(int(p.name) for p in (half / "checkpoints").iterdir())
    assert steps == [0, STEPS // 2]


def test_loss_scale_off(tmp_path):
    out = tmp_path / "run"
    assert run(out, *SMALL, "--loss-scale=off", "--steps=2") == 0
    assert [(row["applied"], row["loss_scale"]) for row in rows(out)] == [
        ("1", "1.0")
    ] * 2


def test_a_fixed_scale_that_only_overflows_ends_the_run(tmp_path, capfd):
    out = tmp_path / "run"
    arguments = [*SMALL, "--loss-scale=fixed", "--init-loss-scale=2**40"]
    assert run(out, *arguments) == 1
    assert "steps were all skipped" in capfd.readouterr().err.splitlines()[-1]
    table = rows(out)
    assert 50 < len(table) <= 100
    assert {(row["applied"], row["loss_scale"]) for row in table} == {
        ("0", str(2.0**40))
    }


# Eight devices


def test_eight_devices_in_a_process_of_their_own_and_resumed(straight, tmp_path):
    distributed = [*OVERFLOWING, "--distributed", "--tailing"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "examples/bert_pretrain.py", f"--out={whole}"]
    done = subprocess.run(
        [*script, *distributed, f"--steps={STEPS}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "8 devices" in done.stdout
    assert run(half, *distributed, f"--steps={STEPS // 2}") == 0
    assert run(half, "--resume", f"--steps={STEPS}") == 0
    assert (half / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert_same_bits(arrays(half, STEPS), arrays(whole, STEPS))
    table = rows(half)
    assert {row["applied"] for row in table} == {"0", "1"}
    # The same batch and parameters on one device: the same loss.
    assert float(table[0]["loss"]) == pytest.approx(
        float(rows(straight)[0]["loss"]), rel=1e-3
    )


# Bad input


def one_line(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("bert_pretrain.py: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--corpus=/no/such/text"], "cannot read corpus /no/such/text"),
        (["--corpus=EMPTY"], "holds no text"),
        (["--corpus=FOLDER"], "holds no text"),
        (["--corpus=BINARY"], "is not text"),
        (["--corpus=SHORT"], "is too small"),
        (["--steps=0"], "'0' is not a whole number above 0"),
        (["--lr=nan"], "'nan' is not a number above 0"),
        (["--init-loss-scale=2**200"], "'2**200' is not a finite number"),
        (["--init-loss-scale=much"], "'much' is not a finite number"),
        (["--loss-scale=fixed", "--init-loss-scale=0.5"], "at least 1"),
        (["--seed=-1"], "'-1' is not a whole number"),
        (["--dtype=int8"], "invalid choice"),
        (["--vocab-size=257"], "at least 258"),
        (["--hidden=30", "--heads=4"], "not a multiple"),
        (["--tailing"], "needs --distributed"),
        (["--distributed", "--batch-size=12"], "over 8 devices"),
        (["--surprise"], "unrecognized arguments: --surprise"),
        (["--resume"], "nothing to resume"),
    ],
    ids=lambda x: "".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_told_in_one_line(tmp_path, arguments, told, capsys):
    texts = tmp_path / "texts"
    (texts / "FOLDER").mkdir(parents=True)
    (texts / "EMPTY").write_text(" \n")
    (texts / "BINARY").write_bytes(b"\x7fELF\0\0")
    (texts / "SHORT").write_text("to be or not to be\n" * 9)
    arguments = [
        a.replace("--corpus=", f"--corpus={texts}/", "/" not in a) for a in arguments
    ]
    arguments = [a.replace(f"{texts}//no", "/no") for a in arguments]
    assert run(tmp_path / "run", *SMALL, *arguments) == 2
    assert told in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten(half, tmp_path, capsys):
    before = contents(half)
    assert run(half, *OVERFLOWING) == 2
    assert "--resume goes on with it" in one_line(capsys)
    assert contents(half) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert run(other, *OVERFLOWING) == 2
    assert "not an empty folder" in one_line(capsys)
    assert run(other / "thesis.txt", *OVERFLOWING) == 2
    assert run(other / "thesis.txt" / "run", *OVERFLOWING) == 2
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--batch-size=16"], "had --batch-size 8, not 16"),
        (["--seed=3"], "had --seed 0, not 3"),
        (["--lr=0.5"], "had --lr 0.02, not 0.5"),
        (["--loss-scale=off"], "had --loss-scale dynamic, not off"),
        (["--distributed"], "had --distributed False, not True"),
        ([f"--corpus={json.__file__}"], "is not what the run"),
    ],
    ids=lambda x: "".join(x)[:20] if isinstance(x, list) else "",
)
def test_resume_with_another_configuration(half, arguments, told, capsys):
    before = contents(half)
    assert run(half, "--resume", *arguments) == 2
    assert told in one_line(capsys)
    assert contents(half) == before


def _truncate(out: Path) -> None:
    for path in (out / "checkpoints" / "6" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(out: Path) -> None:
    path = out / "checkpoints" / "6" / "about" / "metadata"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "checksum": "0" * 64}))


def _lose(out: Path) -> None:
    shutil.rmtree(out / "checkpoints" / "6" / "state")


def _lose_all(out: Path) -> None:
    shutil.rmtree(out / "checkpoints")


def _spoil_options(out: Path) -> None:
    (out / "run.json").write_text("{")


def _spoil_metrics(out: Path) -> None:
    (out / "metrics.csv").write_text("step,loss\n1,much\n")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_truncate, "checkpoints/6 is damaged"),
        (_flip, "checkpoints/6 is damaged: the checksum is wrong"),
        (_lose, "checkpoints/6 is damaged"),
        (_lose_all, "no checkpoint in"),
        (_spoil_options, "run.json is damaged"),
        (_spoil_metrics, "metrics.csv line 2 is damaged"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damaged_runs(half, damage, told, capsys):
    damage(half)
    before = contents(half)
    assert run(half, "--resume", f"--steps={STEPS}") == 2
    assert told in one_line(capsys)
    assert contents(half) == before


def test_the_step_before_a_damaged_checkpoint_still_works(straight, half, capsys):
    _truncate(half)
    assert run(half, "--resume", f"--steps={STEPS}") == 2
    assert "move it away to go on from step 0" in one_line(capsys)
    shutil.rmtree(half / "checkpoints" / "6")
    assert run(half, "--resume", f"--steps={STEPS}") == 0
    assert_same_bits(arrays(half, STEPS), arrays(straight, STEPS))

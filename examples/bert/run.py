# SPDX-License-Identifier: Apache-2.0
"""A run from the first step or from a checkpoint to its end, or to Ctrl-C."""

import time
from pathlib import Path
from typing import Any

import jax

import optax_npu

from . import devices, folder, metrics, plot, report, train
from .checkpoint import Checkpoints
from .data import Corpus, load_corpus, unigram_entropy
from .errors import UserError
from .options import Options, merge
from .stop import Stop

_HEALTH_EVERY = 50


def run(given: dict[str, Any]) -> None:
    """Trains as the command line says, and reports.

    Raises:
      UserError: Bad input; nothing was written.
      optax_npu.LossScaleError: Every step overflows, whatever the loss scale.
    """
    out = Path(given.get("out", Options.out))
    about = folder.read_about(out) if given.get("resume") else None
    if about is None:
        folder.refuse_to_overwrite(out)
    options = merge({**given, "out": str(out)}, about.options if about else {})
    corpus = load_corpus(options.corpus, options.vocab_size, options.length)
    if about is not None and corpus.fingerprint != about.fingerprint:
        raise UserError(
            f"the text in {corpus.name} is not what the run in {out} was trained on"
        )
    job = Job(options, out, corpus)
    if about is None:
        job.begin()
    else:
        job.resume(given.get("steps"), about)
    try:
        job.fit()
        job.finish()
    finally:
        job.close()


class Job:
    """A run with its model, its files and the step it has reached."""

    def __init__(self, options: Options, out: Path, corpus: Corpus) -> None:
        self.options, self.out, self.corpus = options, out, corpus
        self.began = time.monotonic()
        self.mesh = devices.start(options.distributed)
        count = 1 if self.mesh is None else self.mesh.size
        if options.batch_size % count:
            raise UserError(
                f"--batch-size {options.batch_size} cannot be split over {count}"
                " devices"
            )
        self.model = train.make_model(options)
        self.tx = train.make_optimizer(options)
        self.train_step = train.make_step(self.model, self.tx, self.mesh)
        self.state = train.init_state(self.model, self.tx, options.seed, self.mesh)
        self.step, self.target = 0, options.steps
        sizes = [x.size for x in jax.tree.leaves(self.state.params)]
        self.say(report.headline(options, corpus, sum(sizes), count))

    def begin(self) -> None:
        """Makes the folder, with a checkpoint of step 0."""
        self._open_log()
        self.checkpoints = Checkpoints(self.out / "checkpoints")
        self.checkpoints.save(0, self.state)

    def resume(self, steps: int | None, about: folder.About) -> None:
        """Reads the newest checkpoint; nothing is written before that worked."""
        self.checkpoints = Checkpoints(self.out / "checkpoints")
        self.step, self.state = self.checkpoints.restore(self.state)
        self.target = folder.new_target(self.step, steps, about)
        self._open_log()
        self.say(f"resumed at step {self.step} of {self.target}")

    def _open_log(self) -> None:
        if devices.is_first():
            self.out.mkdir(parents=True, exist_ok=True)
            self.log = metrics.Log(self.out, self.step)
            folder.write_about(
                self.out, self.options, self.target, self.corpus.fingerprint
            )

    def fit(self) -> None:
        """Steps until the target or a signal; saves on the way and at the end."""
        saved = self.step
        bar = report.progress_bar(self.step, self.target, devices.is_first())
        with bar, Stop() as stop:
            while self.step < self.target and not stop.agreed():
                told = self._advance()
                if devices.is_first():
                    self.log.write(self.step, told)
                bar.set_postfix_str(report.postfix(told), refresh=False)
                bar.update()
                if self.step % _HEALTH_EVERY == 0:
                    optax_npu.check_health(self.state.opt_state)
                if self.step % self.options.save_every == 0:
                    self.checkpoints.save(self.step, self.state)
                    saved = self.step
            if saved != self.step:
                self.checkpoints.save(self.step, self.state)

    def _advance(self) -> train.Metrics:
        options = self.options
        batch = train.feed(
            self.corpus.train,
            (options.seed, 0, self.step),
            options.batch_size,
            options.length,
            self.mesh,
        )
        self.state, told = self.train_step(self.state, batch)
        self.step += 1
        return jax.device_get(told)

    def finish(self) -> None:
        """The picture, the numbers, and how to go on."""
        go_on = f"go on with: {report.resume_command(self.out)}"
        held_out = None
        if self.step < self.target:  # said first: a scheduler may not wait for more
            self.say(f"stopped and saved at step {self.step} of {self.target}\n{go_on}")
        else:
            held_out = self._evaluate()
        rows = metrics.read(metrics.csv_path(self.out)) if devices.is_first() else []
        if rows:
            entropy = unigram_entropy(self.corpus.train)
            plot.draw(self.out / "loss.png", rows, entropy, held_out, self.options)
            seconds = time.monotonic() - self.began
            self.say(report.summary(self.out, rows, entropy, held_out, seconds))
        if held_out:
            self.say(go_on)

    def _evaluate(self) -> train.Evaluation:
        return train.evaluate(
            self.model, self.state.params, self.corpus, self.options, self.mesh
        )

    def say(self, text: str) -> None:
        """Prints once, however many processes there are."""
        if devices.is_first():
            print(text, flush=True)

    def close(self) -> None:
        """Closes the files."""
        if devices.is_first():
            self.log.close()
        self.checkpoints.close()

# SPDX-License-Identifier: Apache-2.0
"""The options of a run: defaults, what was asked for, what a checkpoint remembers."""

import argparse
import dataclasses
import math
from typing import Any, NoReturn

from .errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that decides a run. The defaults take minutes on two CPU cores."""

    corpus: str | None = None
    out: str = "runs/bert"
    steps: int = 1000
    batch_size: int = 32
    length: int = 64
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    vocab_size: int = 2048
    lr: float = 0.02
    warmup: int = 50
    weight_decay: float = 0.01
    dtype: str = "float16"
    seed: int = 0
    loss_scale: str = "dynamic"
    init_loss_scale: float = 2.0**24
    loss_scale_interval: int = 100
    distributed: bool = False
    tailing: bool = False
    save_every: int = 200
    resume: bool = False


# What may differ between a run and its continuation.
FREE = {"corpus", "out", "steps", "save_every", "resume"}


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")


def parse(arguments: list[str] | None) -> dict[str, Any]:
    """The options given on the command line, and only those."""
    parser = Parser(
        prog="bert_pretrain.py",
        description="Pre-trains a small BERT on real text in half precision, with LAMB"
        " and a loss scale that skips overflows. Ctrl-C saves and stops.",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--corpus", metavar="PATH", help=_CORPUS)
    add("--out", metavar="DIR", help=_help("folder for everything written", "out"))
    add("--resume", action="store_true", help=_RESUME)
    add("--steps", type=_count, metavar="N", help=_STEPS)
    for name, what in _COUNTS.items():
        add(f"--{name}", type=_count, metavar="N", help=_help(what, name))
    add("--lr", type=_positive, metavar="X", help=_help("LAMB's at its peak", "lr"))
    what = _help("LAMB's; not of biases and layer norms", "weight_decay")
    add("--weight-decay", type=_not_negative, metavar="X", help=what)
    add("--seed", type=_natural, metavar="N", help=_help("for everything", "seed"))
    what = _help("of compute; parameters stay float32", "dtype")
    add("--dtype", choices=("float16", "bfloat16", "float32"), help=what)
    what = _help("fixed and dynamic skip overflows", "loss_scale")
    add("--loss-scale", choices=("off", "fixed", "dynamic"), help=what)
    what = "where it starts, like 65536 or 2**16 (default: 2**24)"
    add("--init-loss-scale", type=_scale, metavar="X", help=what)
    what = "train on 8 simulated devices, or on all that are there"
    add("--distributed", action="store_true", help=what)
    what = "hide updates behind the last all-reduce; needs --distributed"
    add("--tailing", action="store_true", help=what)
    return vars(parser.parse_args(arguments))


_CORPUS = (
    "a text file, or a folder of them (default: the sources and documentation of"
    " Python's standard library)"
)
_RESUME = "go on with the run in --out, with its options"
_STEPS = (
    "train until this step (default: 1000; with --resume the end of the run, or as many"
    " steps again)"
)
_COUNTS = {
    "batch-size": "sequences per step, over all devices",
    "length": "tokens per sequence",
    "layers": "transformer layers",
    "hidden": "width of the model",
    "heads": "attention heads",
    "vocab-size": "words and bytes",
    "warmup": "steps until the learning rate peaks",
    "loss-scale-interval": "good steps until the loss scale doubles",
    "save-every": "steps between checkpoints",
}


def merge(given: dict[str, Any], saved: dict[str, Any] | None) -> Options:
    """Options of a new run, or of one that goes on as it was saved.

    Raises:
      UserError: An option is out of range, or is not what the saved run had.
    """
    saved = saved or {}
    for name, value in given.items():
        if name not in FREE and name in saved and saved[name] != value:
            raise UserError(
                f"the run in {given['out']} had {_flag(name)} {saved[name]}, not"
                f" {value}; leave it out to go on, or start anew in another --out"
            )
    options = Options(**{**saved, **given})
    if options.tailing and not options.distributed:
        raise UserError("--tailing needs --distributed: there is no all-reduce to hide")
    if options.hidden % (2 * options.heads):
        raise UserError(
            f"--hidden {options.hidden} is not a multiple of 2 x --heads"
            f" {options.heads}"
        )
    if options.vocab_size <= 257:
        raise UserError(f"--vocab-size {options.vocab_size}: at least 258 are needed")
    if options.loss_scale == "fixed" and options.init_loss_scale < 1:
        raise UserError(f"--init-loss-scale {options.init_loss_scale}: at least 1")
    return options


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(what: str, default: str) -> str:
    value = getattr(Options, default.replace("-", "_"), default)
    return f"{what} (default: {value})".replace("%", "%%")


def _number(text: str) -> float:
    base, power, exponent = text.partition("**")
    return float(base) ** float(exponent) if power else float(text)


def _checked(convert: Any, good: Any, what: str) -> Any:
    def check(text: str) -> Any:
        try:
            value = convert(text)
            fine = good(value)
        except (ValueError, OverflowError):
            fine = False
        if not fine:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return check


_count = _checked(int, lambda x: 0 < x < 2**31, "a whole number above 0")
_natural = _checked(int, lambda x: 0 <= x < 2**31, "a whole number, 0 or above")
_positive = _checked(float, lambda x: 0 < x < math.inf, "a number above 0")
_not_negative = _checked(float, lambda x: 0 <= x < math.inf, "a number, 0 or above")
_scale = _checked(_number, lambda x: 0 < x < 2.0**128, "a finite number above 0")

# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the training step: what a job needs of `optax_npu`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import optax_npu

from .data import Batch, Corpus, make_batch, unigram_entropy
from .devices import AXES, same_on, split_over
from .model import Bert, BertConfig, loss_fn
from .options import Options

EVALUATED = 1024  # held-out sequences


class State(NamedTuple):
    """What a step changes, and a checkpoint holds."""

    params: Any
    opt_state: Any


class Metrics(NamedTuple):
    """What a step tells, all scalars.

    Attributes:
      loss: Nats per hidden token, not scaled.
      loss_scale: The scale that this step used.
      applied: Whether it was applied; False is a skipped overflow.
      skipped_steps: How many were skipped so far.
    """

    loss: Any
    loss_scale: Any
    applied: Any
    skipped_steps: Any


def make_optimizer(options: Options) -> optax.GradientTransformationExtraArgs:
    """LAMB as in BERT's recipe, inside loss scaling and gradient all-reduce."""
    schedule = _warm_up_then_square_root(options.lr, options.warmup)
    lamb = optax.lamb(
        schedule,
        weight_decay=options.weight_decay,
        mask=optax_npu.exclude_from_weight_decay("LayerNorm", "layer_norm", "bias"),
    )
    return optax_npu.npu_optimizer(
        lamb,
        _make_loss_scale(options),
        is_distributed=options.distributed,
        is_loss_scale=options.loss_scale != "off",
        is_tailing_optimization=options.tailing,
        axis_name=AXES if options.distributed else None,
    )


def _make_loss_scale(options: Options) -> optax_npu.LossScale | None:
    init = options.init_loss_scale
    if options.loss_scale == "dynamic":
        return optax_npu.DynamicLossScale(init, options.loss_scale_interval)
    if options.loss_scale == "fixed":
        return optax_npu.FixedLossScaleManager(init)
    return None


def _warm_up_then_square_root(peak: float, warmup: int) -> optax.Schedule:
    """Knows no last step, so a run can go on for longer than was planned."""

    def schedule(count: Any) -> Any:
        step = count + 1.0
        return peak * jax.numpy.minimum(step / warmup, (warmup / step) ** 0.5)

    return schedule


def make_model(options: Options) -> Bert:
    """The model of the sizes asked for."""
    return Bert(
        BertConfig(
            vocab_size=options.vocab_size,
            length=options.length,
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            dtype=options.dtype,
        )
    )


def init_state(
    model: Bert, tx: optax.GradientTransformation, seed: int, mesh: Mesh | None
) -> State:
    """Fresh parameters and optimizer state, on all devices of the mesh."""
    shape = jax.ShapeDtypeStruct((1, model.config.length), np.int32)

    def init(key: jax.Array) -> State:
        tokens = jax.numpy.zeros(shape.shape, shape.dtype)
        params = model.init(key, tokens, tokens[:, :1])["params"]
        return State(params, tx.init(params))

    return jax.jit(init, out_shardings=same_on(mesh))(jax.random.key(seed))


Step = Callable[[State, Batch], tuple[State, Metrics]]


def make_step(
    model: Bert, tx: optax.GradientTransformationExtraArgs, mesh: Mesh | None
) -> Step:
    """The compiled training step; it may reuse the buffers of the state it is given."""
    axes = None if mesh is None else AXES

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        params, opt_state = state
        grad_fn = optax_npu.scaled_value_and_grad(
            functools.partial(loss_fn, model), opt_state, axis_name=axes
        )
        loss, grads = grad_fn(params, batch)
        scale = optax_npu.get_loss_scale(opt_state)
        params, opt_state = optax_npu.apply_gradients(tx, params, grads, opt_state)
        told = optax_npu.loss_scale_metrics(opt_state)
        metrics = Metrics(
            loss if axes is None else lax.pmean(loss, axes),
            scale,
            told["applied"],
            told["skipped_steps"],
        )
        return State(params, opt_state), metrics

    if mesh is not None:
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(AXES)),
            out_specs=PartitionSpec(),
        )
    return jax.jit(step, donate_argnums=0)


def feed(
    tokens: np.ndarray, key: tuple[int, ...], size: int, length: int, mesh: Mesh | None
) -> Batch:
    """The batch of a key, each process making its own rows."""
    sharding = split_over(mesh)
    share = size // jax.process_count()
    first = share * jax.process_index()
    rows = slice(first, first + share)
    batch = make_batch(tokens, key, rows, size, length)
    if sharding is None:
        return batch
    return Batch(
        *(
            jax.make_array_from_process_local_data(sharding, x, (size, x.shape[1]))
            for x in batch
        )
    )


class Evaluation(NamedTuple):
    """The held-out loss beside the loss of guessing without context, in nats."""

    loss: float
    entropy: float
    tokens: int


def evaluate(
    model: Bert, params: Any, corpus: Corpus, options: Options, mesh: Mesh | None
) -> Evaluation:
    """Loss on text that was never trained on, and the entropy of the same tokens."""
    loss = jax.jit(functools.partial(loss_fn, model))
    size, length = options.batch_size, options.length
    keys = [(options.seed, 1, i) for i in range(max(1, EVALUATED // size))]
    text = corpus.held_out
    losses = [float(loss(params, feed(text, k, size, length, mesh))) for k in keys]
    targets = np.concatenate(
        [make_batch(text, k, slice(None), size, length).targets.ravel() for k in keys]
    )
    return Evaluation(float(np.mean(losses)), unigram_entropy(targets), targets.size)

# SPDX-License-Identifier: Apache-2.0
"""Stages 4 and 7: divide by the scale that scaled this loss, then move the scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_npu._checks import check_state
from optax_npu._compat import AxisNames, as_axis_tuple, match_varying
from optax_npu._loss_scale import as_loss_scale
from optax_npu._overflow import agree, local_overflow
from optax_npu._scale_rule import LossScaleState, repair_scale
from optax_npu._trees import PyTree, compute_dtype, is_inexact, real_dtype


class Inverse(NamedTuple):
    """The reciprocal of a loss scale as two factors, exact for powers of two.

    The reciprocal of 2^127 is subnormal, and flushed to zero on most hardware, so a
    scale above 2^126 is divided out in two steps.

    Attributes:
      first: float32[] or float64[], the reciprocal, or twice the reciprocal.
      second: The same dtype, 1 or 0.5.
    """

    first: jax.Array
    second: jax.Array


class AssumedFinite(NamedTuple):
    """What the gate hands in for a `LossScaleState` when it has tested the step.

    The step is known to be good: no test, no zeros.

    Attributes:
      scaling: The state.
      inverse: The reciprocal of its scale in float32, computed once.
    """

    scaling: LossScaleState
    inverse: Inverse


def assume_finite(scaling: LossScaleState) -> AssumedFinite:
    """Marks a step as tested."""
    return AssumedFinite(scaling, inverse_of(repair_scale(scaling)))


def npu_loss_scale(
    loss_scale: Any = "dynamic", *, axis_name: AxisNames | None = None
) -> optax.GradientTransformationExtraArgs:
    """Takes scaled gradients, returns unscaled ones and moves the loss scale.

    Put it first in a chain, before any clipping: a clip turns inf into a finite
    value and hides the overflow. ::

        chain(npu_loss_scale(), optax.clip_by_global_norm(1.0), optax.lamb(1e-3))

    **On overflow** it returns zeros, so that no non-finite value ever gets through,
    lowers the scale by the rule and counts the skip. An element of a plain
    ``optax.chain`` has no power over its neighbours' state, though: a zero gradient
    still decays moments, advances schedules, and moves LAMB by a full step.
    ``optax_npu.chain`` (or ``skip_on_overflow`` around the finished chain) holds
    everything and is the spelling to use.

    Args:
      loss_scale: A loss scale (``DynamicLossScale(...)``, ``loss_scale_preset(...)``,
        ...), a number (that fixed scale; overflows are skipped), ``"dynamic"``, or
        ``None``: off, with the same state tree.
      axis_name: All mapped axes whose replicas must agree on a skip, data *and*
        model axes: a name or a tuple of names. Leave it out under plain ``jit``.

    Returns:
      A transformation whose state is a ``LossScaleState``. Its ``update`` takes an
      optional extra argument ``found_inf`` (bool[]): an outside overflow flag, such
      as a status register or a saturating cast, OR-ed in before the replicas agree.

      Floating and complex leaves are divided in float32 (float64 stays float64) and
      returned in their own dtype; a float16 or float8 leaf whose parameter is wider
      comes back in the parameter's dtype, because its own would flush the very
      values that the scale has saved. Other leaves pass untouched.

    Raises:
      ValueError: The loss scale is unknown or out of range; at trace time, an axis
        is not bound or one is missing.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax.chain(optax_npu.npu_loss_scale(1024.0), optax.sgd(1.0))
      >>> params = {"w": jnp.zeros(2)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.array([1024.0, 512.0])}, state, params)
      >>> print(updates["w"])
      [-1.  -0.5]

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_; ``tf.mixed_precision`` and Ascend's
      ``NPULossScaleOptimizer`` for the order of unscaling and moving the scale.
    """
    rule = as_loss_scale(loss_scale)
    axes = as_axis_tuple(axis_name)

    def init_fn(params: PyTree) -> LossScaleState:
        del params
        return rule.init()

    def update_fn(
        updates: PyTree,
        state: Any,  # a LossScaleState, or one in an AssumedFinite
        params: PyTree | None = None,
        *,
        found_inf: jax.Array | bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LossScaleState]:
        del extra_args
        if isinstance(state, AssumedFinite):
            scale = repair_scale(state.scaling)
            return unscale(updates, scale, params, state.inverse), state.scaling
        check_state("npu_loss_scale", state, LossScaleState)
        scale = repair_scale(state)
        unscaled = unscale(updates, scale, params)
        if not rule.skips:
            return unscaled, rule.update(state, True)[0]
        with jax.named_scope("optax_npu/overflow"):
            bad = local_overflow(updates, scale)
            overflow = agree(with_outside_flag(bad, found_inf), axes)
        return zero_where(overflow, unscaled), rule.update(state, ~overflow)[0]

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def with_outside_flag(flag: jax.Array, found_inf: jax.Array | bool | None) -> jax.Array:
    """The flag, OR-ed with an outside one of this replica (a scalar, any dtype)."""
    if found_inf is None:
        return flag
    outside = jnp.asarray(found_inf)
    if outside.ndim:
        raise ValueError(
            f"found_inf has shape {outside.shape}, but it is one flag per replica:"
            " pass a scalar, e.g. found_inf=jnp.any(flags)."
        )
    return flag | (outside != 0)


@jax.named_scope("optax_npu/unscale")
def unscale(
    tree: PyTree,
    loss_scale: jax.Array,
    params: PyTree | None,
    inverse: Inverse | None = None,
    like: PyTree | None = None,
    divisor: int = 1,
) -> PyTree:
    """Every floating or complex leaf divided by the scale; see `npu_loss_scale`.

    Args:
      tree: The gradients.
      loss_scale: The scale they carry.
      params: The parameters, if they are known.
      inverse: The reciprocal in float32, if it is known.
      like: A tree with the dtypes to return where `tree` is wider.
      divisor: A power of two to divide by as well.

    Returns:
      The tree in the dtypes of `output_dtype`.
    """
    float32 = jnp.dtype(jnp.float32)
    inverses = {float32: inverse or inverse_of(loss_scale, divisor)}

    def leaf(x: Any, like: Any, param: Any = None) -> Any:
        if not is_inexact(x):
            return x
        x = jnp.asarray(x)
        wide = compute_dtype(x.dtype)
        real = real_dtype(wide)
        if real not in inverses:
            inverses[real] = inverse_of(loss_scale.astype(real), divisor)
        first, second = inverses[real]
        return (x.astype(wide) * first * second).astype(output_dtype(like, param))

    def passes(x: Any) -> bool:
        return x is None or isinstance(x, optax.MaskedNode)

    rest = () if params is None else (params,)
    like = tree if like is None else like
    return jax.tree.map(leaf, tree, like, *rest, is_leaf=passes)


def inverse_of(scale: jax.Array, divisor: int = 1) -> Inverse:
    """The reciprocal of a usable scale times a power of two."""
    half = jnp.where(scale > 2.0**126, 0.5, 1.0).astype(scale.dtype)
    return Inverse(1 / (scale * half), half / divisor)


def output_dtype(x: Any, param: Any) -> Any:
    """The dtype in which a gradient leaves this stage.

    Its own, unless its exponent range is narrower than its parameter's.
    """
    dtype = jnp.asarray(x).dtype
    if not is_inexact(param):
        return dtype
    wider = jnp.asarray(param).dtype
    return wider if jnp.finfo(dtype).minexp > jnp.finfo(wider).minexp else dtype


def zero_where(overflow: jax.Array, tree: PyTree) -> PyTree:
    """`tree`, or zeros of the same dtypes where the step overflowed.

    The zero is -0.0: the one float that leaves *every* float unchanged when it is
    added, so that `optax.apply_updates` keeps a parameter of -0.0 bit for bit.
    """

    def leaf(x: Any) -> Any:
        if not hasattr(x, "dtype") or x.dtype == jax.dtypes.float0:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return lax.select(overflow, match_varying(lax.full_like(x, neutral(x)), x), x)

    return jax.tree.map(leaf, tree)


def neutral(x: Any) -> complex | float | int:
    """What adds nothing to an array: -0.0 for floats, 0 for integers and booleans."""
    if not is_inexact(x):
        return 0
    return complex(-0.0, -0.0) if jnp.iscomplexobj(x) else -0.0

# SPDX-License-Identifier: Apache-2.0
"""Where scaled, local gradients come from."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_npu._compat import AxisNames, as_axis_tuple, cast_varying, require_bound
from optax_npu._scale_rule import repair_scale
from optax_npu._state import find_loss_scale_state
from optax_npu._trees import PyTree, compute_dtype, map_inexact


def get_loss_scale(opt_state: PyTree) -> jax.Array:
    """The scale by which the next loss is to be multiplied, float32[].

    A scale that was restored as inf, nan, zero or negative is read as the value that
    the next ``update`` repairs it to, so that loss and gradients always agree.

    Args:
      opt_state: The state of an optimizer that holds one loss scale.

    Raises:
      ValueError: There is no loss scale in it, there are several, or it sits inside
        ``optax.MultiSteps`` or ``optax.apply_if_finite``, where it cannot work.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(8.0), optax.sgd(1.0))
      >>> print(optax_npu.get_loss_scale(tx.init(jnp.zeros(1))))
      8.0
    """
    return repair_scale(find_loss_scale_state(opt_state))


def scale_loss(loss: jax.Array, opt_state: PyTree) -> jax.Array:
    """`loss` times the current scale, in at least float32.

    Call it as often as you like, once per loss: it only reads the state.

    Args:
      loss: The loss, any shape; float16 and bfloat16 are raised to float32, because
        2^16 does not fit float16.
      opt_state: The state of an optimizer that holds one loss scale.

    Returns:
      The scaled loss.

    Raises:
      TypeError: The loss is not a floating-point number.
      ValueError: See ``get_loss_scale``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(2.0**16), optax.sgd(1.0))
      >>> loss = jnp.float16(0.5)
      >>> print(optax_npu.scale_loss(loss, tx.init(jnp.zeros(1))))
      32768.0
    """
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"loss has dtype {loss.dtype}, but a floating-point loss is needed to"
            " differentiate it: return e.g. jnp.mean(errors.astype(jnp.float32))."
        )
    loss = loss.astype(compute_dtype(loss.dtype))
    return loss * get_loss_scale(opt_state).astype(loss.dtype)


def local_params(params: PyTree, axis_name: AxisNames) -> PyTree:
    """The cast that makes JAX hand out *local* gradients under `shard_map`.

    Under ``shard_map`` with its default ``check_vma=True`` the gradient of a
    replicated parameter is already summed over the mesh, in one collective that
    nobody can schedule or scale. Differentiate with respect to ``local_params(params,
    axes)`` and each replica gets its own gradient, to be reduced by this library.
    Under ``pmap`` and ``check_vma=False`` gradients are local anyway: the identity.

    Args:
      params: The parameters. Floating and complex leaves are cast; moves no data.
      axis_name: The mesh axes to be local over: a name or a tuple of names.

    Returns:
      `params`, typed as varying over the axes.

    Raises:
      ValueError: An axis is not bound here.

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = optax_npu.two_level_mesh()
      >>> axes = mesh.axis_names
      >>> def gradient(w, x):
      ...     w = optax_npu.local_params(w, axes)
      ...     grad = jax.grad(lambda w: w * jnp.mean(x))(w)
      ...     return optax_npu.hierarchical_pmean(grad, axes)
      >>> gradient = jax.shard_map(
      ...     gradient, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
      >>> print(gradient(jnp.float32(2.0), jnp.full(mesh.size, 3.0)))
      3.0
    """
    axes = as_axis_tuple(axis_name)
    require_bound(axes)
    return map_inexact(lambda x: cast_varying(jnp.asarray(x), axes), params)


def scaled_value_and_grad(
    fun: Callable[..., Any],
    opt_state: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: AxisNames | None = None,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad`` of the scaled loss: plain value, scaled gradients.

    Args:
      fun: Returns a scalar loss, or ``(loss, aux)`` with `has_aux`.
      opt_state: The state of the optimizer that will get the gradients.
      argnums: As in ``jax.value_and_grad``.
      has_aux: As in ``jax.value_and_grad``.
      axis_name: Under ``shard_map``: the axes that the optimizer reduces over. The
        gradients are then local to each replica in every mode (``local_params``).
      allow_int: As in ``jax.value_and_grad``.

    Returns:
      A function like ``jax.value_and_grad(fun)``. The value (and aux) are *not*
      scaled; the gradients are, by ``get_loss_scale(opt_state)``. On overflow the
      gradients hold inf or nan and the value stays what `fun` returned.

    Raises:
      TypeError: `fun` does not return a floating-point scalar.
      ValueError: See ``get_loss_scale`` and ``local_params``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(4.0), optax.sgd(0.5))
      >>> params = jnp.array(3.0)
      >>> state = tx.init(params)
      >>> value, grads = optax_npu.scaled_value_and_grad(
      ...     lambda w: w**2, state)(params)
      >>> print(value, grads)  # the true gradient is 6
      9.0 24.0

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, section 3.2.
    """

    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        out = fun(*args, **kwargs)
        loss = out[0] if has_aux else out
        return scale_loss(loss, opt_state), out

    grad_fun = jax.grad(scaled, argnums, has_aux=True, allow_int=allow_int)

    @functools.wraps(fun)
    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if axis_name is not None:
            chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
            chosen = [i % len(args) for i in chosen]
            args = tuple(
                local_params(a, axis_name) if i in chosen else a
                for i, a in enumerate(args)
            )
        grads, out = grad_fun(*args, **kwargs)
        return out, grads

    return value_and_grad

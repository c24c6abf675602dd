# SPDX-License-Identifier: Apache-2.0
"""In which order does the backward pass produce the gradients?"""

from collections.abc import Callable
from typing import Any

import jax

from optax_npu._trees import PyTree


def backward_order(
    fun: Callable[..., Any], params: PyTree, *args: Any, has_aux: bool = False
) -> tuple[int, ...]:
    """The order in which the backward pass of `fun` produces the gradients.

    The order of a parameter tree is not that order: dictionaries sort by name. A wrong
    order costs the overlap of communication with the backward pass, never the result.
    Read from the jaxpr of the gradient; nothing is computed.

    Args:
      fun: The loss, ``fun(params, *args)``.
      params: Parameters; arrays or ``jax.ShapeDtypeStruct``.
      *args: The other arguments of `fun`.
      has_aux: As in ``jax.grad``.

    Returns:
      The positions of the leaves of `params`, first produced first. Leaves that come
      out of one loop (``lax.scan``) together stand in reverse tree order.

    Example:
      >>> import jax.numpy as jnp, optax_npu
      >>> def loss(p, x):  # "in" is used first, so its gradient comes last
      ...     return jnp.sum(jnp.tanh(jnp.tanh(x @ p["in"]) @ p["out"]))
      >>> params = {"in": jnp.ones((2, 3)), "out": jnp.ones((3, 1))}
      >>> optax_npu.backward_order(loss, params, jnp.ones((4, 2)))
      (1, 0)
    """
    grad = jax.grad(fun, has_aux=has_aux, allow_int=True)

    def gradients(params: PyTree, *args: Any) -> PyTree:
        return grad(params, *args)[0] if has_aux else grad(params, *args)

    closed = jax.make_jaxpr(gradients)(params, *args)
    count = len(jax.tree.leaves(params))
    when = [_produced_at(closed.jaxpr, var) for var in closed.jaxpr.outvars[:count]]
    return tuple(sorted(range(count), key=lambda i: (when[i], -i)))


def _produced_at(jaxpr: Any, var: Any) -> tuple[int, ...]:
    """When a variable is computed: equation index, then index in a nested jaxpr, ..."""
    for i, eqn in enumerate(jaxpr.eqns):
        for slot, out in enumerate(eqn.outvars):
            if out is var:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                inner = getattr(inner, "jaxpr", inner)
                if inner is None or eqn.primitive.name in ("scan", "while", "cond"):
                    return (i,)
                return (i, *_produced_at(inner, inner.outvars[slot]))
    return (-1,)

# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's class for moving from `tf.distribute`: the same names and arguments."""

from collections.abc import Iterable
from typing import Any

from optax_npu._all_reduce import hierarchical_pmean, hierarchical_psum
from optax_npu._packing import check_num_packs
from optax_npu._replicas import broadcast_from
from optax_npu._settings import ReduceOp, reduce_op
from optax_npu._trees import PyTree


class HierarchicalCopyAllReduce:
    """``tf.distribute.HierarchicalCopyAllReduce`` for mapped functions.

    A "per-replica value" is simply the local value of the mapped function, and a
    destination is a set of mapped axes: the result is on all of their replicas. ::

        cross_device_ops = HierarchicalCopyAllReduce(num_packs=2)
        grads = cross_device_ops.reduce("mean", grads, ("node", "device"))

    Where TensorFlow goes wrong, this does not: an odd number of replicas is summed
    completely (TensorFlow leaves out the last one), packs may hold several dtypes,
    ``"mean"`` is a mean, and a mean that fits the dtype does not overflow on the way.

    Args:
      num_packs: How many packets the values are cut into; 0: no packing.

    Raises:
      ValueError: `num_packs` is negative.
      TypeError: `num_packs` is not a whole number.

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> ops = optax_npu.HierarchicalCopyAllReduce()
      >>> mean = jax.vmap(lambda x: ops.reduce("mean", x, "data"), axis_name="data")
      >>> print(mean(jnp.arange(8.0)))
      [3.5 3.5 3.5 3.5 3.5 3.5 3.5 3.5]
    """

    def __init__(self, num_packs: int = 1):
        self._num_packs = check_num_packs(num_packs)

    def __repr__(self) -> str:
        return f"HierarchicalCopyAllReduce(num_packs={self._num_packs})"

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Any,
        **options: Any,
    ) -> PyTree:
        """The sum or mean of `value` over the replicas of `destinations`.

        Args:
          reduce_op: ``ReduceOp.SUM`` or ``ReduceOp.MEAN``, or their names.
          value: The local value, an array or a tree.
          destinations: The mapped axes, see ``hierarchical_pmean``.
          **options: Keyword arguments of ``hierarchical_pmean``.

        Returns:
          A tree like `value`, equal on all replicas.

        Raises:
          ValueError: `value` or `destinations` is ``None``, the operation is unknown,
            or `value` is known to be no per-replica value (see ``on_replicated``).
          TypeError: The mean of integers.
        """
        op = _checked_op(reduce_op)
        _check_value(value)
        if destinations is None:
            raise ValueError(
                "destinations is None: name the mapped axes whose replicas are reduced,"
                ' e.g. ("node", "device").'
            )
        reduce = hierarchical_pmean if op is ReduceOp.MEAN else hierarchical_psum
        options.setdefault("num_packs", self._num_packs)
        return reduce(value, destinations, **options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[Any],
        destinations: Any = None,
        **options: Any,
    ) -> list[PyTree]:
        """Reduces several values, packed together where they go to the same place.

        Args:
          reduce_op: ``ReduceOp.SUM`` or ``ReduceOp.MEAN``, or their names.
          value_destination_pairs: Tuples ``(value, destinations)``; or just values, if
            `destinations` is given for all.
          destinations: The mapped axes for all values.
          **options: Keyword arguments of ``hierarchical_pmean``.

        Returns:
          The reduced values, in order.

        Raises:
          ValueError: As ``reduce``; or an element is not a tuple of two.
          TypeError: `value_destination_pairs` is not iterable; the mean of integers.
        """
        _checked_op(reduce_op)
        pairs = _pairs(value_destination_pairs, destinations)
        places = list(dict.fromkeys(map(_place_key, pairs)))
        out: list[PyTree] = [None] * len(pairs)
        for place in places:
            mine = [i for i, pair in enumerate(pairs) if _place_key(pair) == place]
            values = [pairs[i][0] for i in mine]
            reduced = self.reduce(reduce_op, values, pairs[mine[0]][1], **options)
            for i, value in zip(mine, reduced, strict=True):
                out[i] = value
        return out

    def broadcast(self, tensor: PyTree, destinations: Any, root: int = 0) -> PyTree:
        """The value of one replica, on all of them; see ``broadcast_from``.

        Args:
          tensor: An array or a tree.
          destinations: The mapped axes.
          root: The replica to copy from.

        Raises:
          ValueError: `tensor` is ``None``.
        """
        _check_value(tensor)
        return broadcast_from(tensor, destinations, root)


def _checked_op(op: Any) -> ReduceOp:
    return reduce_op(op)


def _check_value(value: Any) -> None:
    if value is None:
        raise ValueError(
            "The value is None, but an array or a tree of arrays is needed."
        )


def _pairs(given: Any, destinations: Any) -> list[tuple[Any, Any]]:
    need = (
        "value_destination_pairs must be an iterable of tuples (value, destinations),"
        ' e.g. [(grads, ("node", "device"))]'
    )
    if isinstance(given, str | bytes):
        raise ValueError(f"{need}; got the text {given!r}.")
    try:
        items = list(given)
    except TypeError as error:
        raise TypeError(f"{need}; got {given!r}, which is not iterable.") from error
    if destinations is not None:
        items = [(value, destinations) for value in items]
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise ValueError(f"{need}; got the element {item!r}.")
        _check_value(item[0])
    return items


def _place_key(pair: tuple[Any, Any]) -> str:
    return repr(pair[1])

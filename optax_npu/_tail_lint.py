# SPDX-License-Identifier: Apache-2.0
"""`tail_lint`: which transformation makes every update wait for every gradient.

Tail hiding needs no new optimizer: most transformations compute the update of a leaf
from the gradient of that leaf. Some do not. A global norm or a finite check over all
gradients is a barrier: no update can start before the last gradient is there. Data flow
in the jaxpr shows which is which, without running anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from optax_npu._sources import Frame, describe, transformation
from optax_npu._trees import PyTree, is_inexact, path_name


@dataclass(frozen=True)
class TailFinding:
    """One barrier.

    Attributes:
      name: The transformation, such as ``"clip_by_global_norm"``; the function where
        no transformation is on the stack.
      location: File and line of the operation that joins the gradients.
      gradients: Paths of the gradients that it joins.
      updates: Paths of the updates that wait for all of them.
    """

    name: str
    location: str
    gradients: tuple[str, ...]
    updates: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.location}) makes {len(self.updates)} updates wait for"
            f" {len(self.gradients)} gradients: no tail hiding for them. Clip by block"
            " (optax.clip_by_block_rms, optax.adaptive_grad_clip), leave the check to"
            " the loss scale, or accept that the last reduction is exposed."
        )


def tail_lint(
    opt: optax.GradientTransformation, params: PyTree, **extra_args: Any
) -> tuple[TailFinding, ...]:
    """Names the transformations that make updates wait for gradients of other leaves.

    Give it the optimizer that goes into `npu_optimizer`, not its result: the verdict of
    the loss scale is taken before the reduction and is no barrier. Traces
    `opt.update` once on shapes; computes nothing.

    Args:
      opt: Any gradient transformation.
      params: The parameters, or a tree of `jax.ShapeDtypeStruct`.
      **extra_args: Passed on to `opt.update`, where it needs them (`value=0.0`).

    Returns:
      One `TailFinding` for each barrier, in the order of computation; empty if every
      update depends on the gradient of its own leaf only.

    Example:
      >>> import jax, optax
      >>> params = {"w": jax.numpy.ones((2, 3)), "b": jax.numpy.ones(3)}
      >>> tail_lint(optax.lamb(1e-3), params)
      ()
      >>> clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
      >>> [finding.name for finding in tail_lint(clipped, params)]
      ['clip_by_global_norm']
    """
    flow = _Flow.of(opt, params, extra_args)
    findings: list[TailFinding] = []
    while (joint := flow.first_join()) is not None:
        findings.append(flow.finding(joint))
        flow.cut.add(joint.key)
    return tuple(findings)


@dataclass(frozen=True)
class _Join:
    """An equation that brings gradients of different leaves together."""

    stack: tuple[Frame, ...]
    bits: int

    @property
    def key(self) -> str:
        """All operations of one transformation are one; others go by their place."""
        frame = transformation(self.stack)
        return frame.function if frame else describe(self.stack)


class _Flow:
    """Dependence of values on gradients: one bit for each gradient leaf."""

    def __init__(
        self, jaxpr: Any, bits: list[int], gradients: list[str], outs: list[str]
    ):
        self.jaxpr = jaxpr
        self.bits = bits
        self.gradients = gradients
        self.outs = outs
        self.cut: set[str] = set()
        self.joins: list[_Join] = []

    @classmethod
    def of(cls, opt: Any, params: PyTree, extra_args: dict[str, Any]) -> "_Flow":
        opt = optax.with_extra_args_support(opt)
        state = jax.eval_shape(opt.init, params)

        def update(gradients: PyTree, state: PyTree, params: PyTree) -> PyTree:
            return opt.update(gradients, state, params, **extra_args)[0]

        closed, out = jax.make_jaxpr(update, return_shape=True)(params, state, params)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        rest = len(closed.jaxpr.invars) - len(leaves)
        names = [path_name(path) for path, leaf in leaves if is_inexact(leaf)]
        numbers = iter(range(len(names)))
        bits = [1 << next(numbers) if is_inexact(x) else 0 for _, x in leaves]
        outs = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        return cls(closed.jaxpr, bits + [0] * rest, names, outs)

    def first_join(self) -> _Join | None:
        """The first join that is not cut and on which an update depends."""
        self.joins = []
        outs = self.run(self.jaxpr, self.bits, ())
        waiting = [bits for bits in outs if bits.bit_count() > 1]
        for join in self.joins:
            if any(join.bits & bits == join.bits for bits in waiting):
                return join
        return None

    def finding(self, join: _Join) -> TailFinding:
        """What to tell about a join: all that its transformation brings together."""
        bits = 0
        for other in self.joins:
            bits |= other.bits if other.key == join.key else 0
        outs = self.run(self.jaxpr, self.bits, ())
        frame = transformation(join.stack)
        text = describe([frame] if frame else join.stack)
        name, _, location = text.partition(" (")
        return TailFinding(
            name=name,
            location=location.rstrip(")"),
            gradients=_names(self.gradients, bits),
            updates=tuple(
                path
                for path, out in zip(self.outs, outs, strict=True)
                if (out & bits).bit_count() > 1
            ),
        )

    def run(
        self, jaxpr: Any, bits: Sequence[int], stack: tuple[Frame, ...]
    ) -> list[int]:
        """The bits of the results of a jaxpr, given those of its arguments."""
        env = dict(zip(jaxpr.invars, bits, strict=True))

        def read(atom: Any) -> int:
            return 0 if hasattr(atom, "val") else env.get(atom, 0)

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outer = (*_frames(equation), *stack)
            for var, out in zip(
                equation.outvars, self.step(equation, inputs, outer), strict=True
            ):
                env[var] = out
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, equation: Any, inputs: list[int], stack: tuple[Frame, ...]):
        """The bits of the results of one equation."""
        name, inner = equation.primitive.name, list(_inner(equation))
        if name == "cond":
            return self.branches(inner, inputs, stack)
        if name == "scan":
            return self.scan(equation, inner[0], inputs, stack)
        if name == "while":
            return self.loop(equation, inputs, stack)
        if len(inner) == 1 and len(inner[0].invars) == len(inputs):
            return self.run(inner[0], inputs, stack)
        return [self.union(equation, inputs, stack)] * len(equation.outvars)

    def union(self, equation: Any, inputs: list[int], stack: tuple[Frame, ...]) -> int:
        """All inputs; a join where no single one of them has all the bits."""
        total = 0
        for bits in inputs:
            total |= bits
        if total.bit_count() > 1 and total not in inputs:
            join = _Join(stack, total)
            if join.key in self.cut:
                return _main_input(equation, inputs)
            self.joins.append(join)
        return total

    def branches(self, inner: list[Any], inputs: list[int], stack: tuple[Frame, ...]):
        outs = [self.run(branch, inputs[1:], stack) for branch in inner]
        merged = []
        for results in zip(*outs, strict=True):
            total = inputs[0]
            for bits in results:
                total |= bits
            merged.append(total)
        return merged

    def scan(
        self, equation: Any, body: Any, inputs: list[int], stack: tuple[Frame, ...]
    ):
        # Stacked arguments and results have one dimension more than in the body.
        stacked = [
            _rank(a) > _rank(b)
            for a, b in zip(equation.invars, body.invars, strict=True)
        ]
        carry = sum(
            _rank(a) == _rank(b)
            for a, b in zip(equation.outvars, body.outvars, strict=True)
        )
        consts = len(inputs) - sum(stacked) - carry
        return self.fixpoint(
            lambda state: self.run(
                body, [*inputs[:consts], *state, *inputs[consts + carry :]], stack
            ),
            inputs[consts : consts + carry],
        )

    def loop(self, equation: Any, inputs: list[int], stack: tuple[Frame, ...]):
        first = equation.params["cond_nconsts"]
        second = first + equation.params["body_nconsts"]
        test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]

        def once(state: list[int]) -> list[int]:
            going = self.run(test.jaxpr, [*inputs[:first], *state], stack)[0]
            outs = self.run(body.jaxpr, [*inputs[first:second], *state], stack)
            return [bits | going for bits in outs]

        return self.fixpoint(once, inputs[second:])

    @staticmethod
    def fixpoint(once: Any, state: list[int]) -> list[int]:
        """Runs a loop body until no carried value gains a bit."""
        while True:
            outs = once(state)
            new = [old | out for old, out in zip(state, outs, strict=False)]
            if new == state:
                return [*new, *outs[len(state) :]]
            state = new


def _main_input(equation: Any, inputs: list[int]) -> int:
    """The bits of the operand that the result mainly is: an array of its shape."""
    shape = getattr(equation.outvars[0].aval, "shape", ())
    alike = [
        bits
        for atom, bits in zip(equation.invars, inputs, strict=True)
        if bits
        and getattr(atom.aval, "shape", None) == shape
        and getattr(atom.aval, "dtype", None) != np.dtype(bool)
    ]
    return alike[0] if alike else next(bits for bits in inputs if bits)


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _frames(equation: Any) -> tuple[Frame, ...]:
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return tuple(
        Frame(f.function_name, f.file_name, getattr(f, "line_num", 0)) for f in frames
    )


def _inner(equation: Any) -> Iterator[Any]:
    """The jaxprs inside an equation, opened."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _names(names: list[str], bits: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(names) if bits >> i & 1)

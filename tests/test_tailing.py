# SPDX-License-Identifier: Apache-2.0
"""Collectives stay apart and in order; what the fence holds back is bit for bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_npu
from optax_npu import _tailing, bucket_plan
from optax_npu._axes import axis_spec, resolve_axes
from optax_npu._compat import all_gather_replicated
from optax_npu._reduce import reduce_tree
from optax_npu._tailing import fence
from tests._modes import (
    AXES,
    MAPPED_MODES,
    assert_same_bits,
    indices,
    mesh_of,
    run,
)


def grads_of(x):
    """Six leaves of mixed shapes."""
    shapes = [(3,), (), (2, 5), (1,), (40,), (7, 2)]
    return [x * (i + 1) + jnp.zeros(shape) for i, shape in enumerate(shapes)]


def reducer(axes, packs, *, flag=True, order=True, dtypes=False):
    """Reduces `packs` buckets, with an overflow flag before the last one."""

    def step(x):
        grads = optax_npu.local_params(grads_of(x), AXES)
        bad = jnp.any(jnp.stack([jnp.any(~jnp.isfinite(g)) for g in grads]))

        def before_last(prev):
            return lax.psum(fence(bad.astype(jnp.int32), prev), AXES)

        return reduce_tree(
            grads,
            resolve_axes(axis_spec(axes)),
            plan=bucket_plan(grads, num_packs=packs),
            op="sum",
            fence=order,
            before_last=before_last if flag else None,
        )

    return step


def compiled(step, check=True):
    return (
        jax.jit(
            jax.shard_map(
                lambda x: step(x[0]),
                mesh=mesh_of((2, 4)),
                in_specs=P(AXES),
                out_specs=P(),
                check_vma=check,
            )
        )
        .lower(jnp.ones(8))
        .compile()
    )


def collectives(text: str) -> list[str]:
    """The collectives of a scheduled program, in order, by the first letters."""
    names = {"all-reduce": "R", "reduce-scatter": "S", "all-gather": "G"}
    found = re.findall(r" (all-reduce|reduce-scatter|all-gather)\(", text)
    return [names[name] for name in found]


@pytest.mark.parametrize("packs", [1, 2, 3, 6])
@pytest.mark.parametrize("check", [True, False])
def test_B69_B70_flat_buckets_are_separate_all_reduces(packs, check):
    """One all-reduce per bucket plus one for the flag; ones add up to eight."""
    program = compiled(reducer((AXES,), packs), check)
    buckets = len(bucket_plan(grads_of(jnp.ones(())), num_packs=packs).buckets)
    assert collectives(program.as_text()) == ["R"] * (buckets + 1)
    out, flag = program(jnp.ones(8))
    for i, leaf in enumerate(out):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 8.0 * (i + 1)))
    assert flag == 0


@pytest.mark.parametrize("packs", [1, 3])
def test_B69_B70_two_level_buckets_are_separate_at_every_stage(packs):
    program = compiled(reducer(AXES, packs))
    found = collectives(program.as_text())
    assert sorted(found) == sorted(["S", "R", "G"] * packs + ["R"])
    out, _ = program(jnp.ones(8))
    assert {float(leaf.ravel()[0]) for leaf in out} == {8.0, 16, 24, 32, 40, 48}


def test_without_a_fence_the_compiler_merges():
    """The mutant that the fence is there for."""
    program = compiled(reducer((AXES,), 3, order=False))
    assert len(collectives(program.as_text())) < 4


def test_D9_the_flag_travels_just_before_the_last_bucket():
    text = compiled(reducer((AXES,), 3)).as_text()
    dtypes = re.findall(r"= (\w+)\[.* all-reduce\(", text)
    assert dtypes == ["f32", "f32", "s32", "f32"]


@pytest.mark.parametrize("axes", [AXES, (AXES,)], ids=["two_level", "flat"])
@pytest.mark.parametrize("check", [True, False])
def test_B66_fenced_and_free_are_equal_bit_for_bit(axes, check):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=8), jnp.float32)
    one = compiled(reducer(axes, 1, order=False), check)(x)
    for order in (True, False, "chain"):
        out = compiled(reducer(axes, 3, order=order), check)(x)
        jax.tree.map(np.testing.assert_array_equal, one, out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_D8_what_is_not_finite_stays_in_its_bucket(bad):
    def step(_, x, how):
        grads = {"a": x, "b": jnp.where(x == 3, bad, x), "c": x}
        tx = optax_npu.hierarchical_all_reduce(**how.reduce_over, num_packs=3)
        return tx.update(grads, tx.init(grads))[0]

    for mode in MAPPED_MODES:
        out = assert_same_bits(run(mode, (2, 4), step, 0.0, jnp.arange(8.0)))
        assert out["a"] == out["c"] == 3.5
        np.testing.assert_array_equal(out["b"], np.float32(bad))


@pytest.mark.parametrize("order", ["auto", "chain"])
def test_D8_the_fence_itself_changes_no_bit(order):
    x = jnp.array([-0.0, jnp.nan, jnp.inf, 1e-42, 3.0])

    def step(x, prev):
        return fence(x[0], prev, order)[None]

    for check in (True, False):
        out = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh_of((2, 4)),
                in_specs=(P(AXES), P()),
                out_specs=P(AXES),
                check_vma=check,
            )
        )(jnp.tile(x, (8, 1)), jnp.full((2, 2), jnp.nan))
        assert all(row.tobytes() == np.asarray(x).tobytes() for row in np.asarray(out))


@pytest.mark.parametrize(
    ("x", "prev"),
    [
        (jnp.zeros((), jnp.int32), jnp.full(3, jnp.nan)),
        (jnp.ones((2, 3), jnp.bfloat16), jnp.zeros((), jnp.bool_)),
        (jnp.ones(0), jnp.ones(3)),
        (jnp.ones(3), jnp.ones(0)),
        (jnp.ones(3), None),
    ],
)
def test_the_fence_takes_any_shape_and_dtype(x, prev):
    for wrap in (lambda f: f, jax.jit):
        out = wrap(lambda x, prev: fence(x, prev))(x, prev)
        np.testing.assert_array_equal(out, x)
        assert out.dtype == x.dtype
    spread = jax.pmap(lambda _: fence(x, prev), axis_name="data")(jnp.arange(8))
    np.testing.assert_array_equal(spread[3], x)


def test_unknown_order():
    with pytest.raises(ValueError, match=r"'sometimes'.*'chain'"):
        _tailing.check_order("sometimes")


def test_flat_buckets_on_several_slices_are_left_to_the_compiler(monkeypatch):
    """`auto` adds no fence to a flat reduction there, but to each of two levels."""
    monkeypatch.setattr(_tailing, "several_slices", lambda: True)
    flat = compiled(reducer((AXES,), 3, flag=False)).as_text()
    assert len(collectives(flat)) < 3
    chained = compiled(reducer((AXES,), 3, flag=False, order="chain")).as_text()
    assert collectives(chained) == ["R"] * 3
    two_level = compiled(reducer(AXES, 3, flag=False)).as_text()
    assert sorted(collectives(two_level)) == sorted(["S", "R", "G"] * 3)


def test_leaves_of_other_types_do_not_change_each_others_type():
    """A bucket that varies over fewer axes does not wait for one that varies more."""

    def step(batch):
        grads = {
            "both": optax_npu.local_params(jnp.ones(3), AXES) * batch,
            "device": optax_npu.local_params(jnp.ones(3), "device"),
        }
        out, _ = reduce_tree(
            grads,
            resolve_axes(axis_spec(AXES)),
            plan=bucket_plan(grads, num_packs=0, order=[0, 1]),
            fence=True,
            on_replicated="equal",
        )
        return out

    step = jax.shard_map(step, mesh=mesh_of((2, 4)), in_specs=P(AXES), out_specs=P())
    out = jax.jit(step)(jnp.arange(8.0))
    np.testing.assert_array_equal(out["both"], np.full(3, 3.5))
    np.testing.assert_array_equal(out["device"], np.ones(3))


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B70_vmap_and_grad_are_those_of_a_plain_psum(mode):
    def step(_, x, how):
        def ours(grads):
            tx = optax_npu.hierarchical_all_reduce(
                **how.reduce_over, num_packs=2, op="sum"
            )
            return tx.update(grads, tx.init(grads))[0]

        def plain(grads):
            return lax.psum(grads, how.axis_name)

        def through(reduce):
            def loss(x):
                out = reduce({"a": 2 * x, "b": x + 1})
                return out["a"] * out["b"]

            members = jax.vmap(loss)(jnp.stack([x, 10 * x]))
            slope = jax.grad(lambda x: loss(x * x))(x)
            return members, all_gather_replicated(slope, how.axis_name)

        return through(ours), through(plain)

    ours, plain = assert_same_bits(run(mode, (2, 4), step, 0.0, jnp.arange(8.0)))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    np.testing.assert_array_equal(ours[0], [56 * 36, 560 * 288])


def test_B66_whole_training_with_and_without_the_tail():
    """Twenty Adam steps of integer gradients: the same bits for any plan and fence."""

    def train(fenced, packs):
        def step(params, x, how):
            tx = optax.chain(
                optax_npu.hierarchical_all_reduce(
                    **how.reduce_over, num_packs=packs, fence=fenced
                ),
                optax.adam(0.1),
            )

            def one(carry, i):
                params, state = carry
                grads = jax.tree.map(lambda p: jnp.zeros_like(p) + x * i, params)
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            carry = (params, tx.init(params))
            return lax.scan(one, carry, jnp.arange(20.0))[0][0]

        return assert_same_bits(run("unchecked", (2, 4), step, start, indices((2, 4))))

    start = grads_of(jnp.float32(1.0)) + [jnp.ones((3, 3))] * 4
    want = train(False, 1)
    jax.tree.map(np.testing.assert_array_equal, want, train(True, 4))


COLLECTIVES = ("psum", "reduce_scatter", "all_gather", "all_to_all")


def crossing_bytes(jaxpr, axis: str, devices: int) -> float:
    """Bytes that leave a node of `devices` for collectives over `axis`."""
    total = 0.0
    for eqn in jaxpr.eqns:
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += crossing_bytes(inner, axis, devices)
        name = eqn.primitive.name
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        if axis not in axes or not name.startswith(COLLECTIVES):
            continue
        values = eqn.outvars if name.startswith("all_gather") else eqn.invars
        passes = 2 if name.startswith("psum") else 1  # there and back
        nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in values)
        total += devices * passes * nbytes * (2 - 1) / 2
    return total


@pytest.mark.parametrize(
    ("wire", "share"), [(None, 1.0), (jnp.bfloat16, 0.5), (jnp.float16, 0.5)]
)
def test_D27_bytes_between_nodes_are_the_minimum(wire, share):
    """2 S (N - 1) / N bytes leave a node; half of it in 16 bits."""
    grads = {"a": jnp.ones(8 * 128 * 3), "b": jnp.ones((8, 128))}
    nbytes = sum(x.nbytes for x in grads.values())

    def step(grads):
        grads = optax_npu.local_params(grads, AXES)
        return optax_npu.hierarchical_pmean(grads, AXES, inter_node_dtype=wire)

    def flat(grads):
        grads = optax_npu.local_params(grads, AXES)
        return optax_npu.hierarchical_pmean(grads, (AXES,))

    def crossing(step):
        mapped = jax.shard_map(step, mesh=mesh_of((2, 4)), in_specs=P(), out_specs=P())
        return crossing_bytes(jax.make_jaxpr(mapped)(grads).jaxpr, "node", 4)

    assert crossing(step) == share * 2 * nbytes * (2 - 1) / 2
    assert crossing(flat) == 4 * 2 * nbytes / 2  # as if every device had its own link

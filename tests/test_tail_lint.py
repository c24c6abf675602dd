# SPDX-License-Identifier: Apache-2.0
"""Which transformations are barriers, and how `tail_lint` names them."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from optax_npu import tail_lint

PARAMS = {
    "a": jnp.ones((4, 4)),
    "b": jnp.ones((4,)),
    "c": {"kernel": jnp.ones((8, 4)), "count": jnp.ones((), jnp.int32)},
}
FLOATS = {"a": PARAMS["a"], "b": PARAMS["b"], "c": {"kernel": PARAMS["c"]["kernel"]}}
LABELS = {"a": "x", "b": "y", "c": {"kernel": "x"}}

INDEPENDENT = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lamb": optax.lamb(0.1),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1),
    "muon": optax.contrib.muon(0.1),
    "clip": optax.clip(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "zero_nans": optax.zero_nans(),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
    "multi_transform": optax.multi_transform(
        {"x": optax.adam(0.1), "y": optax.sgd(0.1)}, LABELS
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
}
BARRIERS = {
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "flatten": optax.flatten(optax.adam(0.1)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_D13_leaf_by_leaf(name):
    assert tail_lint(INDEPENDENT[name], FLOATS) == ()


@pytest.mark.parametrize("name", BARRIERS)
def test_D13_barriers_are_named(name):
    (found,) = tail_lint(BARRIERS[name], FLOATS)
    assert found.name == name
    assert found.gradients == found.updates == ("a", "b", "c/kernel")
    assert "optax/" in found.location
    assert f"{name} (optax/" in str(found)


@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_inside_a_chain_is_named(name):
    opt = optax.chain(optax.clip(1.0), BARRIERS[name], optax.scale(-1.0))
    assert [found.name for found in tail_lint(opt, FLOATS)] == [name]


def test_several_barriers_are_all_named_in_order():
    opt = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.apply_if_finite(optax.lamb(0.1), 3),
        optax.normalize_by_update_norm(),
    )
    names = ["clip_by_global_norm", "apply_if_finite", "normalize_by_update_norm"]
    assert [found.name for found in tail_lint(opt, FLOATS)] == names


def test_a_barrier_for_some_leaves_tells_which():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    opt = optax.multi_transform({"x": clipped, "y": optax.sgd(0.1)}, LABELS)
    (found,) = tail_lint(opt, FLOATS)
    assert found.gradients == found.updates == ("a", "c/kernel")


def test_your_own_transformation_is_named():
    def my_mean_removal() -> optax.GradientTransformation:
        def update_fn(updates, state, params=None):
            del params
            mean = sum(jnp.mean(u) for u in jax.tree.leaves(updates))
            return jax.tree.map(lambda u: u - mean, updates), state

        return optax.GradientTransformation(lambda params: (), update_fn)

    (found,) = tail_lint(optax.chain(my_mean_removal(), optax.adam(0.1)), FLOATS)
    assert found.name == "my_mean_removal"
    assert "test_tail_lint.py" in found.location


def test_loops_and_branches_are_followed():
    def looping(joined: bool) -> optax.GradientTransformation:
        def update_fn(updates, state, params=None):
            del params
            flat, tree = jax.tree.flatten(updates)

            def body(carry, _):
                total, leaves = carry
                scale = total if joined else 1.0
                total = total + jnp.sum(leaves[0])
                return (total, [leaf * scale for leaf in leaves]), None

            (_, flat), _ = jax.lax.scan(body, (1.0, flat), None, length=3)
            last = jax.lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 2.0), (0, flat[-1])
            )[1]
            flat = [*flat[:-1], last]
            return jax.tree.unflatten(tree, flat), state

        return optax.GradientTransformation(lambda params: (), update_fn)

    assert tail_lint(looping(False), FLOATS) == ()
    (found,) = tail_lint(looping(True), FLOATS)
    assert found.name == "looping"
    # the first gradient scales all the others, through the carried total
    assert "a" in found.gradients
    assert len(found.updates) >= 2


def test_leaves_without_gradients_and_shapes_only():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), FLOATS)
    assert tail_lint(optax.adam(0.1), shapes) == ()
    assert tail_lint(optax.sgd(0.1), {}) == ()
    assert tail_lint(optax.sgd(0.1), {"a": jnp.ones(3), "b": None}) == ()
    assert tail_lint(optax.clip_by_global_norm(1.0), {"a": jnp.ones(3)}) == ()
    assert tail_lint(optax.sgd(0.1), PARAMS) == ()


def test_extra_arguments_reach_the_update():
    opt = optax.contrib.reduce_on_plateau()
    assert tail_lint(opt, FLOATS, value=jnp.float32(0)) == ()

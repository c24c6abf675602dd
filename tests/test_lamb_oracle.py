# SPDX-License-Identifier: Apache-2.0
"""`optax.lamb` with `exclude_from_weight_decay`, against eleven LAMBs.

Ten steps on parameters with BERT's names. Four definitions are optax's, and agree to
float32. The others differ, and have to: a user who moves a recipe should know.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_npu

ORACLE = pathlib.Path(__file__).parent / "oracle" / "lamb"
STEPS = 10
SCALE = 1024.0

# Why a system's run is another one. `None`: it is the same definition.
NO_CORRECTION = "moments are not bias-corrected"
DECAY_FIRST = "weights are decayed first, outside the trust ratio"
LOSES_RATIO = "what loses its decay loses its trust ratio too"
CLAMPED = NO_CORRECTION + "; weight norm clamped to 10"
CLIPPED = "gradients are clipped to a global norm of 1; " + LOSES_RATIO
DIFFERENCES: dict[tuple[str, str], str | None] = {
    ("optax", "lamb with mask"): None,
    ("nvidia_bert_tf1", "global_step from 1"): None,
    ("nvidia_bert_tf1", "global_step from 0"): "divides by 1 - b^0 = 0: nan",
    ("tensorflow_addons", "exclude_from_layer_adaptation=['nothing']"): None,
    ("tensorflow_addons", "exclude_from_weight_decay only"): LOSES_RATIO,
    ("timm", "max_grad_norm=None, always_adapt"): None,
    ("timm", "max_grad_norm=None"): LOSES_RATIO,
    ("timm", "defaults (max_grad_norm=1)"): CLIPPED,
    ("timm", "max_grad_norm=None, always_adapt, trust_clip"): "ratio at most 1",
    ("timm", "max_grad_norm=None, bias_correction=False"): NO_CORRECTION,
    ("paddle", "always_adapt"): None,
    ("paddle", "defaults"): LOSES_RATIO,
    ("keras3", "weight_decay, exclude_from_weight_decay"): DECAY_FIRST,
    ("albert_tf1", "exclude_from_weight_decay only"): NO_CORRECTION,
    ("albert_tf1", "exclude_from_layer_adaptation=['nothing']"): NO_CORRECTION,
    ("torch_optimizer", "defaults"): CLAMPED,
    ("torch_optimizer", "clamp_value=1e9"): NO_CORRECTION,
    ("torch_optimizer", "clamp_value=1e9, debias"): NO_CORRECTION,
    ("pytorch_optimizer", "defaults (weight_decouple)"): CLAMPED,
    ("pytorch_optimizer", "weight_decouple=False"): CLAMPED,
    ("pytorch_lamb", "defaults"): CLAMPED + "; no zero guard",
}
# Without weight decay, decaying first and losing the ratio with it have no effect
# where nothing is excluded by name.
SAME_WITHOUT_DECAY = {
    ("tensorflow_addons", "exclude_from_weight_decay only"),
    ("keras3", "weight_decay, exclude_from_weight_decay"),
}


@functools.cache
def problem() -> dict[str, Any]:
    return json.loads((ORACLE / "problem.json").read_text())


def tree(values: dict[str, Any]) -> dict[str, jax.Array]:
    return {k: jnp.asarray(np.asarray(v, np.float32)) for k, v in values.items()}


CONFIGS = {config["id"]: config for config in problem()["configs"]}


def gradients(config: str) -> list[dict[str, jax.Array]]:
    steps = problem()["gradients"][config]
    return [tree(step) for step in steps]


def lamb(config: dict[str, Any]) -> optax.GradientTransformation:
    return optax.lamb(
        config["lr"],
        b1=config["b1"],
        b2=config["b2"],
        eps=config["eps"],
        weight_decay=config["weight_decay"],
        mask=optax_npu.exclude_from_weight_decay(*config["exclude"]),
    )


@functools.cache
def our_run(config_id: str, overflows: tuple[int, ...] = ()) -> list[Any]:
    """Parameters after every good step, gradients scaled and overflows in between."""
    tx = optax_npu.chain(optax_npu.npu_loss_scale(SCALE), lamb(CONFIGS[config_id]))
    params = tree(problem()["params"])
    state: Any = tx.init(params)
    done = []

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i, grads in enumerate(gradients(config_id)):
        scaled = jax.tree.map(lambda g: g * SCALE, grads)
        if i in overflows:
            bad = dict(scaled, **{"zero_init/kernel": scaled["zero_init/kernel"] / 0})
            params, state = step(bad, state, params)
        params, state = step(scaled, state, params)
        done.append(params)
    assert int(state[0].skipped_steps) == len(overflows)
    return done


def distance(ours: list[Any], case: dict[str, Any]) -> float:
    apart = 0.0
    for mine, theirs in zip(ours, case["params_after_step"], strict=True):
        for name, value in tree(theirs).items():
            apart = max(apart, float(np.abs(np.asarray(mine[name]) - value).max()))
            if not np.all(np.isfinite(value)):
                return np.inf
    return apart


CASES = [
    pytest.param(path.stem, case, id=f"{path.stem}-{case['config']}-{case['variant']}")
    for path in sorted(ORACLE.glob("*.json"))
    if path.stem != "problem"
    for case in json.loads(path.read_text())["cases"]
]


@pytest.mark.parametrize(("system", "case"), CASES)
def test_lamb(system: str, case: dict[str, Any]) -> None:
    key = (system, case["variant"])
    same = DIFFERENCES[key] is None
    if case["config"] == "no_decay" and key in SAME_WITHOUT_DECAY:
        same = True
    apart = distance(our_run(case["config"]), case)
    if same:
        assert apart < 1e-5
    else:
        assert apart > 1e-2, DIFFERENCES[key]


@pytest.mark.parametrize("config", CONFIGS)
def test_lamb_with_overflows_is_the_same_run_bit_for_bit(config: str) -> None:
    clean, interrupted = our_run(config), our_run(config, (0, 3, 9))
    for a, b in zip(clean, interrupted, strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("config", CONFIGS)
def test_lamb_is_plain_optax_lamb(config: str) -> None:
    tx = lamb(CONFIGS[config])
    params = tree(problem()["params"])
    state = tx.init(params)

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads, ours in zip(gradients(config), our_run(config), strict=True):
        params, state = step(grads, state, params)
        for name in params:
            # Not bit for bit: the two programs are fused differently.
            np.testing.assert_allclose(ours[name], params[name], rtol=5e-7, atol=5e-7)


def test_excluded_names_are_those_of_the_recipe() -> None:
    config = CONFIGS["bert_defaults"]
    mask = optax_npu.exclude_from_weight_decay(*config["exclude"])
    decays = mask(tree(problem()["params"]))
    assert {name for name in decays if not decays[name]} == {
        "bert/encoder/layer_0/attention/self/query/bias",
        "bert/encoder/layer_0/output/LayerNorm/gamma",
        "bert/encoder/layer_0/output/LayerNorm/beta",
        "bert/encoder/layer_1/output/layer_norm/scale",
        "cls/predictions/output_bias",
    }
    # Nested trees have the same path names.
    nested = {"encoder": {"LayerNorm": {"scale": jnp.ones(1)}, "kernel": jnp.ones(1)}}
    got = mask(nested)
    assert got == {"encoder": {"LayerNorm": {"scale": False}, "kernel": True}}

# SPDX-License-Identifier: Apache-2.0
"""A small BERT: masked language model in Flax, half-precision compute.

Parameters are float32; matrix products, activations and their gradients have the
dtype of the configuration. What needs range or sums over many elements stays in
float32: softmax, layer-norm statistics and the loss.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .data import Batch


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of the model; the defaults train in minutes on two CPU cores."""

    vocab_size: int
    length: int
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    dtype: str = "float16"


class Block(nn.Module):
    """One transformer layer: attention and feed-forward, layer norm before each."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, hidden] to the same."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        y = nn.LayerNorm(dtype=dtype, name="attention_LayerNorm")(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=config.heads,
            dtype=dtype,
            kernel_init=_normal,
            attention_fn=_attention,
            name="attention",
        )(y)
        y = nn.LayerNorm(dtype=dtype, name="mlp_LayerNorm")(x)
        y = nn.Dense(4 * config.hidden, dtype=dtype, kernel_init=_normal, name="up")(y)
        y = nn.gelu(y, approximate=False)
        return x + nn.Dense(
            config.hidden, dtype=dtype, kernel_init=_normal, name="down"
        )(y)


class Bert(nn.Module):
    """Predicts hidden tokens from the tokens around them."""

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, places: jax.Array) -> jax.Array:
        """Scores of every token at the chosen places.

        Args:
          tokens: int32 [batch, length].
          places: int32 [batch, chosen].

        Returns:
          float32 [batch, chosen, vocabulary].
        """
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        embed = nn.Embed(
            config.vocab_size,
            config.hidden,
            dtype=dtype,
            embedding_init=_normal,
            name="word",
        )
        position = self.param("position", _waves, (config.length, config.hidden))
        x = embed(tokens) + position.astype(dtype)
        x = nn.LayerNorm(dtype=dtype, name="embedding_LayerNorm")(x)
        for i in range(config.layers):
            x = Block(config, name=f"layer_{i}")(x)
        x = jnp.take_along_axis(x, places[..., None], axis=1)
        x = nn.Dense(config.hidden, dtype=dtype, kernel_init=_normal, name="head")(x)
        x = nn.LayerNorm(dtype=dtype, name="head_LayerNorm")(
            nn.gelu(x, approximate=False)
        )
        bias = self.param("output_bias", nn.initializers.zeros, (config.vocab_size,))
        return embed.attend(x).astype(jnp.float32) + bias


_normal = nn.initializers.normal(0.02)


def _attention(query: Any, key: Any, value: Any, **_: Any) -> jax.Array:
    """[batch, length, heads, size], three times, to the same; softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query / query.shape[-1] ** 0.5, key)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _waves(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Sines and cosines, to be learned further: neighbours are alike from the start."""
    del key
    length, hidden = shape
    halves = jnp.arange(hidden // 2, dtype=jnp.float32)
    rates = 10000.0 ** (-2.0 / hidden * halves)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates
    return 0.02 * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


def loss_fn(model: Bert, params: Any, batch: Batch) -> jax.Array:
    """Mean cross-entropy of the hidden tokens in nats, float32[]."""
    logits: Any = model.apply({"params": params}, batch.tokens, batch.places)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return losses.mean()

#!/bin/sh
# What a GPU can confirm, in under five minutes on one: the tests marked `gpu`, the
# whole-step benchmark, and a float16 BERT that trains. Needs JAX with CUDA installed:
#   pip install -e '.[dev]' 'jax[cuda12]' && sh benchmarks/gpu.sh
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export JAX_PLATFORMS=cuda,cpu
out=${OUT:-runs/gpu}
mkdir -p "$out"
"$python" -m pytest -q -m gpu tests/test_gpu.py -p no:cacheprovider
timeout 120 "$python" -m benchmarks.loss_scale --optimizer adam --optimizer lamb \
  --tree "20 M in 60 leaves" --dtype float16 --markdown "$out/loss_scale.md"
rm -rf "$out/bert"
timeout 120 "$python" examples/bert_pretrain.py --out "$out/bert" --steps 200

#!/bin/sh
# install.sh packages: makes the virtual environment $VENV with all that examples, tests
#   and benchmarks need.
# install.sh compilers: adds the H100 and TPU compilers, which run without the chips.
set -eu
pip="$VENV/bin/python -m pip --disable-pip-version-check -q"

packages() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed, but $PYTHON is $("$PYTHON" -V 2>&1)." \
      "Name one: make test PYTHON=python3.12" >&2
    exit 1
  }
  "$PYTHON" -m venv "$VENV"
  $pip install --upgrade pip
  # shellcheck disable=SC2086 # PINS is a list
  $pip install -e '.[dev]' ${PINS:-}
}

compilers() {
  # Their wheels exist for Linux on x86-64; elsewhere the tests that need them say so.
  [ "$(uname -sm)" = "Linux x86_64" ] || return 0
  jax=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))')
  $pip install "jax[tpu]==$jax" ||
    echo "no TPU compiler for JAX $jax: its tests are skipped" >&2
  # Without dependencies: the compiler needs none of the CUDA libraries.
  $pip install --no-deps "jax-cuda12-plugin==$jax" "jax-cuda12-pjrt==$jax" \
    nvidia-cuda-nvcc-cu12 ||
    echo "no CUDA compiler for JAX $jax: its tests are skipped" >&2
}

"$1"

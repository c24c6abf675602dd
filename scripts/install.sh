#!/bin/sh
# Makes the virtual environment $VENV with all that tests, examples and benchmarks need.
set -eu
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Python 3.11 or newer is needed, but $PYTHON is $("$PYTHON" -V 2>&1)." \
    "Name one: make test PYTHON=python3.12" >&2
  exit 1
}
"$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check -q"
$pip install --upgrade pip
# shellcheck disable=SC2086 # PINS is a list
$pip install -e '.[dev]' ${PINS:-}

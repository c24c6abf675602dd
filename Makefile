# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# Versions to hold back, e.g. PINS="jax==0.10.0 jaxlib==0.10.0 optax==0.2.8".
PINS ?=
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench bench-reduce docs clean

## train a small BERT on real text; ARGS="--resume" goes on where it stopped
demo: $(STAMP)
	$(BIN)/python examples/bert_pretrain.py --out runs/bert $(ARGS)

## the whole test suite; ARGS="-k gate" picks
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

## whole steps against the same optimizer without scaling and against its peers
bench: $(STAMP)
	$(BIN)/python -m benchmarks.loss_scale

$(STAMP): pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" PINS="$(PINS)" sh scripts/install.sh
	touch $@

clean:
	rm -rf .venv* build dist docs/_build

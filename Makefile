# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# Versions to hold back, e.g. PINS="jax==0.10.0 jaxlib==0.10.0 optax==0.2.8".
PINS ?=
ARGS ?=
BIN := $(VENV)/bin
INSTALL := PYTHON="$(PYTHON)" VENV="$(VENV)" PINS="$(PINS)" sh scripts/install.sh

.PHONY: demo test lint bench clean

## train a small BERT on real text; ARGS="--resume" goes on where it stopped
demo: $(VENV)/.installed
	$(BIN)/python examples/bert_pretrain.py --out runs/bert $(ARGS)

## the whole test suite; ARGS="-k gate" picks
test: $(VENV)/.compilers
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

## whole steps, reductions and schedules against what a user would pick instead
bench: $(VENV)/.compilers
	$(BIN)/python -m benchmarks.loss_scale
	$(BIN)/python -m benchmarks.all_reduce
	$(BIN)/python -m benchmarks.schedule

$(VENV)/.installed: pyproject.toml scripts/install.sh
	$(INSTALL) packages
	touch $@

$(VENV)/.compilers: $(VENV)/.installed
	$(INSTALL) compilers
	touch $@

clean:
	rm -rf .venv* build dist

# `make run` and `make test` do all the set-up there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SCENARIO ?= scenarios/mixed.yaml

.PHONY: run test check lint types arrows format bench gpu wheel clean

run: $(READY)
	$(BIN)/schedbench run $(SCENARIO)

test: $(READY)
	$(BIN)/pytest -n 2 --dist loadgroup -q $(TESTS)

check: lint types arrows

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	set -o pipefail; $(BIN)/mypy | sed 's#\.typing/schedbench/##'

arrows: $(READY)
	PYTHONPATH=.typing $(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("schedbench needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

SHELL := /bin/bash

# `make run` and `make test` do all the set-up there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
USABLE := $(VENV)/.usable
READY := $(VENV)/.ready
SCENARIO ?= start
OUT ?= gpu-results

.PHONY: run test wide lowest mooncake fuzz soak mutations documents check lint types arrows format bench gpu wheel clean

run: $(USABLE)
	$(BIN)/schedbench run $(SCENARIO)

# Tests start many processes: their modules, and pytest's rewritten ones, are compiled once.
export PYTHONDONTWRITEBYTECODE :=

# Far more than any test takes, on a machine of a third of the speed too: one that hangs fails, and says where.
HANGS := --timeout 1200
# The tests of a file run in one process, because they share runs.
WORKERS := -n 2 --dist loadfile

test: $(READY)
	$(BIN)/pytest $(WORKERS) -q $(HANGS) $(TESTS)

# Every state of the ladder with every mode, cell by cell, the tests that start many processes, draw hostile input or
# repeat an experiment, and the runs of `make test` once more, watched for hazards: too long for each change, run whole
# by CI.
wide: $(READY)
	$(BIN)/pytest $(WORKERS) -q -m wide $(HANGS) $(WIDE) $(TESTS)
	$(BIN)/pytest $(WORKERS) -q --watch $(HANGS) tests/acceptance tests/robustness/test_failures_by_script.py

# The tests with the lowest versions that pyproject.toml admits, in an environment of their own; gigabytes of packages.
lowest:
	mkdir -p build/lowest
	sed -nE '1,/^\]/s/^ *"([A-Za-z0-9-]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml > build/lowest/versions.txt
	$(MAKE) test VENV=build/lowest/venv CONSTRAINTS=build/lowest/versions.txt

# A recorded trace, which lies beside the repository where there is one.
mooncake: $(READY)
	$(BIN)/pytest -q -m slow tests/acceptance/test_mooncake.py

# Hostile input and kills at random moments, other ones in every round; ends with the first finding.
MINUTES ?= 10
fuzz: $(READY)
	end=$$(( $$(date +%s) + 60 * $(MINUTES) )); while [ $$(date +%s) -lt $$end ]; do \
	  seed=$${SEED:-$$RANDOM}; echo "make fuzz SEED=$$seed"; \
	  $(BIN)/pytest -q --tb=short --hypothesis-profile=fuzz --hypothesis-seed=$$seed -m 'not slow' tests/robustness || exit 1; done

# A hundred thousand requests, and a sweep of a thousand cells that is killed: nothing is left behind, nothing is lost.
soak: $(READY)
	$(BIN)/pytest -q -s -m slow tests/robustness/test_soak.py tests/robustness/test_soak_sweep.py

# A quarter of an hour or more: places of the stream discipline taken away at random (docs/mutations.md).
SEED ?= 2026
COUNT ?= 18
mutations: $(READY)
	$(BIN)/python tests/mutations/draw.py --seed $(SEED) --count $(COUNT) $(DRAW)

# Result documents of all shipped scenarios, here and at an earlier commit: equal but for wording.
BASE ?= HEAD~1
documents: $(READY)
	$(BIN)/python tests/documents/same.py --base $(BASE) $(if $(RENAMED),--renamed $(RENAMED))

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

# What the tool itself costs; TRACE adds the head of a Mooncake trace. AGAINST=REF alternates with that commit, and GATE=1
# fails where a figure is worse by more than its noise.
ROUNDS ?= 5
TRACE ?= $(wildcard ../shared/data/mooncake_conversation_head1500.jsonl)
bench: $(READY)
	$(BIN)/schedbench bench $(if $(TRACE),--trace $(TRACE)) \
	  $(if $(AGAINST),--against $(AGAINST) --rounds $(ROUNDS)) $(if $(GATE),--gate) $(BENCH)

# The wheel, alone in an environment of its own, far from this checkout.
wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m pip wheel -q --no-deps -w dist .
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/python -m pip install -q -c constraints.txt dist/*.whl
	cd dist && venv/bin/schedbench --help > /dev/null && venv/bin/schedbench run decode_heavy --format csv

# VENV= takes PYTHON as it is, with nothing installed into it: docs/cuda.md.
gpu: $(if $(VENV),$(READY))
	$(if $(VENV),$(BIN)/python,PYTHONPATH=.typing$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)) -m schedbench.profiles.lab.gpu --out $(OUT) $(if $(ONLY),--only $(ONLY)) $(if $(DRY_RUN),--dry-run)

clean:
	rm -rf $(VENV) build dist *.egg-info

# What the command needs; what development needs besides.
$(USABLE): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("schedbench needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e .
	touch $@

$(READY): $(USABLE)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

SHELL := /bin/bash

# `make` lists the targets. They need python3 (3.11 or newer) with venv, make, and the package index.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= examples/stdlib.toml
TRAIN_FLAGS ?=
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

# The folders that are checked; the ones a young checkout lacks are left out.
CODE = $(wildcard src tests bench examples)
PYTEST = $(BIN)/python -m pytest
PYTEST_FLAGS ?=

# The bytecode of the tests is kept (git ignores it): without it each process of pytest rewrites every assertion again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install train soak readme-numbers test-doors test test-quick test-rest test-all test-unit lint format types layers bench clean device-test

help: ## list the targets
	@echo "usage: make TARGET"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-18s%s\n", $$1, $$2}'
	@echo
	@echo "variables: VENV=$(VENV) PYTHON=$(PYTHON) CONFIG=$(CONFIG) TRAIN_FLAGS='$(TRAIN_FLAGS)'"

install: $(STAMP) ## make the virtual environment, or bring it up to date with pyproject.toml

# The version is read from src, so installing again also follows a change there.
$(STAMP): pyproject.toml src/planetary/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "planetary needs Python 3.11 or newer, found " + sys.version.split()[0] + "; name another one with PYTHON=python3.12")'
	@echo "installing into $(VENV) (the first time takes a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[all,test]'
	@touch $@

train: $(STAMP) ## train the example model with two workers (the main job)
	$(BIN)/planetary train $(CONFIG) $(TRAIN_FLAGS)

# The type checker has one thread: the tests run beside it. Its line and theirs may come in either order.
test: $(STAMP) ## run every check, the quick tests, one compiled step and one killed process
	@$(MAKE) --no-print-directory -j 2 lint types layers test-quick

# Files at a time. Of the quick tests three, since some wait for sockets; of the others two: each compiles or starts
# processes, and more of them at once only take each other's time. tests/conftest.py puts the quick ones first.
PYTEST_FILES = $(PYTEST) -q --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

test-all: $(STAMP) ## run every test but soak, and no check
	$(PYTEST_FILES) -n 2

test-quick: $(STAMP) ## run the tests of `make test`, and no check
	$(PYTEST_FILES) -n 3 -m "not slow and not soak and not device"

test-rest: $(STAMP) ## run the tests of `make test-all` that `make test` leaves out
	$(PYTEST_FILES) -n 2 -m "slow and not soak and not device"

# In an environment with the extra `test-doors`; the first line says which library is missing.
test-doors: $(STAMP) ## run the tests against PyTorch, transformers, S3, trackers: needs '.[test-doors]' in VENV
	PLANETARY_DOORS=1 $(PYTEST_FILES) -n 2 -m "doors and not device"

soak: $(STAMP) ## run what `make test-all` has no time for: thousands of fault schedules, every gradient, ten minutes of churn
	$(PYTEST) -q -m soak $(PYTEST_FLAGS)
	PLANETARY_CHURN_S=600 $(PYTEST) -q -m processes tests/collectives/test_ring_churn.py $(PYTEST_FLAGS)

device-test: $(STAMP) ## run step, parity, mixture and a mixed run on every device of this machine, and print a table
	$(PYTEST) -q -rs -m device $(PYTEST_FLAGS) tests/runs/rounds/test_real_devices.py

test-unit: $(STAMP) ## run the tests that start no process and no compiler
	$(PYTEST) -q -m "not processes and not compiles and not soak and not device" $(PYTEST_FLAGS)

lint: $(STAMP) ## check style, format and the word list
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	@$(BIN)/python bench/language.py

format: $(STAMP) ## put the code into the project's format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

types: $(STAMP) ## check the types
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(STAMP) ## check that each package imports only from layers below it
	$(BIN)/lint-imports

bench: $(STAMP) ## run the measurements behind the README's numbers (see bench/README.md)
	@for script in bench/train_step.py bench/recovery.py bench/allreduce.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

readme-numbers: $(STAMP) ## measure every row of the README's table (about two hours; `--list` of the script has the parts)
	$(BIN)/python bench/readme_numbers.py

clean: ## remove the virtual environment and what checks and builds leave behind; keeps runs/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

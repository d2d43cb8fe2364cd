# Everything runs from a virtual environment that is made from pyproject.toml; only Python >= 3.11 is needed. Of the
# versions that autopar supports the newest one found is taken, for it gets the newest JAX.
#
#   make demo            the language model (ARGS="--steps 500 --optimizer sgd" passes flags on)
#   make demo-mpi        the same over 4 processes, its tables in the memory of the hosts (RANKS=2, ARGS as above,
#                        or ARGS=--ablation: its optimisations one by one)
#   make demo-memory     a small GPT with memories of n-grams, and without (ARGS="--memory hosts --compare")
#   make test            the tests           (ARGS="-k rules" passes flags on; ARGS="--every 3" runs a third of them)
#   make test-all        the same and those that take long: whole products of cases, many more random programs
#   make fuzz            random programs by fresh seeds (ARGS="--minutes 30"; CONTRIBUTING.md says more)
#   make test-versions   the tests on the newest of 3.13 and 3.12 that is found, and on 3.11
#   make bench           the benchmarks
#   make docs            the site, in docs/_build/html
#   make notebooks       runs the notebooks and stores what they show (ARGS=01_first_plan: that one)
#   make lint            ruff, basedpyright, import-linter

SHELL  := /bin/bash
PYTHON ?= $(shell .ci/find-python 3.13 3.12 3.11 3)
VENV   ?= .venv
ARGS   ?=
RANKS  ?= 4
BIN    := $(VENV)/bin

.PHONY: demo demo-mpi demo-memory test test-all fuzz test-versions bench docs notebooks lint clean

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/language_model.py $(ARGS)

demo-mpi: $(VENV)/.installed-demo $(VENV)/.installed-mpi
	$(BIN)/python -m autopar launch -n $(RANKS) examples/language_model_mpi.py $(ARGS)

demo-memory: $(VENV)/.installed-demo
	$(BIN)/python examples/ngram_memory.py $(ARGS)

# The tests on several devices need processes of their own. pytest's 5: ARGS selected no test there. A worker that has
# no tests left takes some of another's. Three of them, for some tests wait, for processes and for what these must notice.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
# Hundreds of processes are started: what Python compiles is kept, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-test
	$(PYTEST) $(ARGS) || test $$? = 5
	$(PYTEST) tests/devices $(ARGS) || test $$? = 5

test-all:
	$(MAKE) test ARGS='-m "long or not long" $(ARGS)'

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(ARGS)

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -b html $(ARGS) docs docs/_build/html

notebooks: $(VENV)/.installed-notebooks
	$(BIN)/python -m notebooks.execute $(ARGS)

lint: $(VENV)/.installed-lint $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test-versions:
	.ci/test-versions $(ARGS)

clean:
	rm -rf docs/_build .venv .venv-3.* .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# One stamp an extra, so that `make demo` fetches nothing that only the linters need. What is imported is compiled then.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile -e '.[$*]'
	@touch $@

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later (with its venv module) found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

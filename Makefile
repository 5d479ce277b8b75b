# Every target is a command, none a file: folders share the names serving, tuning, tests.
PYTHON ?= python3
LOCK ?= cpu
PY := .venv/bin/python
PORT ?=
JOBS_ADDRESS = $(or $(RAY_ADDRESS),http://127.0.0.1:8265)

# The .pth file that setup writes makes `python -m ...` work without this; it also serves an interpreter without one.
export PYTHONPATH := $(CURDIR)/platform:$(CURDIR)
export PYTHONUNBUFFERED := 1
# Nothing is sent to anyone unless the caller says otherwise.
export RAY_USAGE_STATS_ENABLED ?= 0
export MLFLOW_DISABLE_TELEMETRY ?= true

DATA = $(if $(DATASET),--dataset "$(DATASET)") $(if $(DATA_DIR),--data-dir "$(DATA_DIR)")
RUN = $(DATA) $(if $(RECIPE),--recipe "$(RECIPE)") $(foreach s,$(SET),--set "$(s)")

FAST_TESTS = $(wildcard tests/unit tests/property tests/contract tests/house tests/numerics tests/golden)
SLOW_TESTS = $(wildcard tests/integration tests/e2e)
CODE = platform pipelines serving tuning infra tests

.DEFAULT_GOAL := help
.PHONY: help setup pipeline serve tune test test-fast check format bench lineage submit clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo 'Variables: DATASET=name|spec.yaml DATA_DIR=folder RECIPE=name SET="a.b=c d.e=f" NAME= PORT= RAY_ADDRESS='

setup:  ## Make .venv from the lock (nothing is done while the lock is unchanged; LOCK=cuda for GPUs)
	@$(PYTHON) infra/bootstrap.py --lock infra/requirements/$(LOCK).txt

pipeline: setup  ## The whole loop: data, teacher, knowledge, students, gates, report (DATASET= DATA_DIR= RECIPE= SET=)
	@$(PY) -m pipelines run $(RUN)

serve: setup  ## Serve the champions over HTTP (DATASET= PORT=)
	@$(PY) -m serving $(if $(DATASET),--dataset "$(DATASET)") $(if $(PORT),--port "$(PORT)")

tune: setup  ## Sweep cheap variants and print the best as --set flags (DATASET= DATA_DIR= SET=)
	@$(PY) -m tuning sweep $(RUN)

test: setup  ## All tests: the fast ones first, then those that start Ray
	@$(PY) -m pytest $(FAST_TESTS)
	@$(PY) -m pytest $(SLOW_TESTS)

test-fast: setup  ## Only the tests that need no Ray
	@$(PY) -m pytest $(FAST_TESTS)

check: setup  ## Lint, format, types and the rules of the house
	@test ! -e platform/__init__.py || { echo 'platform/__init__.py shadows the standard library: remove it'; exit 1; }
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m ruff format --check $(CODE)
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/house

format: setup  ## Format the code and fix what can be fixed
	@$(PY) -m ruff check --fix $(CODE)
	@$(PY) -m ruff format $(CODE)

bench: setup  ## Run one benchmark and write its JSON (NAME=loop, DATA_DIR= a folder that holds kuairand/)
	@test -n "$(NAME)" || { echo 'make bench NAME=x with x one of: $(filter-out harness data_% quality_% throughput_%,$(notdir $(basename $(wildcard tests/benchmarks/[a-z]*.py))))'; exit 2; }
	@$(PY) -m tests.benchmarks.$(NAME) $(if $(DATA_DIR),--data-dir "$(DATA_DIR)")

lineage: setup  ## Print where a served model comes from (NAME=generated-gem)
	@$(PY) -m pipelines lineage "$(or $(NAME),generated-gem)"

submit: setup  ## Run the loop as a Ray job on a cluster (RAY_ADDRESS=http://head:8265)
	@$(PY) -m pipelines.submit --address "$(JOBS_ADDRESS)" -- run $(RUN)

clean:  ## Remove caches (runs/ and .venv stay)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/benchmarks/out
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

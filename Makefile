# Every target does all that it needs, from a clean clone, and is quick the second time.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-all lint format bench lock clean

setup: $(VENV)/.ready

# The lock is installed without resolving, so that what was tested is what is there. See "Install" in README.md.
$(VENV)/.ready: cpu.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --requirement cpu.lock || { \
	  echo 'The lock wants the CPU build of torch. Where your package index lacks it, see "Install" in README.md.' >&2; \
	  exit 1; }
	rm -rf overnight.egg-info
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/overnight score --input jobs/demo.jsonl --output out/demo --allow-errors

test: setup lint
	$(BIN)/python -m pytest -m "not slow" --durations=40

test-all: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	rm -rf out/bench && mkdir -p out/bench
	for name in $(filter-out report __init__,$(basename $(notdir $(wildcard tests/benchmarks/*.py)))); do \
	  $(BIN)/python tests/benchmarks/$$name.py --json out/bench/$$name.json || exit 1; \
	done
	$(BIN)/python tests/benchmarks/report.py out/bench/*.json --chart out/bench/figures.svg

lock: setup
	$(BIN)/python .ci/lock.py

clean:
	rm -rf $(VENV) out build *.egg-info

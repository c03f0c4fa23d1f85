# Two commands: `make run` (the whole pipeline on SmolLM2, CPU) and `make test`. Both set up .venv first, once.
PYTHON ?= python3
PARAMETERS ?= parameters/smollm2-cpu.yaml
BIN := .venv/bin
NO_BENCH := side_by_side kimi_target specforge_draft  # a part of others, and what makes a model or wants a run

.PHONY: setup run test lab lint bench lock

setup: .venv/.ready

.venv/.ready: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --compile-bytecode -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	touch $@

run: setup
	$(BIN)/eagle3 run $(PARAMETERS)

test: setup
	$(BIN)/python -m pytest

lab: setup
	$(BIN)/jupyter lab $(LAB_FLAGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify notebooks/*.ipynb

bench: setup
	set -e; for script in $(filter-out $(NO_BENCH:%=benchmarks/%.py), $(wildcard benchmarks/*.py)); do $(BIN)/python $$script; done

# After a change of dependencies in pyproject.toml: pin every version anew.
lock: setup
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links --extra dev pyproject.toml -o requirements.lock

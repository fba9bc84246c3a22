# Two commands do everything on a machine with Python >= 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# A step that is done leaves a stamp, so that a second run starts at once.
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
# Two processes share the tests; the one that is done first takes from the other.
TESTS_AT_ONCE := --numprocesses 2 --dist worksteal

.PHONY: demo test test-all lint types site wheel clean

demo: $(READY)
	$(BIN)/anyfit fit

test: lint types
	$(BIN)/python -m pytest $(TESTS_AT_ONCE)

test-all: lint types
	ANYFIT_TESTS=full $(BIN)/python -m pytest $(TESTS_AT_ONCE)

lint: $(READY_DEV)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

types: $(READY_DEV)
	$(BIN)/mypy

site: $(READY_DEV)
	$(BIN)/mkdocs build --strict

wheel: $(READY_DEV)
	$(BIN)/python -m hatchling build

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "anyfit needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(READY_DEV): pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY) $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint
.SECONDARY:

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/demo.py

# Every process loads TensorFlow (two take a third more processor time than one): no more than 4.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=loadgroup

# All tests on TensorFlow, then the contract suite and whole programs on the other backends; a sample of its
# combinations, or with `test-all` every one of them. Each suite runs whatever the others find, and
# the status tells of all.
test-all: OPTIONS := --whole
test test-all: $(VENV)/.installed-test
	@status=0; \
	KERAS_BACKEND=tensorflow $(PYTEST) $(OPTIONS) || status=1; \
	KERAS_BACKEND=jax $(PYTEST) $(OPTIONS) tests/core || status=1; \
	KERAS_BACKEND=torch $(PYTEST) $(OPTIONS) tests/core || status=1; \
	exit $$status

lint: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site in site/, from the docstrings and docs/. Needs no network once the packages are there.
.PHONY: docs
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Sdist and wheel, installed into an empty environment and used there.
.PHONY: package
package: $(VENV)/.installed-package
	$(BIN)/python tools/check_package.py

$(VENV)/.installed-%: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing keras_freeze[$*] into $(VENV); a few minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

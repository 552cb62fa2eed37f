PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint
.SECONDARY:

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/demo.py

# Every process loads TensorFlow (two take a third more processor time than one): no more than 4.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --maxprocesses=4

lint: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.installed-%: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing keras_freeze[$*] into $(VENV); a few minutes the first time."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

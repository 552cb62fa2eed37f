PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint
.SECONDARY:

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/demo.py

# Two processes at least pay for loading TensorFlow twice; on two cores they take 0.6 of the time.
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

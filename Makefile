PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-slow test-all lint
.SECONDARY:

# Many processes import the same: what is compiled for one serves all. That is a small part of what
# is installed; compiling all of it would take a third of the time of installing.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

help:  ## what each target is for
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-examples  ## three networks side by side, one of them frozen
	$(BIN)/python examples/demo.py

# Every process loads a backend: no more than 4. Whole files, which share fixtures, go to one
# process. Each suite runs whatever the others find, and the status tells of all. What is in which
# target: tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=loadfile --durations=25
FAST := -m "not slow and not exhaustive"
SLOW := -m "slow and not exhaustive"
# Not the files with most tests first: those that start processes have few, and take longest.
IN_ORDER := --no-loadscope-reorder
ALL := --hypothesis-profile=many

test: $(VENV)/.installed-test $(VENV)/.installed-keras-hub  ## what matters on all three backends: six to eight minutes on two cores
	@status=0; \
	KERAS_BACKEND=torch $(PYTEST) $(FAST) tests/unit tests/core || status=1; \
	KERAS_BACKEND=tensorflow $(PYTEST) $(FAST) tests/core tests/tensorflow || status=1; \
	KERAS_BACKEND=jax $(PYTEST) $(FAST) tests/core || status=1; \
	exit $$status

test-slow: $(VENV)/.installed-test $(VENV)/.installed-keras-hub  ## the paper's side, whole programs, other processes and devices
	@status=0; \
	KERAS_BACKEND=torch $(PYTEST) $(SLOW) $(IN_ORDER) tests/core tests/unit || status=1; \
	KERAS_BACKEND=tensorflow $(PYTEST) $(SLOW) $(IN_ORDER) \
	tests/end_to_end tests/tensorflow tests/paper tests/core || status=1; \
	KERAS_BACKEND=jax $(PYTEST) $(SLOW) tests/core/test_*jax*.py || status=1; \
	exit $$status

test-all: $(VENV)/.installed-test $(VENV)/.installed-keras-hub  ## every case of every test: an hour and a quarter on two cores
	@status=0; \
	KERAS_BACKEND=torch $(PYTEST) $(ALL) tests/unit tests/core || status=1; \
	KERAS_BACKEND=tensorflow $(PYTEST) $(ALL) tests || status=1; \
	KERAS_BACKEND=jax $(PYTEST) $(ALL) tests/core || status=1; \
	exit $$status

lint: $(VENV)/.installed-lint  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site in site/, from the docstrings and docs/. Needs no network once the packages are there.
.PHONY: docs
docs: $(VENV)/.installed-docs  ## the documentation, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Sdist and wheel, installed into an empty environment and used there.
.PHONY: package
package: $(VENV)/.installed-package  ## sdist and wheel, installed and used
	$(BIN)/python tools/check_package.py

$(VENV)/.installed-%: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing keras_freeze[$*] into $(VENV); a few minutes the first time."
	$(PIP) --editable '.[$*]'
	@touch $@

# Without what KerasHub asks for and its tests do not use, such as tensorflow-text, which allows one
# version of TensorFlow only.
$(VENV)/.installed-keras-hub: | $(VENV)/.installed-test
	$(PIP) --no-deps 'keras-hub==0.32.*' regex tokenizers
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

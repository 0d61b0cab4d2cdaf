# make copy       install, then train GATO on the copy task (minutes on two cores)
# make test       install, then lint, type-check and run the tests (15 minutes on two slow cores)
# make test-quick install, then lint, type-check and run a few minutes' part of the tests
# make test-long  install, then run the tests that make test leaves out because they take long
# make test-all   both, with the full product of options instead of a covering array
# make mutate     plant known mistakes in a copy, one by one; each must be caught (minutes)
# make docs       install, then build the pages of docs/ into docs/_build/html (3 minutes at most)
# make test-gpu   the tests that need a GPU
# make test-cuda  compile every backend for an H100, on any machine (installs JAX's CUDA plugin)
# make test-tpu   compile every backend for TPUs, on any machine (installs libtpu)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One process per core; a file stays in one process, so that its compilations are shared. In their
# order the long files of the experiments come first, and no core waits for one of them at the end.
PYTEST_FLAGS ?= --numprocesses=auto --dist=loadfile --no-loadscope-reorder

QUICK = tests/test_cells.py tests/test_export.py tests/test_foreign_cells.py tests/test_golden.py \
        tests/test_layers.py tests/test_package.py tests/test_scan.py tests/test_trees.py \
        tests/experiments

.PHONY: copy test test-quick test-long test-all mutate docs test-gpu test-cuda test-tpu lint

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[experiments,test]'
	touch $@

copy: $(VENV)/installed
	$(BIN)/python -m experiments.copy --cell=gato

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-quick: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(QUICK)

test-long: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --long

test-all: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --full

mutate: $(VENV)/installed
	$(BIN)/python -m tests.mutate

# Offline, and a warning is an error.
docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

test-gpu: $(VENV)/installed
	JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest tests/gpu

# The executables are for a GPU; the process runs on the CPU.
test-cuda: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[cuda]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -rP --numprocesses=auto tests/cuda

# The executables are for TPUs; the process runs on the CPU.
test-tpu: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[tpu]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -rP tests/tpu

# `make demo` and `make test` need nothing done by hand: they create .venv and install the pinned dependencies.
# PYTHON makes the virtual environment (3.11 or 3.12); for test-gpu it is the interpreter that runs the suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
TORCH := $(shell grep '^torch==' requirements.lock)
# Processes of the suite: one more than the cores of CI, since tests of failures wait for timeouts. Each takes 10 s to
# collect tests, and more to import torch.
JOBS ?= 3
# Processes of the GPU suite: they share one GPU, and spend their time compiling kernels.
GPU_JOBS ?= 8

# Else each process that the suite starts compiles our sources once more: 0.25 s of the planner's 1.5 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-long test-gpu lint format golden clean venv

venv: $(STAMP)

# torch comes first and alone, so that no other package can pull another build of it; then everything
# else at the versions of requirements.lock, and the project itself (editable) without resolving anything.
# Modules are compiled as they are imported, and those of torch and the planner here: where PYTHONDONTWRITEBYTECODE is
# set, each command else takes 2 s more. To compile all packages takes 24 s.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "Python 3.11 or 3.12 is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint requirements.lock $(TORCH)
	$(INSTALL) -r requirements.lock
	$(INSTALL) --no-deps --no-build-isolation --editable .
	$(BIN)/python -c 'import torch'
	$(BIN)/infcl-gen plan --batch-size 64 --dim 64 --target cpu --json >/dev/null
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# The nightly tier: what it adds to `test` stands in tests/tiers.py.
test-long: $(STAMP)
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu" --timeout 3600

test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -q -m gpu -n $(GPU_JOBS) --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in docs/_build/html; a warning is an error.
docs: $(STAMP)
	$(BIN)/python docs/tables.py --check
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What is committed of templates: packages, and what their kernels take.
golden: $(STAMP)
	$(BIN)/python -m tests.emission.golden
	$(BIN)/python -m tests.compiled

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

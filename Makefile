# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format clean

demo: $(READY)
	$(BIN)/mxd demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Exact versions from constraints.txt. torch comes first, alone and pinned: a range would let another package
# pull a build with gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mxd needs Python 3.11 or newer, got " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache

# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv first.
# `make test-all` also runs the long tests: launches of many processes, killed runs, whole commands.
# The tests of the report's page need a Chromium and are skipped without; `make browser` installs one where it can.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HAS_BROWSER := $(PYTHON) -c 'import sys; sys.path.insert(0, "tests/report"); import chromium; sys.exit(not chromium.find_browser())'

.PHONY: demo test test-all browser check format docs tutorials dist release-layers clean

demo: $(READY)
	$(BIN)/mxd demo

# Or every process of the tests would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test: $(READY)
	$(PYTEST) -m "not long"

test-all: test
	$(PYTEST) -m long

# Only as root and from the system's own packages, and never a reason to fail: without a browser its tests are skipped.
browser:
	@$(HAS_BROWSER) || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium fonts-liberation >/dev/null; } || true
	@$(HAS_BROWSER) && echo "browser: ready" || \
		echo "browser: none, its tests will be skipped; as root: apt-get install chromium, or install Google Chrome"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py tests/test_docstrings.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation's site, in site/; a broken link is an error.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# What the tutorials print, written into them anew.
tutorials: $(READY)
	$(BIN)/python scripts/run_tutorials.py

# Wheel and sdist, each tried in an empty environment outside of this folder.
dist: $(READY)
	rm -rf dist build
	$(BIN)/python -m build
	$(PYTHON) scripts/check_dist.py dist/*.whl dist/*.tar.gz

# The layers that are attached to a release, with their cards.
release-layers: $(READY)
	$(BIN)/python scripts/release_layers.py

# Exact versions from constraints.txt. torch comes first, alone and pinned: a range would let another package
# pull a build with gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mxd needs Python 3.11 or newer, got " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache

# Each target prepares .venv on first use. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations=30
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))

# Many short processes import torch: let the first of them keep what it compiled (pip did not, see --no-compile).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-oldest tests lint style format notebooks docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       profile this machine, plan, run; predicted beside measured"
	@echo "make test       lint, types and the test suite: a few cases of every kind"
	@echo "make test-all   the same with every case, for a release and for what you changed"
	@echo "make test-oldest  the test suite with the lower bounds of pyproject.toml, in .venv-oldest (5 GB)"
	@echo "make lint       ruff check, ruff format --check, mypy"
	@echo "make format     ruff's fixes and format, applied"
	@echo "make notebooks  execute notebooks/*.ipynb again and save them"
	@echo "make docs       build the site from docs/ into build/site"
	@echo "make clean      remove .venv, .venv-oldest and the tools' caches"

demo: $(VENV)/.demo
	$(BIN)/halopipe demo

# mypy is one of the tests (tests/test_types.py): it takes one core, and others run tests meanwhile.
test: style tests

tests: $(VENV)/.installed
	$(PYTEST)

test-all: style
	$(PYTEST) --all-cases

# Linters and type checkers are those of constraints.txt: what older ones say is no fault of the code.
test-oldest: build/constraints-oldest.txt
	PYTEST_ADDOPTS=--ignore=tests/test_types.py $(MAKE) tests VENV=.venv-oldest CONSTRAINTS=$<

build/constraints-oldest.txt: pyproject.toml tests/lower_bounds.py
	@mkdir -p $(@D)
	$(PYTHON) tests/lower_bounds.py > $@.part && mv $@.part $@

style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.installed
	$(if $(NOTEBOOKS),$(BIN)/python notebooks/execute.py $(NOTEBOOKS),@echo "no notebooks/*.ipynb here")

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-oldest build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp is written last, so an installation that was cut short is taken up again. The demonstration needs less than
# the tests: where those are installed, it has all it needs.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(call install,test)
	@touch $(VENV)/.demo $@

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS)
	$(call install,demo)
	@touch $@

define install
	@command -v $(PYTHON) >/dev/null || { echo "halopipe: '$(PYTHON)' not found; try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("halopipe: Python 3.11 or newer is needed, but $(PYTHON) is %d.%d; try: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile -c $(CONSTRAINTS) -e '.[$(1)]'
endef

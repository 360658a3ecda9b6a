# Everything runs in .venv, which is made on first use and again when the dependencies change.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SOURCES := fedmerge tests benchmarks examples

.PHONY: help demo test test-all check docs docs-check format bench fuzz clean

help:
	@echo "make demo    train small clients on scikit-learn's digits, merge their files, compare"
	@echo "make test    the quick tests, a few minutes; slow ones are left out"
	@echo "make test-all  all tests"
	@echo "make check   format check, ruff, mypy --strict, all tests"
	@echo "make bench   benchmarks next to their bars; BENCH=--all for the slow ones too"
	@echo "make fuzz    damaged and hostile files by the thousand; FUZZ='--files 20000' for more"
	@echo "make docs    the documentation as a site, in site/; warnings are errors"
	@echo "make docs-check  run all blocks of the how-to pages, which takes minutes"
	@echo "make format  format and fix what ruff can fix"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/fedmerge demo

test: $(STAMP)
	@echo "without the slow tests, which make test-all runs"
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(MAKE) --no-print-directory test-all

format: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

docs-check: $(STAMP)
	$(BIN)/python -m tests.pages docs/tutorial.md docs/how-to/*.md docs/reference/api.md

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

fuzz: $(STAMP)
	$(BIN)/python -m benchmarks.fuzz $(FUZZ)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output fuzz-broken site *.egg-info

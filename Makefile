# The same scripts as in CI, with the environment made first. Stamps in .venv make each install run once.
VENV := .venv
PYTHON ?= python3
INPUTS := pyproject.toml constraints.txt
unexport VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help venv develop demo test test-all lint check docs bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

venv: $(VENV)/.stamp-core ## .venv with the package in it

develop: $(VENV)/.stamp-dev ## .venv with the tools of developers, too

demo: $(VENV)/.stamp-core ## run the bundled models: nothing else to download
	@scripts/demo

test: $(VENV)/.stamp-test ## the tests, without the long ones
	scripts/test -m "not slow"

test-all: $(VENV)/.stamp-test ## all tests: long laws, training and browser tests too, with types checked at run time
	CHECK_TYPES=1 scripts/test

lint: $(VENV)/.stamp-dev ## format, style, architecture, types
	scripts/lint

check: $(VENV)/.stamp-dev ## lint and tests
	scripts/check

docs: $(VENV)/.stamp-dev ## the site, into build/site
	scripts/docs

bench: $(VENV)/.stamp-core ## compare the speed-up with the recorded one: a minute
	scripts/bench

clean: ## remove .venv and everything that tools have left
	rm -rf $(VENV) build dist .cache .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find src tests extras -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-core: $(INPUTS)
	@PYTHON=$(PYTHON) scripts/install
	@touch $@

$(VENV)/.stamp-test: $(INPUTS)
	@PYTHON=$(PYTHON) scripts/install test
	@touch $@ $(VENV)/.stamp-core

$(VENV)/.stamp-dev: $(INPUTS)
	@PYTHON=$(PYTHON) scripts/install dev
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-core

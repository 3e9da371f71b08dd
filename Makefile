# Everything a person or a CI does here. The first command of a fresh clone does all set-up; nothing is asked.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help demo test check unit integration bench venv java docker clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: java ## a whole cluster on this machine, a file through it, a planned move in the middle
	.venv/bin/roq demo

test: java ## checks, then unit, model and integration tests
	tools/test.sh

check: venv ## format, lint, types, import arrows
	tools/check.sh

unit: venv ## unit and model tests only
	.venv/bin/python -m pytest tests/unit tests/model

integration: java ## integration tests only
	.venv/bin/python -m pytest tests/integration

bench: java ## RoQ and its peers side by side
	.venv/bin/python -m benchmarks

venv: ## the virtual environment .venv with the pinned packages
	@tools/setup.sh python

java: venv
	@tools/setup.sh java

docker: # needed by tests of a later version only
	@tools/setup.sh docker

clean: ## remove what was built here
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

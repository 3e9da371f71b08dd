# Everything a person or a CI does here. The first command of a fresh clone does all set-up; nothing is asked.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help demo test test-all test-rest check unit simulation integration spark interop failure bench docs image venv java spin servers docker clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: venv ## a whole cluster on this machine, a file through it, a planned move in the middle
	.venv/bin/roq demo

test: java spin servers ## checks, unit and model tests, and the quick ones of all other kinds: ten minutes
	tools/test.sh quick

test-all: java spin servers ## checks and every test, once
	tools/test.sh all

test-rest: java servers ## the tests that `make test` leaves out
	tools/test.sh rest

check: venv ## format, lint, types, import arrows
	tools/check.sh

unit: venv spin ## unit and model tests only
	@tools/pytest.sh unit

simulation: venv ## all simulated clusters, and nothing else
	@tools/pytest.sh simulation

integration: java servers ## integration tests only
	@tools/pytest.sh integration

spark: java ## tests of Spark's sources and sinks only, with a real PySpark
	@tools/pytest.sh spark

interop: java ## tests in environments of their own only: python-task-queue on our folder; the wheel with each extra
	@tools/setup.sh interop
	@tools/pytest.sh interop

failure: java ## failure tests only: clusters of containers (Docker is installed and started when missing and root)
	tools/failure.sh

docs: venv ## the documentation as a site in build/site; warnings are errors
	.venv/bin/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/site
	@printf 'docs: build/site/index.html\n'

image: java docker ## the container images: roq:latest, for docker/compose.yaml and others; roq-test:latest, for roq.testing
	@.venv/bin/python tools/image.py
	@tools/docker.sh compose

bench: java ## RoQ and its peers side by side
	.venv/bin/python -m benchmarks

venv: ## the virtual environment .venv with the pinned packages
	@tools/setup.sh python

java: venv
	@tools/setup.sh java

spin: venv
	@tools/setup.sh spin

servers:
	@tools/setup.sh servers

docker:
	@tools/docker.sh start

clean: ## remove what was built here
	rm -rf .venv .venv-interop build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

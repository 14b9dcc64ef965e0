# Commands for a checkout. Each first installs its dependencies into .venv. The second time is quick:
# it installs again only after pyproject.toml or constraints.txt changes.
#
# PYTHON        the interpreter for .venv (3.11 or newer)
# ARGS          further arguments: `make test ARGS="tests/unit -k journal"`
# KILLS         how often `make soak` kills, stops or disconnects a part of a farm
# JOBS          number of processes that run tests
# SECONDS       duration of `make fuzz`
# TUNEMQ_CACHE  folder of the MinIO server for tests, for all checkouts of this machine

PYTHON ?= python3
ARGS ?=
JOBS ?= 4
SECONDS ?= 300
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml constraints.txt

# Tests start thousands of interpreters. With this variable, each would compile TuneMQ's modules again.
unexport PYTHONDONTWRITEBYTECODE

export TUNEMQ_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tunemq
# The last version of the project, which publishes no binaries of it.
MINIO_VERSION := v0.0.0-20260212201848-7aac2a2c5b7c
MINIO := $(TUNEMQ_CACHE)/minio-$(MINIO_VERSION)

.DEFAULT_GOAL := help
.PHONY: help demo test verify compose soak deployments fuzz defences minio check format bench lock clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.examples  ## tune a classifier of handwritten digits; about half a minute
	$(BIN)/python examples/digits.py

# Some tests take a minute: worksteal moves tests from busy processes to idle ones.
PARALLEL := -n $(JOBS) --dist worksteal

test: $(VENV)/.test  ## run quick tests of all parts, with real processes, Redis and S3: under five minutes
	TUNEMQ_TEST_STORE=rclone $(BIN)/python -m pytest $(PARALLEL) $(or $(ARGS),tests/unit @tests/quick.txt)

verify: check $(VENV)/.test minio compose  ## run checks and all tests with a real MinIO; build images with Docker
	$(BIN)/python -m pytest $(PARALLEL) --durations=50 $(ARGS)

# MinIO's image takes minutes: `make deployments` builds and runs all images.
compose:  ## check docker-compose.yml and build TuneMQ's images, if Docker is here
	@if docker compose version > /dev/null 2>&1 && docker info > /dev/null 2>&1; then \
		docker compose --profile gpu --profile grafana config --quiet && \
		docker compose --profile gpu build scheduler worker worker-gpu; \
	else echo "Docker not found: skipping its files and images."; fi

soak: $(VENV)/.test minio  ## run tests that take minutes each; KILLS=300: kill all parts of a farm in turn
	$(if $(KILLS),$(BIN)/python -m tests.soak.__main__ --kills $(KILLS),$(BIN)/python -m pytest $(PARALLEL) -m soak) $(ARGS)

deployments: $(VENV)/.test minio  ## run each deployment of docs/deploy for which Docker, systemd or Helm is here
	$(BIN)/python -m pytest -n 0 -m deploy tests/deploy $(ARGS)

fuzz: $(VENV)/.test  ## feed every decoder absurd input for five minutes, or for SECONDS=60
	$(BIN)/python -W error -m tests.fuzz --jobs $(JOBS) --seconds $(SECONDS) $(ARGS)

defences: $(VENV)/.test minio  ## remove each defence from a copy of the code in turn: a test has to fail
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ARGS)

minio:  ## build the MinIO server for tests, once; takes minutes and needs Go
	@if [ -x '$(MINIO)' ]; then exit 0; fi; \
	if ! command -v go > /dev/null; then \
		echo "Go not found, which builds MinIO: tests use rclone instead." >&2; exit 0; fi; \
	echo "Building MinIO, once for all checkouts, into $(TUNEMQ_CACHE) ..."; \
	begin=$$(date +%s); mkdir -p '$(TUNEMQ_CACHE)' && \
	into=$$(mktemp -d '$(TUNEMQ_CACHE)/build.XXXXXX') && trap 'rm -rf "$$into"' EXIT && \
	GOBIN="$$into" go install github.com/minio/minio@$(MINIO_VERSION) && \
	mv "$$into/minio" '$(MINIO)' && echo "Built MinIO in $$(($$(date +%s) - begin)) s."

check: $(VENV)/.check  ## check formatting, lint, types, import rules, sizes, phrases, the parity list
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/parity.py --check
	$(BIN)/python tools/check_structure.py
	$(BIN)/python tools/check_phrases.py
	@git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 800 \
		{print $$2 ": " $$1 " lines; the limit is 800: split it"; bad = 1} END {exit bad}'

format: $(VENV)/.check  ## format the code, apply lint's fixes, update the parity list
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/python docs/parity.py

bench: $(VENV)/.test  ## run benchmarks, compared with Ray Tune if it is installed
	$(BIN)/python -m benchmarks $(ARGS)

parity: $(VENV)/.test  ## compare trial schedulers with references and Ray Tune's (in build/)
	@test -x build/ray/bin/python || $(PYTHON) -m venv build/ray
	@build/ray/bin/python -m pip install --quiet 'ray[tune]==2.60.*' 'scikit-learn>=1.5'
	@build/ray/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	build/ray/bin/python -m tests.ray_tune.compare_schedulers $(ARGS)
	build/ray/bin/python -m tests.ray_tune.compare_pbt $(ARGS)
	$(BIN)/pytest --hypothesis-profile=thorough tests/unit/scheduler/schedulers

lock:  ## update constraints.txt to the newest versions that pyproject.toml allows
	@$(PYTHON) -m venv --clear build/lock
	@build/lock/bin/python -m pip install --quiet 'pip>=25.1'
	@build/lock/bin/python -m pip install --quiet --editable '.[examples]' --group test --group check
	@{ sed -n '/^#/p' constraints.txt; \
		build/lock/bin/python -m pip freeze --exclude-editable; } > build/lock/new
	@mv build/lock/new constraints.txt && rm -rf build/lock

clean:  ## remove .venv, build results and caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# pip before 25.1 does not support dependency groups.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TuneMQ needs Python 3.11 or newer, not $(PYTHON): run make PYTHON=python3.12" >&2; exit 1; }
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'pip>=25.1'
	@touch $@

$(VENV)/.examples: $(VENV)/.python $(SOURCES)
	@echo "Installing the dependencies of examples into $(VENV) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.python $(SOURCES)
	@echo "Installing the dependencies of tests into $(VENV) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[examples]' --group test
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "Installing the dependencies of checks into $(VENV) ..."
	@$(PIP) install --constraint constraints.txt --group check
	@touch $@

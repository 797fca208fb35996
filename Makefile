# Needs Python 3.11 or newer and make. `make` alone lists what can be made.

PYTHON ?= python3
VERSION ?= 2.11.0
JOBS ?= 3
ARGS ?=

BIN := .venv/bin
OTHER := .venvs/torch-$(VERSION)
CLIENTS := .venv-clients/bin

# Bytecode is kept, whatever the environment says: a dozen processes of the tests would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help programs demo test test-house test-all test-examples test-rest test-faults test-mutants lint test-torch test-cluster test-browser test-clients client-tests docs faults faults-checkpoint \
  faults-launcher faults-engines bench bench-cpu bench-checkpoint bench-pipeline clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter of a new environment; ARGS='tests/unit -x' goes to pytest; JOBS=8 runs more at once."

# torch comes first and alone: it is the largest by far, and setuptools must be there to install the package itself.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $@

# The clients have an environment of their own, so that everything else is tested without them.
.venv-clients/ready: pyproject.toml constraints.txt constraints-clients.txt
	test -x $(CLIENTS)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(CLIENTS)/python -m pip install --quiet --constraint constraints.txt --constraint constraints-clients.txt \
	  --no-build-isolation pytest pytest-timeout pytest-xdist --editable ".[all-clients]"
	touch $@

# Only for those who have a checkout of a client: what its own tests import beyond the clients.
.venv-clients/ready-for-own-tests: .venv-clients/ready
	$(CLIENTS)/python -m pip install --quiet --constraint constraints.txt --constraint constraints-clients.txt \
	  --no-build-isolation --editable ".[client-tests]"
	touch $@

# Another torch may want another setuptools; all else stays as it is.
$(OTHER)/ready: pyproject.toml constraints.txt
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -v -E '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt "setuptools>=77" torch==$(VERSION)
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt --no-build-isolation \
	  torch==$(VERSION) --editable ".[dev]"
	touch $@

programs: ## install what the tests of the cluster and the browser need, where this is root on Debian
	sh tests/cluster/install.sh
	sh tests/browser/install.sh

demo: .venv/ready ## train a small language model on two ranks of this machine, in two to four minutes
	$(BIN)/python examples/demo.py

# What `make test` has; ARGS='tests/unit/config -x' takes the place of these.
SHORT := tests/house tests/unit tests/ranks tests/parity tests/drop_in tests/device
PYTEST = -m pytest -n $(JOBS) --dist loadgroup

# .ci/run says what it has run already.
test: .venv/ready ## the tests of every promise, in eight to thirteen minutes on two cores; see docs/testing.md
	$(BIN)/python $(PYTEST) $(or $(ARGS),$(filter-out $(PASSED),$(SHORT)))

test-house: .venv/ready ## the architecture itself, in seconds
	$(BIN)/python -m pytest -x tests/house

test-all: ## test, and all there is beyond it: what `.ci/run` has after lint and house; FULL=1 for every combination, in hours
	@bash tests/all.sh test test-rest test-examples test-clients test-cluster+test-browser+test-mutants test-faults

test-examples: .venv/ready ## the examples, and the code of the documents that they belong to
	BREADTH=all $(BIN)/python $(PYTEST) tests/examples

test-rest: .venv/ready ## what test leaves out, and of parity every value once more; FULL=1 for every combination
	BREADTH=rest $(BIN)/python $(PYTEST) $(SHORT)

test-mutants: .venv/ready ## break a dozen lines of the core, one by one, and see the tests of `make test` notice
	$(BIN)/python tests/mutate.py $(ARGS)

test-faults: .venv/ready ## a seeded part of `make faults`; FULL=1 for all of it
	$(if $(FULL),BREADTH=all) $(BIN)/python $(PYTEST) tests/faults
	$(if $(FULL),PYTHONPATH=src:tests $(BIN)/python -m faults.table)
	$(if $(FULL),PYTHONPATH=src:tests $(BIN)/python -m faults.engines)
	$(if $(FULL),PYTHONPATH=src:tests $(BIN)/python -m faults.launcher.figures)

lint: .venv/ready ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src compat

test-torch: $(OTHER)/ready ## all tests with another torch: make test-torch VERSION=2.11.0
	$(OTHER)/bin/python $(PYTEST) $(or $(ARGS),$(SHORT))

test-cluster: .venv/ready ## every back end on hosts made of network namespaces; installs what it needs when it is root
	sh tests/cluster/install.sh
	BREADTH=all CLUSTER=1 $(BIN)/python -m pytest -rs tests/cluster

test-browser: .venv/ready ## the page of `mizzen watch` in headless Chromium, which it installs when it is root; in about four minutes
	sh tests/browser/install.sh
	BREADTH=all BROWSER=1 $(BIN)/python -m pytest -rs tests/browser $(ARGS)

test-clients: .venv-clients/ready ## HF Trainer, Accelerate, Lightning, TRL and PEFT, unmodified, on two ranks; in about five minutes
	BREADTH=all CLIENTS=1 $(CLIENTS)/python -m pytest -n 2 --dist loadfile -rs --durations=8 tests/clients tests/unit/rewrite/test_head.py $(ARGS)

client-tests: .venv-clients/ready-for-own-tests ## a client's own tests, from its checkout: CLIENT_SRC=../accelerate ARGS='tests/deepspeed'
	$(CLIENTS)/python tests/clients/own_tests.py $(CLIENT_SRC) $(ARGS)

docs: .venv/ready ## regenerate docs/config.md from the configuration's own words
	$(BIN)/python -m mizzen.cli config docs > docs/config.md.new
	mv docs/config.md.new docs/config.md

faults: faults-checkpoint faults-launcher faults-engines ## every fault of saves and of jobs, counted, in about half an hour

faults-checkpoint: .venv/ready ## break saves in every way and show what is left of them; see docs/checkpoints.md
	PYTHONPATH=src:tests $(BIN)/python -m faults.table $(ARGS)

faults-launcher: .venv/ready ## kills, hangs, preemptions and ports; FULL=1 for ten times as many; see docs/launcher.md
	PYTHONPATH=src:tests $(BIN)/python -m faults.launcher.figures $(ARGS)

faults-engines: .venv/ready ## a hundred engines in a row, and what they leave behind; see docs/training.md
	PYTHONPATH=src:tests $(BIN)/python -m faults.engines $(ARGS)

bench: bench-cpu bench-checkpoint bench-pipeline ## mizzen beside its peers on two CPU ranks, in about seven minutes; see docs/bench.md

bench-cpu: .venv/ready ## steps of a small GPT
	$(BIN)/python -m bench.cpu_ranks $(ARGS)

bench-pipeline: .venv/ready ## two stages beside torch.distributed.pipelining
	$(BIN)/python -m bench.pipeline $(ARGS)

bench-checkpoint: .venv/ready ## saving and loading 200 M parameters beside torch's own checkpoints; needs 8 GB of memory
	$(BIN)/python -m bench.checkpoint $(ARGS)
	$(BIN)/python -m bench.checkpoint --planning

clean: ## remove everything that was made here
	rm -rf .venv .venvs .venv-clients build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf compat/build compat/*.egg-info compat/deepspeed/__pycache__ compat/deepspeed/faces/__pycache__ compat/deepspeed/table/__pycache__

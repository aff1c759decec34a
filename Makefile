# Everything starts here: `make` lists what there is. Needs Python 3.11 or later with venv and pip.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Most tests wait for processes rather than work, so a few files run at once; JOBS=0 for one by one.
SIDE_BY_SIDE := -n $(or $(JOBS),2) --dist loadfile --no-loadscope-reorder
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-deps

.DEFAULT_GOAL := help
.PHONY: help venv demo up test check check-format check-lint check-types check-stubs check-oldest \
        proto proto-released bench bench-peers chaos clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/.installed ## install Tocsin and its tools, exactly as locked, into .venv

demo: .venv/.installed ## three nodes, a crontab, a killed leader, a frozen worker: about a minute
	$(BIN)/tocsin demo

up: .venv/.installed ## start all nodes of cluster.yaml on this machine; Ctrl-C stops them
	$(BIN)/tocsin up -c cluster.yaml

test: .venv/.installed .tools/interop/.installed ## run the tests; ARGS='-k lease' passes options to pytest
	$(BIN)/python -m pytest tests --ignore=tests/chaos $(SIDE_BY_SIDE) $(ARGS)

check: check-format check-lint check-types check-stubs check-oldest ## format, lint, types, stubs

check-format: .venv/.installed
	$(BIN)/ruff format --check .

check-lint: .venv/.installed
	$(BIN)/ruff check .

check-types: .venv/.installed
	$(BIN)/mypy
	MYPYPATH=examples $(BIN)/mypy examples

# The committed stubs are what the generator writes from proto/ today, and nothing else.
check-stubs: .tools/grpcio-tools/.installed .tools/mypy-protobuf/.installed
	rm -rf build/stubs
	scripts/generate_stubs.sh build/stubs
	@diff -r -x __pycache__ -x __init__.py build/stubs/tocsin/v1 client/tocsin/v1 \
	  || { echo 'stubs are not what proto/ says: run make proto' >&2; exit 1; }

# Beside .venv, which has the newest versions: the package and its stubs import on the oldest ones.
check-oldest: .tools/oldest/.installed
	PYTHONPATH=client .tools/oldest/bin/python -W error -c \
	  'from tocsin.v1 import cluster_pb2_grpc, fence_pb2_grpc, job_pb2_grpc, queue_pb2_grpc, run_pb2_grpc, worker_pb2_grpc'

proto: .tools/grpcio-tools/.installed .tools/mypy-protobuf/.installed ## generate the stubs again
	scripts/generate_stubs.sh client

proto-released: .venv/.installed ## with a release: note what later protos may only add to
	$(BIN)/python scripts/save_released_protos.py tests/data/released.binpb

bench: .venv/.installed ## measure a cluster at small sizes and print the table (ten minutes)
	$(BIN)/python -m bench

bench-peers: .venv/.installed .tools/peers/.installed ## compare with other queues; SIZES='--graphile 100000'
	$(BIN)/python -m bench.peers $(SIZES)

# Each of these tests says how to play a failing seed again.
chaos: .venv/.installed ## faults on purpose with three seeds, random tests 20 times larger: an hour
ifdef SIM
# The Raft layer on virtual time: new histories for MINUTES=10.
	$(BIN)/python -m tests.sim.chaos
else ifdef RAFT
# The Raft layer alone: a hundred kills of 3 and of 5 nodes, damage, cuts; half an hour.
	$(BIN)/python -m pytest tests/chaos/test_raft.py -s $(ARGS)
else
	@mkdir -p build
# The table comes at the end, whatever the random tests find.
	@set -x; failed=; \
	TOCSIN_HISTORIES=$${TOCSIN_HISTORIES:-20} TOCSIN_ZONES=$${TOCSIN_ZONES:-600} \
	TOCSIN_ORACLE_COMPARISONS=$${TOCSIN_ORACLE_COMPARISONS:-400000} TOCSIN_FUZZ=$${TOCSIN_FUZZ:-20} \
	  $(BIN)/python -m pytest $(wildcard tests/properties tests/chaos) --ignore=tests/chaos/test_raft.py \
	  tests/clock/test_histories.py tests/schedule/test_oracle.py tests/schedule/test_zone.py \
	  tests/api/test_bad_input.py $(SIDE_BY_SIDE) --dist worksteal $(ARGS) || failed=1; \
	$(BIN)/tocsin verify --all --seeds $${SEEDS:-3} --at-once $(or $(filter-out 0,$(JOBS)),$(if $(JOBS),1,2)) \
	  --json build/chaos.json --html build/chaos.html || failed=1; \
	[ -z "$$failed" ]
endif

clean: ## remove what make made: environments, caches, build output
	rm -rf .venv .tools build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find client node tests bench scripts -name __pycache__ -prune -exec rm -rf {} +

# The lock has the build tool too, so building needs nothing that is not locked.
.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -r requirements.lock
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --editable .
	$(BIN)/python -m pip check --quiet
	@touch $@

# For the client in another language; without npm its test is skipped, and says so.
.tools/interop/.installed: tests/interop/package.json tests/interop/package-lock.json
	rm -rf $(@D)
	mkdir -p $(@D)
	cp $^ $(@D)
	if command -v npm >/dev/null; then npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund \
	  || echo "npm could not install them: the test in another language is skipped" >&2; fi
	@touch $@

# What the benchmarks compare with; what cannot be installed is told as missing.
.tools/peers/.installed: bench/peers/package.json bench/peers/package-lock.json bench/peers/requirements.lock
	rm -rf $(@D)
	mkdir -p $(@D)
	cp $^ $(@D)
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python $(PIP_INSTALL) -r $(@D)/requirements.lock \
	  || { rm -rf $(@D)/venv; echo "Celery and Redis could not be installed" >&2; }
	if command -v npm >/dev/null; then npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund \
	  || echo "graphile-worker could not be installed" >&2; fi
	@touch $@

.tools/grpcio-tools/.installed: proto/tools.lock
.tools/mypy-protobuf/.installed: proto/mypy-protobuf.lock
.tools/oldest/.installed: proto/oldest.lock
.tools/%/.installed:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

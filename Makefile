# Every command of the project. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Images like to set it. Then each of the many processes of a test run would compile torch's Python again, 3 s each.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
READY := .venv/.ready
UP_READY := .venv/.up
LOADGEN := .cache/guidellm/.ready
LITELLM := .cache/litellm/.ready
CLIENTS := .cache/clients/.ready
AUDIT := .cache/audit/.ready
LOCKS := $(shell grep -l -e --hash= requirements/*.txt)
PIP_AUDIT = .cache/audit/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off \
	$(addprefix --ignore-vuln ,$(shell sed '/^\#/d; s/ .*//' requirements/accepted-advisories.txt))
# A cluster of the user's, as e2e.cluster.foreign_kubeconfig has it: empty where KUBECONFIG names our own.
FOREIGN := $(filter-out $(abspath .cluster/kubeconfig),$(abspath $(KUBECONFIG)))
COMPILE = .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	--generate-hashes --no-emit-index-url --no-annotate --no-header --constraint requirements/floors.txt

.PHONY: help setup up down check unit kernels test unit-deep clusters servers artifacts stories stories-alone deep servers-deep stories-deep soak chaos keda bench bench-gateway bench-gpu images audit docs lock lock-base

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(READY) $(CLIENTS) ## .venv, system packages, the tests' programs; quick when all is there
	@$(PYTHON) -m e2e.cluster $(if $(FOREIGN),build,setup)

up: $(UP_READY) ## A real cluster with Quire on it, a model and its answer (NODES=2; GATEWAY=1; KUBECONFIG=... uses yours)
	@$(PYTHON) -m e2e.up

down: $(UP_READY) ## Take the cluster away again
	@$(PYTHON) -m e2e.cluster down

check: $(READY) ## ruff, mypy, import contracts, the workflow file, tests/contracts
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/zizmor --offline --quiet --pedantic .github/workflows
	.venv/bin/mypy
	.venv/bin/lint-imports
	@git ls-files '*.py' | xargs wc -l | awk '$$1 > 600 && $$2 != "total" {print "over 600 lines, still one idea? " $$2 ": " $$1}'
	$(PYTEST) -q -n 2 --dist worksteal tests/contracts

# Four workers for two CPUs keep these busy: tests wait for servers and timers. Tests of one file stay together,
# so that most fixtures are made once.
unit: setup ## Every test that needs no cluster, but for those of `make check`
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 4 --dist worksteal --ignore=tests/contracts tests \
		-m "not api and not cluster and not soak and not kernels and not images and not deep"

# Last it is checked that every fault, exception handler and failure reason was exercised. On a cluster of the user's
# too many tests are left out for that.
test: export FAILURE_PATHS := $(CURDIR)/.cache/failure_paths
test: $(READY) ## Every test but the deepest, the stories on a real cluster included (KUBECONFIG=... uses yours)
	@rm -rf "$$FAILURE_PATHS" && mkdir -p "$$FAILURE_PATHS"
	@$(MAKE) -j 2 setup check
	@$(MAKE) unit
	@$(MAKE) clusters
	@$(if $(FOREIGN),,$(PYTHON) -m e2e.failure_paths)

# The images are built beside other tests, at the lowest priority, and looked into. Stories run side by side, but for those that change or
# measure what they share.
clusters:
	@$(MAKE) -j 2 servers artifacts
	NODES=2 $(PYTHON) -m e2e.up
	@$(MAKE) --keep-going stories stories-alone

stories:
	$(PYTEST) -n 2 --dist loadfile -m "cluster and not alone and not deep" e2e/stories

stories-alone:
	$(PYTEST) -m "cluster and alone and not deep" e2e/stories

SERVER_TESTS := tests/chart tests/cluster e2e/api e2e/operator e2e/metrics_adapter e2e/chaos

# API servers and nodes that tests start run side by side, because most of the time is spent waiting.
servers:
ifdef FOREIGN
	@echo "KUBECONFIG=$(KUBECONFIG): left out are the tests that start API servers or nodes (-m api, tests/cluster)"
else
	$(PYTEST) -q -n 6 --dist loadfile -m "(api or cluster) and not deep" $(SERVER_TESTS)
endif

artifacts:
	@nice -n 19 $(PYTHON) -m e2e.up.artifacts >.cache/artifacts.log 2>&1 || { cat .cache/artifacts.log; exit 1; }
	@nice -n 19 $(PYTEST) -q -m "images and not deep" tests/images

deep: setup ## What takes longest: all pairs of kernels, overload, killed engines, fleets of 1,000, KEDA itself
	@$(MAKE) kernels
	@$(MAKE) unit-deep
	@$(MAKE) servers-deep
	$(PYTEST) -q -m soak tests/soak
	@CHAOS_MINUTES=$${CHAOS_MINUTES:-10} $(MAKE) chaos
	@$(MAKE) keda
	@$(MAKE) stories-deep

kernels: $(READY) ## Every kernel in Triton's interpreter, in the full form: minutes of two CPUs
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 --timeout 900 -m kernels tests/kernels

unit-deep: setup ## The unit tests that `make unit` leaves out because they take long, and all random examples
	OMP_NUM_THREADS=1 ALL_EXAMPLES=true FUZZ_EXAMPLES=60 CROSS_TALK_MINUTES=1 RANK_KILLS=5 $(PYTEST) -q -n 3 \
		--dist worksteal -m "(deep or hypothesis) and not cluster" tests

soak: $(READY) ## Twenty minutes of overload, fifty killed engines, replicas and ranks, half an hour of clients with secrets
	CROSS_TALK_MINUTES=30 $(PYTEST) -q --log-cli-level info tests/server/serving/test_cross_talk.py
	SOAK_MINUTES=20 SOAK_KILLS=50 REPLICA_KILLS=50 CHURN_STREAMS=1000 $(PYTEST) -q -m soak tests/soak
	RANK_KILLS=50 $(PYTEST) -q --log-cli-level info tests/server/serving/test_lost_ranks.py -k lost_at_any_moment
	TRANSFER_FAULTS=200 $(PYTEST) -q --timeout 900 tests/server/engine/test_prefill_decode.py -k faults_at_random_points
	SLOW_RANK_STEPS=1000 SLOW_RANK_SECONDS=0.3 $(PYTEST) -q tests/server/runner/test_slow_ranks.py

chaos: setup ## All that the operator survives, as a table; CHAOS_MINUTES=30 of churn
	HOSTILE_OBJECTS=500 $(PYTEST) -q -n 2 --dist loadfile -p e2e.chaos.table -m chaos e2e/chaos e2e/operator

keda: setup ## The operator and the metrics adapter beside KEDA itself, which takes ten minutes to build
	$(PYTEST) -q -s -m keda e2e/keda

servers-deep: setup ## What `make servers` leaves out, and what is in the images
	$(PYTEST) -q -n 4 --dist loadfile -m "(api or cluster) and deep" $(SERVER_TESTS)
	$(PYTEST) -q -m "images and deep" tests/images

stories-deep: setup ## Stories that take long: upgrades, lost nodes, models on two nodes, replicas that follow the queue
	NODES=2 $(PYTHON) -m e2e.up
	$(PYTEST) -m deep e2e/stories

bench: $(READY) $(LOADGEN) ## Speed on this machine, beside transformers and llama.cpp (ONLY=decode, batching ...: a part)
	@$(PYTHON) -c 'import llama_cpp' 2>/dev/null || .venv/bin/uv pip install --python $(PYTHON) --quiet \
		--require-hashes -r requirements/peers.txt
	OMP_NUM_THREADS=2 $(PYTHON) -m bench.cpu $(if $(ONLY),--only $(ONLY))
	OMP_NUM_THREADS=2 $(PYTHON) -m bench.speculation
	$(if $(ONLY),,$(PYTHON) -m bench.distributed)

bench-gateway: $(READY) $(LITELLM) ## What the gateway's relay costs, beside a bare relay and LiteLLM's proxy, and a batch beside interactive clients
	$(PYTHON) -m bench.gateway
	$(PYTHON) -m bench.batches

bench-gpu: $(READY) ## Everything that needs an NVIDIA GPU, in at most 25 minutes; run again for what is missing
	$(PYTHON) -m bench.gpu

images: $(UP_READY) ## Build the images and push them to the cluster's registry (or QUIRE_REGISTRY)
	@$(PYTHON) -m e2e.images push

# One lock at a time, because they differ in versions; all of them, whatever is found in the first.
audit: $(AUDIT) ## Ask PyPI for advisories on all that is locked (requirements/floors.txt does without a feed)
	@failed=; $(foreach lock,$(LOCKS),$(PIP_AUDIT) -r $(lock) || failed=1;) [ -z "$$failed" ]

lock-base: $(UP_READY) ## Record the digest that the public base image has now, for machines that make none
	@$(PYTHON) -m e2e.images lock-base

docs: $(READY) ## The documentation as a site, in site/
	$(PYTHON) -m docs.generate
	$(PYTHON) -m docs.manifests
	.venv/bin/zensical build --clean

lock: $(READY) ## Resolve pyproject.toml into requirements/*.txt
	$(COMPILE) pyproject.toml --extra operator -o requirements/operator.txt
	$(COMPILE) pyproject.toml --extra server --extra fetch -o requirements/server.txt
	$(COMPILE) pyproject.toml --extra gateway --extra batch -o requirements/gateway.txt
	$(COMPILE) pyproject.toml --extra nixl --no-deps -o requirements/nixl.txt
	$(COMPILE) pyproject.toml --extra operator --extra server --extra fetch --extra gateway --extra batch --extra nixl \
		--group test --group lint --group docs --group bench -o requirements/dev.txt
	$(COMPILE) --group peers --constraint requirements/dev.txt -o requirements/peers.txt
	$(COMPILE) --group loadgen -o requirements/loadgen.txt
	$(COMPILE) --group litellm -o requirements/litellm.txt
	$(COMPILE) --group clients -o requirements/clients.txt
	$(COMPILE) --group audit -o requirements/audit.txt

# guidellm, the load generator of `make bench`. Most of it is torch, which uv has already and links.
$(LOADGEN): requirements/loadgen.txt | $(READY)
	@[ -x $(@D)/bin/python ] || python3 -m venv $(@D)
	@.venv/bin/uv pip sync --python $(@D)/bin/python --quiet --require-hashes requirements/loadgen.txt
	@touch $@

# LiteLLM's proxy, the peer of `make bench-gateway`, with 600 MB of packages that are not ours.
$(LITELLM): requirements/litellm.txt | $(READY)
	@[ -x $(@D)/bin/python ] || python3 -m venv $(@D)
	@.venv/bin/uv pip sync --python $(@D)/bin/python --quiet --require-hashes requirements/litellm.txt
	@touch $@

$(AUDIT): requirements/audit.txt | $(UP_READY)
	@[ -x $(@D)/bin/python ] || python3 -m venv $(@D)
	@.venv/bin/uv pip sync --python $(@D)/bin/python --quiet --require-hashes requirements/audit.txt
	@touch $@

# LangChain and lm-eval: clients that are not ours.
$(CLIENTS): requirements/clients.txt | $(READY)
	@[ -x $(@D)/bin/python ] || python3 -m venv $(@D)
	@.venv/bin/uv pip sync --python $(@D)/bin/python --quiet --require-hashes requirements/clients.txt
	@touch $@

# An editable install needs no network: its build backend is in dev.txt.
$(READY): $(UP_READY) requirements/dev.txt pyproject.toml $(wildcard kernels/quire_kernels/cpu/csrc/*)
	@echo "installing the locked dependencies of all tests into .venv (torch: 2.5 GB to fetch the first time)"
	@.venv/bin/uv pip sync --python $(PYTHON) --require-hashes requirements/uv.txt requirements/dev.txt
	@.venv/bin/uv pip install --python $(PYTHON) --quiet --no-deps --no-build-isolation --editable .
	@$(PYTHON) kernels/quire_kernels/cpu/native_build.py
	@touch $@

# What `make up` runs on: the operator's dependencies, no torch. uv, locked by hash, makes all else.
$(UP_READY): requirements/uv.txt requirements/operator.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python >= 3.11 is needed: apt-get install python3"; exit 1; }
	@python3 -c 'import ensurepip, venv' 2>/dev/null || { \
		[ "$$(id -u)" = 0 ] || { echo "error: missing python3-venv: sudo apt-get install python3-venv"; exit 1; }; \
		echo "This changes on the host before anything else: apt-get install python3-venv (it stays)"; \
		apt-get update -q >/dev/null; \
		DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends python3-venv >/dev/null; }
	@[ -x $(PYTHON) ] || python3 -m venv .venv
	@.venv/bin/uv --version 2>/dev/null | grep -qF "$$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/uv.txt)" \
		|| $(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@.venv/bin/uv pip install --python $(PYTHON) --quiet --require-hashes -r requirements/operator.txt
	@touch $@

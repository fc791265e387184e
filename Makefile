# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. Settings:
#   PYTHON=python3.12       the interpreter; if it is in no virtual environment, .venv is made with it
#   TORCH=torch==2.13.0     the torch to install or to keep
# An active virtual environment is used as it is; otherwise .venv is made and used.

TORCH ?= torch>=2.11
ifdef PYTHON
  IN_ENVIRONMENT := $(shell $(PYTHON) -c 'import sys; print(int(sys.prefix != sys.base_prefix))')
  ENVIRONMENT_PYTHON := $(if $(filter 1,$(IN_ENVIRONMENT)),$(PYTHON),.venv/bin/python)
else ifdef VIRTUAL_ENV
  ENVIRONMENT_PYTHON := $(VIRTUAL_ENV)/bin/python
else
  PYTHON := python3
  ENVIRONMENT_PYTHON := .venv/bin/python
endif
PIP_INSTALL := $(ENVIRONMENT_PYTHON) -m pip install --quiet --disable-pip-version-check
NATIVE_SOURCES = $(shell find csrc tests examples benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help demo test lint bench bench-linear gpu-check install format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: EXTRAS = [demo]
demo: install  ## train a small language model twice, stock and fused, and plot both
	$(ENVIRONMENT_PYTHON) examples/demo.py

test: EXTRAS = [test]
test: install  ## run the tests
	$(ENVIRONMENT_PYTHON) -m pytest tests $(PYTEST_ARGS)

bench: EXTRAS = [demo]
bench: install  ## compare the optimizers with stock PyTorch's (see benchmarks/)
	$(ENVIRONMENT_PYTHON) benchmarks/bench_optimizers.py $(BENCH_ARGS)

bench-linear: EXTRAS = [demo]
bench-linear: install  ## compare the linear layers with stock PyTorch's
	$(ENVIRONMENT_PYTHON) benchmarks/bench_linear.py $(BENCH_ARGS)

gpu-check:  ## build, test and measure on a GPU, offline, with the torch that is there (see benchmarks/gpu_check.py)
	@$(if $(wildcard $(ENVIRONMENT_PYTHON)),$(ENVIRONMENT_PYTHON),$(PYTHON)) benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("fused_ops: expected Python >= 3.10, got %d.%d. Set PYTHON= to a newer one." \
	    % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@echo "== Making a virtual environment in .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

install: $(filter .venv/bin/python,$(ENVIRONMENT_PYTHON))  ## build and install fused_ops in place
	@echo "== Installing $(TORCH) (the first time is a large download)"
	@$(PIP_INSTALL) '$(TORCH)' numpy
	@echo "== Building and installing fused_ops (about a minute the first time)"
	@$(PIP_INSTALL) -e '.$(EXTRAS)'
	@$(ENVIRONMENT_PYTHON) -m fused_ops info

lint: EXTRAS = [test,demo,lint]
lint: install  ## check the style and the types of every file
	$(ENVIRONMENT_PYTHON) -m ruff check .
	$(ENVIRONMENT_PYTHON) -m ruff format --check .
	$(ENVIRONMENT_PYTHON) -m pyright --pythonpath $(ENVIRONMENT_PYTHON)
	$(dir $(ENVIRONMENT_PYTHON))clang-format --dry-run -Werror $(NATIVE_SOURCES)

format: EXTRAS = [lint]
format: install  ## bring every file into the style that lint checks
	$(ENVIRONMENT_PYTHON) -m ruff check --fix .
	$(ENVIRONMENT_PYTHON) -m ruff format .
	$(dir $(ENVIRONMENT_PYTHON))clang-format -i $(NATIVE_SOURCES)

clean:  ## remove what was built, but not .venv
	rm -rf build dist *.egg-info fused_ops/_C*.so fused_ops/_build_config.py .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# `make demo` and `make test` work on a machine with Python, g++ and make. An activated environment that has torch is used
# as it is, but for what `pip` adds to it; otherwise a virtual environment with the torch of TORCH is made in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

TORCH ?= torch==2.13.0
SYSTEM_PYTHON ?= python3
PROGRAMS ?= 100000
SEED ?= $(shell date +%s)
JOBS ?= $(shell nproc)

ifeq ($(shell $(SYSTEM_PYTHON) -c 'import torch' 2>/dev/null && echo yes),yes)
  PYTHON := $(SYSTEM_PYTHON)
else
  PYTHON := .venv/bin/python
  VENV := .venv/ready
endif
PIP := $(PYTHON) -m pip --disable-pip-version-check

# Tools are run from the environment's own folder, which need not be on the PATH.
BIN = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
HEADERS := $(shell find csrc -name "*.h")
UNITS := $(shell find csrc -name "*.cpp")
CPP_TESTS := $(wildcard test/cpp/*.cpp test/cpp/*.h)
LOOPS := $(wildcard benchmarks/*.cpp)
# What has been done is remembered here, by the version of Python and torch that it was done for.
STATE := build/state/$(shell $(SYSTEM_PYTHON) -c 'import torch, sys; print(torch.__version__, *sys.version_info[:2], sep="-")' 2>/dev/null || echo venv)

export PYTHONPATH := $(CURDIR):$(PYTHONPATH)

.PHONY: demo test unit lint tidy typecheck format sweep fuzz bench build clean help
# Not for the checks of single files, which a make of their own runs: before GNU make 4.4 this counts for all targets.
ifndef IN_PARALLEL
.NOTPARALLEL:
endif

help: ## Show what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## Defer and materialize real models, and compare them bit for bit with eager construction
	$(PYTHON) examples/deferred_transformers.py

test: lint typecheck unit ## Lint, type checks and the whole test suite

unit: build ## The test suite and the quick examples
	$(PYTHON) -m pytest test -n $(JOBS)
	$(PYTHON) examples/quickstart.py
	$(PYTHON) examples/eight_gpus.py
	$(PYTHON) examples/amp_training.py
	$(PYTHON) examples/amp_dtypes.py

lint: $(STATE)/tools ## Check the format and the style of all sources
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(HEADERS) $(UNITS) $(LOOPS) $(CPP_TESTS)

typecheck: $(STATE)/tools ## Check the types of all Python sources
	$(PYTHON) -m mypy

tidy: $(STATE)/tools ## Check the C++ sources with clang-tidy; what has passed and not changed is not checked again
	@$(MAKE) --no-print-directory -j $(JOBS) IN_PARALLEL=1 TIDY_INCLUDES='$(TIDY_INCLUDES)' $(UNITS:%=$(STATE)/tidy/%)

format: $(STATE)/tools ## Format all sources
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .
	$(BIN)/clang-format -i $(HEADERS) $(UNITS) $(LOOPS) $(CPP_TESTS)

sweep: build ## The long sweeps: every model and module constructor that is known
	$(PYTHON) -m pytest test -n $(JOBS) --long

fuzz: build ## Try PROGRAMS random programs, deferred against eager
	$(PYTHON) -m pytest test/sweeps/test_fuzz.py -k many -n $(JOBS) --programs $(PROGRAMS) --fuzz-seed $(SEED)

bench: build ## Compare with PyTorch's own means
	$(PYTHON) benchmarks/deferred_init.py
	$(PYTHON) benchmarks/external_tensors.py
	$(PYTHON) benchmarks/fake_dispatch.py
	$(PYTHON) benchmarks/inference_mode.py
	$(PYTHON) benchmarks/metadata_getters.py
	$(PYTHON) benchmarks/amp.py
	$(PYTHON) benchmarks/patches.py

build: $(STATE)/built ## Compile the extension in place

clean: ## Remove what was built, and .venv
	rm -rf build .venv torchext/*.so torchext.egg-info

.venv/ready:
	@echo "== making a virtual environment with $(TORCH)"
	$(SYSTEM_PYTHON) -m venv .venv
	.venv/bin/python -m pip --disable-pip-version-check install $(TORCH) numpy
	@touch $@

$(STATE)/tools: pyproject.toml $(VENV)
	@echo "== installing what the tests and the examples need"
	$(PIP) install 'setuptools<82' wheel ninja $$(sed -nE 's/^(test|lint) = \[(.*)\]$$/\2/p' pyproject.toml | tr -d '",')
	@mkdir -p $(@D) && touch $@

$(STATE)/built: $(STATE)/tools setup.py $(HEADERS) $(UNITS)
	@echo "== compiling the extension"
	MAX_JOBS=$(JOBS) $(PYTHON) setup.py --quiet build_ext --inplace 2>&1 | sed -uE 's/^(\[[0-9]+\/[0-9]+\]) .* -c ([^ ]+) -o .*/\1 \2/'
	@mkdir -p $(@D) && touch $@

$(STATE)/tidy/%: % .clang-tidy $(HEADERS) $(STATE)/tools
	@echo "clang-tidy $<"
	@$(BIN)/clang-tidy --quiet $< -- -std=c++20 $(TIDY_INCLUDES) 2>/dev/null
	@mkdir -p $(@D) && touch $@

TIDY_INCLUDES = $(shell $(PYTHON) -c 'import sysconfig; from torch.utils.cpp_extension import include_paths; \
	print(*("-isystem" + p for p in [*include_paths(), sysconfig.get_path("include")]))')

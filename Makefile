# `make demo` and `make test` need Python, g++ and make. An activated environment with torch is used, and pip may install
# packages there; otherwise a virtual environment with the torch of TORCH is created in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

TORCH ?= torch==2.13.0
SYSTEM_PYTHON ?= python3
PROGRAMS ?= 100000
SEED ?= $(shell date +%s)
JOBS ?= $(shell nproc)
# The Pythons of the environments with torch for which `make wheels` builds wheels.
WHEEL_PYTHONS ?= $(PYTHON)
# The folder with an environment for each release of torch; `make matrix` creates missing ones.
MATRIX ?= build/matrix

ifeq ($(shell $(SYSTEM_PYTHON) -c 'import torch' 2>/dev/null && echo yes),yes)
  PYTHON := $(SYSTEM_PYTHON)
else
  PYTHON := .venv/bin/python
  VENV := .venv/ready
endif
# The tests of `make check`: the component tables, the docs, and one file for each feature.
SMOKE := test/package/test_rooms.py test/package/test_docs.py test/fake/test_fake.py test/deferred_init/graph/test_op_graph.py \
  test/inference/test_inference_mode.py test/amp/test_amp.py test/inspect
# The tests for runs with sanitizers and with each release of PyTorch, where the whole suite would take too long.
CORE := test/fake/test_fake.py test/fake/test_fake_storage.py test/fake/test_fake_sparse.py test/fake/test_fake_cuda.py \
  test/fake/test_known_values.py test/fake/test_metadata_cache.py test/fake/test_collectives.py test/deferred_init/graph/test_op_graph.py \
  test/deferred_init/replay/test_orders.py test/deferred_init/test_deferred_init.py test/deferred_init/test_materialize.py \
  test/deferred_init/random/test_rng_tape.py test/deferred_init/state/test_deferred_state.py test/deferred_init/graph/test_external_tensors.py \
  test/deferred_init/test_defer_again.py test/deferred_init/plan/test_dead_writes.py test/fills test/inference test/amp test/marks \
  test/inspect test/package/test_leases.py test/package/test_cpp.py
# The release of Triton that this PyTorch expects: for tests of compiled programs. Builds for CUDA have it.
TRITON = $$($(PYTHON) -c 'import runpy, torch; print("triton==" + runpy.run_path("torchext/version.py")["TRITON"] \
  .get(tuple(map(int, torch.__version__.split(".")[:2])), "3") + ".*")')
# Python compiles the modules that it imports; most of these packages are never imported.
INSTALL := $(PYTHON) -m pip --disable-pip-version-check install --quiet --no-compile

BUILD_NEEDS := 'setuptools>=77,<82' wheel ninja

# Tools run from the environment's folder, which may not be on the PATH.
BIN = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
HEADERS := $(shell find csrc torchext/include -name "*.h")
UNITS := $(shell find csrc -name "*.cpp")
CPP_TESTS := $(wildcard test/bindings/*.cpp test/bindings/*.h test/cpp/*.cpp test/cpp/*.h test/cpp/*/*.cpp examples/cpp/*.cpp)
LOOPS := $(wildcard benchmarks/*.cpp)
# Gives a program a null CUDA device, which does nothing but record launches.
empty :=
NULL_LIBRARIES = $(subst $(empty) ,:,$(patsubst %,$(CURDIR)/build/cuda_host/libnull%.so,solver fft nvrtc cuda))
NULL_DRIVER = LD_PRELOAD=$(NULL_LIBRARIES) NULLCUDA_TRACE=$(CURDIR)/build/cuda_host/trace \
  NULLCUDA_TRACE_LAUNCHES=1 NULLCUDA_DEVICES=2 NULLCUDA_VERBOSE=0 PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 PYTHONHASHSEED=0
# The name of a GPU, its multiprocessors, and the threads of each.
facts_of = NULLCUDA_TOTAL=214748364800 NULLCUDA_SMS=$(word 2,$(1)) NULLCUDA_THREADS_PER_SM=$(word 3,$(1)) $(NULL_DRIVER) \
  PYTHONPATH=test $(PYTHON) test/cuda_host/philox_facts.py $(word 1,$(1)) > build/cuda_host/$(word 1,$(1)).facts
# Markers of completed steps, by the versions of Python and torch.
STATE := build/state/$(shell $(SYSTEM_PYTHON) -c 'import torch, sys; print(torch.__version__, *sys.version_info[:2], sep="-")' 2>/dev/null || echo venv)

# Another ninja would not use this one's log of compiled files.
COMPILE = PATH="$(BIN):$$PATH" MAX_JOBS=$(JOBS) $(PYTHON) setup.py --quiet build_ext --inplace

# pip leaves compiling to the first import, so that later processes start faster only if bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Warnings are errors for development builds, but not for installations.
export TORCHEXT_WERROR := 1
# Packages and measurements are optimized.
export TORCHEXT_QUICK := 1
# Threads of parallel test processes that wait actively take the cores from each other: a half of the time.
export OMP_WAIT_POLICY := passive

.PHONY: demo test ci rest prepared core docs unit examples slowest check package wheels sanitize matrix coverage mutations lint tidy typecheck user-types size format sweep fuzz oracle cuda-host philox-facts dtype-facts gpu bench build clean help
# Not for the checks of single files, which a nested make runs: before GNU make 4.4 this applies to all targets.
ifndef IN_PARALLEL
.NOTPARALLEL:
endif

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## Defer and materialize real models, and compare them bit for bit with eager construction
	$(PYTHON) examples/deferred_transformers.py

test: prepared unit ## Every day: lint, type checks, and the everyday tests

ci: test rest ## Everything that CI proves

rest: package docs user-types ## What `make ci` adds: packages, documentation, pyright, all other tests, and examples
	$(PYTHON) -m pytest test -n $(JOBS) --dist worksteal --tier rest
	@# The everyday tests of arithmetic again, now on the optimized libraries of the wheel.
	$(PYTHON) -m pytest test/fills test/deferred_init/random -n $(JOBS) --dist worksteal --tier everyday
	$(MAKE) --no-print-directory examples

check: lint typecheck size build ## After a change: lint, type checks and quick tests
	$(PYTHON) -m pytest -q -n $(JOBS) $(SMOKE)
	$(PYTHON) examples/quickstart.py > /dev/null

unit: build ## Run the everyday tests and the shortest example
	$(PYTHON) -m pytest test -n $(JOBS) --dist worksteal
	$(PYTHON) examples/quickstart.py

# The compiler, and the installation of tools, leave processors idle in turn.
prepared: $(VENV)
	@$(MAKE) --no-print-directory -j 2 IN_PARALLEL=1 $(STATE)/built lint typecheck

core: build $(STATE)/tools ## Build the core and the libraries of the C++ code alone, without extensions, and test them
	$(PYTHON) -m pytest test/package/test_core.py --tier all

examples: build ## Run the other examples
	$(PYTHON) examples/eight_gpus.py
	$(PYTHON) examples/will_it_fit.py --gpus A100-40GB
	$(PYTHON) examples/where_memory_goes.py
	$(PYTHON) examples/one_rank_of_512.py --layers 4
	$(PYTHON) examples/sharded_llama.py
	$(PYTHON) examples/larger_than_memory.py
	$(PYTHON) examples/amp_training.py
	$(PYTHON) examples/amp_dtypes.py

slowest: build ## Run the whole test suite, and print the CPU time of its slowest tests and of each folder
	$(PYTHON) -m pytest test -n $(JOBS) --dist worksteal --tier all --cpu-times

docs: build $(STATE)/docs ## Build the documentation site in build/docs/html; warnings are errors
	$(PYTHON) docs/sections.py --check
	rm -rf build/docs/html
	$(PYTHON) -m sphinx -b html -W --keep-going -q -d build/docs/doctrees docs build/docs/html

# A build in place would make the same libraries again, so it takes those of the wheel.
package: $(STATE)/tools ## Build the source distribution and the wheel, and test them in a fresh environment
	rm -rf build/package
	.ci/package $(PYTHON) build/package
	$(PYTHON) -m zipfile -e build/package/*.whl build/package/unpacked
	mkdir -p torchext/lib
	@# Renamed into place, because running processes may have the old libraries mapped.
	cd build/package/unpacked/torchext && for file in _C*.so lib/*; do \
	  cp $$file $(CURDIR)/torchext/$$file.new && mv $(CURDIR)/torchext/$$file.new $(CURDIR)/torchext/$$file || exit 1; done
	@touch $(STATE)/built

wheels: $(STATE)/tools ## Build a wheel for each environment in WHEEL_PYTHONS, and test it in a fresh one
	.ci/wheels wheels $(WHEEL_PYTHONS)

matrix: ## Build and test with each release of PyTorch, in separate environments and copies of the tree
	MAX_JOBS=$(JOBS) MATRIX_PYTHON=$(SYSTEM_PYTHON) .ci/matrix $(MATRIX) -n $(JOBS) --tier all $(CORE) test/sweeps/test_operators.py

sanitize: $(STATE)/tools ## Run the core of the suite with the address, undefined-behavior and thread sanitizers
	JOBS=$(JOBS) .ci/sanitize $(PYTHON) build/sanitize --tier all $(CORE)

coverage: $(STATE)/tools ## Compare the line coverage of the everyday tests and of all tests, and list the uncovered lines
	JOBS=$(JOBS) .ci/coverage $(PYTHON) build/coverage

mutations: build ## Revert the code of 40 fixes one by one, and check that the tests fail
	$(PYTHON) .ci/mutations.py build/mutations --python $(PYTHON) --jobs $(JOBS) --seed $(SEED)

lint: $(STATE)/tools ## Check the format and the style of all sources
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(HEADERS) $(UNITS) $(LOOPS) $(CPP_TESTS)

typecheck: $(STATE)/tools ## Check the types of all Python sources
	$(PYTHON) -m mypy

user-types: $(STATE)/users ## Check with pyright the types that users get: all are known, also in strict mode
	PATH="$(BIN):$$PATH" $(PYTHON) -m pyright
	PATH="$(BIN):$$PATH" $(PYTHON) -m pyright --verifytypes torchext --ignoreexternal

size: $(STATE)/tools ## Print the lines of each component, and the growth since SINCE or the last tag
	$(PYTHON) .ci/size.py $(SINCE)

tidy: $(STATE)/tools ## Check the C++ sources with clang-tidy; unchanged files that have passed are skipped
	@$(MAKE) --no-print-directory -j $(JOBS) IN_PARALLEL=1 TIDY_INCLUDES='$(TIDY_INCLUDES)' $(UNITS:%=$(STATE)/tidy/%)

format: $(STATE)/tools ## Format all sources
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .
	$(BIN)/clang-format -i $(HEADERS) $(UNITS) $(LOOPS) $(CPP_TESTS)

sweep: build ## Run the long sweeps over all known model and module constructors
	$(PYTHON) -m pytest test -n $(JOBS) --long

fuzz: build ## Compare deferred with eager execution of PROGRAMS random programs
	$(PYTHON) -m pytest test/sweeps/test_fuzz.py -k many -n $(JOBS) --programs $(PROGRAMS) --fuzz-seed $(SEED)

oracle: build ## Compare simulated memory with PyTorch's allocator, without a GPU (needs a CUDA build of torch)
	test/cuda_host/build_null_driver $(PYTHON) build/cuda_host
	cd test && NULLCUDA=$(NULL_LIBRARIES) PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 $(PYTHON) -m oracle.compare --jobs $(JOBS)

cuda-host: build ## Test against CUDA's host code, without a GPU (needs a CUDA build of torch)
	test/cuda_host/build_null_driver $(PYTHON) build/cuda_host
	$(NULL_DRIVER) $(PYTHON) -m pytest test/cuda_host --tier all -p no:xdist --ignore test/cuda_host/test_layouts.py
	$(filter-out NULLCUDA_TRACE%,$(NULL_DRIVER)) $(PYTHON) -m pytest test/cuda_host/test_layouts.py --tier all -n $(JOBS)

philox-facts: build ## Record how far operators advance the generator in CUDA's host code, for test/fake/test_philox.py
	test/cuda_host/build_null_driver $(PYTHON) build/cuda_host
	$(foreach gpu,H100-80GB/132/2048 A100-80GB/108/2048 L4-24GB/58/1536,$(call facts_of,$(subst /, ,$(gpu))) &&) true
	cat build/cuda_host/*.facts > test/fake/philox_facts.tsv

dtype-facts: build ## Record the dtypes that operators reject in CUDA's host code, for fake CUDA devices
	test/cuda_host/build_null_driver $(PYTHON) build/cuda_host
	mkdir -p build/cuda_host/dtypes
	export PYTHONPATH=test $(wordlist 1,1,$(NULL_DRIVER)) NULLCUDA_VERBOSE=0 PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1; \
	  for part in $$(seq 0 $$(($(JOBS) - 1))); do \
	    $(PYTHON) test/cuda_host/dtype_facts.py build/cuda_host/dtypes $$part $(JOBS) & \
	  done; wait; $(PYTHON) test/cuda_host/dtype_facts.py build/cuda_host/dtypes

# As many processes as fit on a GPU of 80 GB: the compared models are constructed twice.
gpu: build ## Run the tests that need a GPU, and print the table for docs/reference/proof.md
	$(PYTHON) -m pytest test -m cuda --tier all -n 8 --dist worksteal --proof-table

bench: $(STATE)/tools ## Measure all speeds, and name those that became slower than in docs/reference/speed.md
	TORCHEXT_QUICK=0 $(COMPILE)
	env -u OMP_WAIT_POLICY $(PYTHON) benchmarks/table.py

build: $(STATE)/built $(STATE)/tools ## Compile the extension in place

clean: ## Remove what was built, and .venv
	rm -rf build wheels .venv torchext/*.so torchext/lib torchext.egg-info

.venv/ready:
	@echo "== creating a virtual environment with $(TORCH)"
	$(SYSTEM_PYTHON) -m venv .venv
	.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile $(TORCH) numpy $(BUILD_NEEDS)
	@touch $@

$(STATE)/compiler: $(VENV)
	$(if $(VENV),,$(INSTALL) $(BUILD_NEEDS))
	@mkdir -p $(@D) && touch $@

$(STATE)/tools: pyproject.toml $(STATE)/compiler
	@echo "== installing the requirements of the tests and the examples"
	$(INSTALL) $$(sed -nE 's/^(test|lint) = \[(.*)\]$$/\2/p' pyproject.toml | tr -d '",') $(TRITON)
	@mkdir -p $(@D) && touch $@

$(STATE)/docs: pyproject.toml $(STATE)/tools
	@echo "== installing what the documentation needs"
	$(INSTALL) $$(sed -nE 's/^docs = \[(.*)\]$$/\1/p' pyproject.toml | tr -d '",')
	@mkdir -p $(@D) && touch $@

$(STATE)/users: pyproject.toml $(STATE)/tools
	@echo "== installing the type checker of users"
	$(INSTALL) $$(sed -nE 's/^users = \[(.*)\]$$/\1/p' pyproject.toml | tr -d '",')
	@mkdir -p $(@D) && touch $@

# The folder holds the library of the environment that was built last. The marker belongs to one environment; the file
# names the one that was built.
BUILT_FOR := $(shell sed -nE 's/^set\(torchext_TORCH_VERSION "(.*)"\)$$/\1/p' torchext/lib/torchextBuild.cmake 2>/dev/null)
ifneq ($(BUILT_FOR),$(shell $(PYTHON) -c 'import torch; print(torch.__version__)' 2>/dev/null))
$(STATE)/built: library_of_another_torch
.PHONY: library_of_another_torch
library_of_another_torch:
endif

$(STATE)/built: $(STATE)/compiler setup.py $(wildcard build_tools/*.py) $(HEADERS) $(UNITS)
	@echo "== compiling the extension"
	$(COMPILE)
	@mkdir -p $(@D) && touch $@

$(STATE)/tidy/%: % .clang-tidy $(HEADERS) $(STATE)/tools
	@echo "clang-tidy $<"
	@$(BIN)/clang-tidy --quiet $< -- -std=c++20 $(TIDY_INCLUDES) 2>/dev/null
	@mkdir -p $(@D) && touch $@

TIDY_INCLUDES = $(shell $(PYTHON) -c 'import sysconfig; from torch.utils.cpp_extension import include_paths; \
	print(*("-isystem" + p for p in [*include_paths(), sysconfig.get_path("include")]))')

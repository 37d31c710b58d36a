# Everything runs in .venv, which the targets create and keep up to date.  Stamps
# in .venv say what was done; nothing is installed or compiled twice.

PYTHON ?= python3
PYTEST_ARGS ?=
JOBS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCHMARKS ?= benchmarks/step_time.py
SANITIZE_PROBLEMS ?= 20000
FUZZ_SECONDS ?= 600

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
CC_TESTS := $(sort $(wildcard tests/cc/*.cc tests/cc/*.h))
CXX_FILES := $(sort $(shell find tf_ops/cc -name '*.cc' -o -name '*.h'))
LIBRARY := tf_basis/ops/_tf_basis_ops.so tf_basis/ops/build_info.json

export TF_CPP_MIN_LOG_LEVEL ?= 3

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-long horovod docs lint format bench clean distclean \
  system sanitize fuzz FORCE

help:
	@echo 'make demo       set up, build, fetch MovieLens-100K, run the main example'
	@echo 'make test       set up, build, run the tests under both Keras flavours'
	@echo 'make test-long  the same and the long tests'
	@echo 'make horovod    build Horovod for the TensorFlow in .venv (make test does)'
	@echo 'make docs       build the documentation in build/docs, run its examples'
	@echo 'make sanitize   the C++ core under the address, undefined and thread sanitizers'
	@echo 'make fuzz       libFuzzer on the C++ core, FUZZ_SECONDS=600 for each target'
	@echo 'make bench      run the benchmarks (BENCH_ARGS)'
	@echo 'make lint       ruff and clang-format, changing nothing'
	@echo 'make format     ruff and clang-format, changing files'
	@echo 'make clean      remove what was built; make distclean: and .venv'
	@echo 'Variables: PYTHON=python3 JOBS=2 PYTEST_ARGS="-k hashing" DEMO_ARGS= BENCH_ARGS='

# ---- environment ----------------------------------------------------------------

# What a fresh Debian may lack.  As root it is installed, otherwise it is named.
system:
	@missing=''; \
	command -v $(PYTHON) >/dev/null || missing="$$missing python3"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || missing="$$missing python3-venv"; \
	$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists( \
	  os.path.join(s.get_path("include"), "Python.h")))' 2>/dev/null \
	  || missing="$$missing python3-dev"; \
	command -v "$${CXX:-g++}" >/dev/null || missing="$$missing g++"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo "missing here; install, then run make again: apt-get install$$missing" >&2; \
	    exit 1; \
	  fi; \
	  echo "installing$$missing"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq </dev/null \
	    && apt-get install -y -qq --no-install-recommends \
	         -o Dpkg::Use-Pty=0 $$missing </dev/null; \
	fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'Python 3.10 or newer is needed; choose it with PYTHON=' >&2; exit 1; }

# The stamp holds the directory: an editable install is useless in a moved tree.
ifneq ($(file < $(VENV)/.stamp-venv),$(CURDIR))
$(VENV)/.stamp-venv: FORCE
endif
$(VENV)/.stamp-venv:
	@$(MAKE) --no-print-directory system
	$(PYTHON) -m venv --clear $(VENV)
	@echo '$(CURDIR)' >$@

$(VENV)/.stamp-%: requirements/%.txt $(VENV)/.stamp-venv
	$(PIP) install -r $<
	@touch $@

$(VENV)/.stamp-test: requirements/demo.txt

# The stamp holds the list of C++ files, so that a removed one is noticed too.
ifneq ($(file < $(VENV)/.stamp-package),$(CXX_FILES))
$(VENV)/.stamp-package: FORCE
endif
ifneq ($(words $(wildcard $(LIBRARY))),2)
$(VENV)/.stamp-package: FORCE
endif
$(VENV)/.stamp-package: $(VENV)/.stamp-demo setup.py pyproject.toml \
  tf_ops/build_config.py tf_basis/_version.py $(CXX_FILES)
	@echo 'building tf_basis and its C++ ops'
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@echo '$(CXX_FILES)' >$@

# The tool leaves alone what works; it looks again when its own code, or what was
# installed, changes.
$(VENV)/.stamp-horovod: $(VENV)/.stamp-demo tf_basis/distributed/horovod_build.py \
  | $(VENV)/.stamp-package
	$(RUN) -m tf_basis install-horovod
	@touch $@

horovod: $(VENV)/.stamp-horovod

# ---- the two commands -----------------------------------------------------------

demo: $(VENV)/.stamp-package
	$(RUN) examples/movielens_ctr.py $(DEMO_ARGS)

# A file's tests share what is costly, such as ranks that have been started: one process
# runs them all, while the other goes on with the next files.
SPREAD := -n $(JOBS) --dist loadfile

# Each flavour in its own process; both run even if the first fails.
define run_tests
@status=0; \
export KERAS_BACKEND=tensorflow TF_BASIS_OPS=require TF_BASIS_HOROVOD=require; \
echo '== Keras 3'; \
env -u TF_USE_LEGACY_KERAS $(RUN) -m pytest $(SPREAD) -m '$(1)' $(PYTEST_ARGS) \
  || status=1; \
echo '== tf_keras'; \
TF_USE_LEGACY_KERAS=1 $(RUN) -m pytest $(SPREAD) -m '$(1)' $(PYTEST_ARGS) \
  || status=1; \
exit $$status
endef

test: $(VENV)/.stamp-test $(VENV)/.stamp-package $(VENV)/.stamp-horovod
	$(call run_tests,not long)

test-long: test
	$(call run_tests,long)

bench: $(VENV)/.stamp-test $(VENV)/.stamp-package
	@for script in $(BENCHMARKS); do $(RUN) $$script $(BENCH_ARGS) || exit 1; done

# ---- documentation --------------------------------------------------------------

# What the text names must exist, every page must build without a warning, and every
# example run.
READ := env -u TF_USE_LEGACY_KERAS KERAS_BACKEND=tensorflow TF_BASIS_OPS=require $(RUN)

docs: $(VENV)/.stamp-docs $(VENV)/.stamp-package $(VENV)/.stamp-horovod
	$(READ) docs/check_text.py
	$(READ) -m sphinx -q -W --keep-going -E -d build/doctrees -b html docs build/docs
	$(READ) docs/run_examples.py
	@echo 'read build/docs/index.html'

# ---- robustness of the C++ core, without TensorFlow -------------------------------

CORE_FLAGS := -std=c++17 -O1 -g -fno-sanitize-recover=all -ffp-contract=off -pthread \
  -Wall -Wextra -Werror -I tf_ops/cc
CORE_FILES := $(sort $(wildcard tf_ops/cc/core/*.h tests/cc/*.h))
FUZZED := $(patsubst tests/cc/fuzz_%.cc,%,$(sort $(wildcard tests/cc/fuzz_*.cc)))

build/sanitize/address: SANITIZERS := address,undefined
build/sanitize/thread: SANITIZERS := thread
build/sanitize/%: tests/cc/exercise_core.cc $(CORE_FILES)
	@mkdir -p $(@D)
	$${CXX:-g++} $(CORE_FLAGS) -fsanitize=$(SANITIZERS) $< -o $@

# Half as many problems under the thread sanitizer, and others.
sanitize: build/sanitize/address build/sanitize/thread
	build/sanitize/address $(SANITIZE_PROBLEMS) 1
	build/sanitize/thread $$(($(SANITIZE_PROBLEMS) / 2)) 1000000

# libFuzzer comes with clang, which nothing else needs.
build/fuzz/%: tests/cc/fuzz_%.cc $(CORE_FILES)
	@mkdir -p $(@D)
	@command -v clang++ >/dev/null || { test "$$(id -u)" = 0 \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	       --no-install-recommends clang; } \
	  || { echo 'missing here; install, then run make again: clang' >&2; exit 1; }
	clang++ $(CORE_FLAGS) -fsanitize=fuzzer,address,undefined $< -o $@

# What was found lies in build/fuzz/NAME.found, and is run first the next time.
fuzz: $(addprefix build/fuzz/,$(FUZZED))
	@for name in $(FUZZED); do \
	  echo "== $$name"; \
	  mkdir -p build/fuzz/$$name.corpus build/fuzz/$$name.found; \
	  build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -timeout=60 -max_len=4096 \
	    -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/$$name.found/ \
	    build/fuzz/$$name.corpus build/fuzz/$$name.found || exit 1; \
	done

# ---- style ----------------------------------------------------------------------

lint: $(VENV)/.stamp-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES) $(CC_TESTS)

format: $(VENV)/.stamp-lint
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES) $(CC_TESTS)

clean:
	rm -rf build dist *.egg-info $(LIBRARY) .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# Every target runs in .venv, which the first one makes. Your own pip configuration applies to it:
# pip.conf, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
ARGS ?=
BENCH ?= benchmarks/cpu.py benchmarks/compile.py benchmarks/auto_torch.py \
	benchmarks/newton_iterations.py

.PHONY: help demo test test-all lint types build-docs docs format gpu-test bench clean
.DELETE_ON_ERROR:
# Packages are compiled as they are imported, and once: with this each process would do so anew.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo      train a byte-level language model for some minutes (options: ARGS=\"--help\")"
	@echo "make test      run the tests, of the large tables a part"
	@echo "make test-all  run all tests, in about half an hour on two cores"
	@echo "make lint      check style and types, build the docs with warnings as errors"
	@echo "make docs      build the docs into docs/_build/html"
	@echo "make format    rewrite the code in the house style"
	@echo "make gpu-test  run the tests that need an NVIDIA GPU"
	@echo "make bench     run the short benchmarks: $(BENCH)"
	@echo "make clean     remove what the other targets made, .venv excepted"
	@echo
	@echo "ARGS=\"...\" is passed on to the command, PYTHON=python3.12 chooses the interpreter,"
	@echo "TORCH=\"torch==2.13.0\" chooses PyTorch (see docs/getting-started.md)."

demo: $(VENV)/.demo
	$(BIN)/pararnn demo $(ARGS)

# One thread a process: the processes already fill the cores; half as many again, since many of them
# wait for others that they start. Neighbours stay with one process, which has traced their cells.
test: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest \
		-n $$($(BIN)/python -c "import os; print(3 * os.cpu_count() // 2)") --dist worksteal $(SELECT) $(ARGS)

# Not in ARGS, which the command line may set.
SELECT := -m "not thorough"
test-all: SELECT :=
test-all: test

# The two long ones side by side: neither says anything until it has something to say.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 -k types build-docs

types: $(VENV)/.dev
	$(BIN)/mypy

build-docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs docs/_build/html

docs: build-docs
	@echo "==> Open docs/_build/html/index.html"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu $(ARGS)

bench: $(VENV)/.dev
	@set -e; for script in $(BENCH); do echo "==> $$script"; $(BIN)/python $$script $(ARGS); done

clean:
	rm -rf build dist docs/_build .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info
	find benchmarks src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "==> $(VENV) is left in place; remove it with: rm -r $(VENV)"

# The environment. The stamps .torch, .demo and .dev say which of its parts are installed.

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "pararnn needs Python 3.10 or later as $(PYTHON); name another: make PYTHON=python3.12"; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments."; \
		echo "On Debian and Ubuntu install them with: sudo apt-get install python3-venv"; \
		exit 1; }
	@echo "==> Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PIP) install --quiet --upgrade pip

# Plain torch has CUDA on Linux: right with a GPU. Without one the pinned version is installed, and
# pip's configuration decides about its build. Naming another TORCH later installs that one.
ifneq ($(strip $(TORCH)),)
ifneq ($(TORCH),$(shell cat $(VENV)/.torch 2>/dev/null))
.PHONY: $(VENV)/.torch
endif
endif

$(VENV)/.torch: $(VENV)/pyvenv.cfg
	@torch='$(TORCH)'; \
	if [ -z "$$torch" ]; then \
		if nvidia-smi >/dev/null 2>&1; then torch='torch'; else torch='torch==2.13.0'; fi; \
	fi; \
	echo "==> Installing $$torch (once; this can take some minutes)"; \
	$(PIP) install --no-compile "$$torch"; \
	status=$$?; [ $$status -eq 0 ] && echo "$$torch" > $@; exit $$status

# The extra with the compiler of CUDA kernels: cu12 or cu13, as PyTorch has it. Tests compile kernels
# without a GPU too; the demo needs it only where PyTorch has CUDA.
CUDA := 'import sys, torch; print("cu" + (torch.version.cuda or sys.argv[1]).partition(".")[0])'

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "==> Installing pararnn and what the demo needs"
	@extra=$$($(BIN)/python -W ignore -c $(CUDA) ''); \
	if [ "$$extra" = cu ]; then extra=demo; fi; \
	$(PIP) install --no-compile --quiet -e ".[demo,$$extra]"
	@touch $@

# PyTorch is named again, so that pip fails where an extra needs another one, and does not replace it.
# What every process imports is compiled to bytecode meanwhile, on a core that has nothing to do.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "==> Installing pararnn and the tools for tests, checks and docs"
	@extra=$$($(BIN)/python -W ignore -c $(CUDA) 13); \
	$(BIN)/python -m compileall -qq $(addprefix $(VENV)/lib/python*/site-packages/,torch sympy) & \
	$(PIP) install --no-compile --quiet -e ".[dev,$$extra]" "$$(cat $(VENV)/.torch)"; \
	status=$$?; wait; exit $$status
	@touch $(VENV)/.demo $@

# Everything runs in .venv beside this file. Packages are installed once: pip is called again only
# when pyproject.toml, a file of constraints or the place of the checkout changes, so the targets work
# without a network after the first time.

PYTHON ?= python3
PIP_FLAGS ?=
# One more than the cores of a small machine: tests wait for screens, servers, browsers and children.
JOBS ?= 3
PYTEST_FLAGS ?=
SOAK_MINUTES ?= 60
OLDEST_TORCH ?= 2.11.0
OLDEST_TRANSFORMERS ?= 5.17.0

VENV := .venv
BIN := $(VENV)/bin
KEY := $(shell (cat pyproject.toml constraints.txt constraints-cuda.txt; pwd) | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(KEY)
INSTALLED_WEB := $(VENV)/.installed-web-$(KEY)
INSTALLED_DEV := $(VENV)/.installed-dev-$(KEY)
LIBRARIES ?=
OLDEST := .venv-oldest
CLIENTS := .venv-clients
ENGINES := .venv-vllm
OLDEST_KEY := $(KEY)-$(OLDEST_TORCH)-$(OLDEST_TRANSFORMERS)

# Where an NVIDIA card is present: the versions that the GPU figures come from, in the place of those of constraints.txt.
# Those of tokenizers and huggingface_hub are left to what that transformers requires.
CARD = $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU')
REPLACED = ^(torch|triton|transformers|tokenizers|huggingface_hub)==
CONSTRAINTS = $(VENV)/constraints.txt
# Elsewhere on Linux torch's own index has a build without CUDA, 0.2 GB in the place of several: it is asked first, and
# where it cannot be reached the registry's build comes. Empty: it is not asked.
TORCH_CPU_INDEX ?= $(if $(filter Linux,$(shell uname -s)),https://download.pytorch.org/whl/cpu)

# The torch-free rooms are tested on every supported Python; the others have their own versions to mind.
ROOMS := tests/checkpoint_files tests/catalog tests/config tests/store tests/planner tests/worker tests/chat tests/service \
  tests/app tests/remote tests/report tests/api tests/cli tests/test_settings.py tests/test_tables.py tests/test_terminal.py \
  tests/test_child_process.py tests/test_architecture.py
ROOMS_NEED := tokenizers huggingface_hub typer rich pyyaml jinja2 numpy psutil starlette uvicorn textual \
  msgspec prometheus_client filelock pytest pytest-timeout pytest-xdist hypothesis gguf
ROOMS_TAG := $(shell $(PYTHON) -c 'import sys; print(".".join(map(str, sys.version_info[:2])))' 2>/dev/null)
ROOMS_VENV := .venv-rooms-$(ROOMS_TAG)

# What the tests' hundreds of processes import is compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE
# pip, which says what it does and how far it is.
INSTALL = $(BIN)/python -m tools.pip_install $(filter-out -q -qq --quiet,$(PIP_FLAGS))
# One thread per process: the tiny models of the tests lose time to more.
TEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: help demo web screenshots snapshots install test test-long test-rooms test-oldest test-versions test-gpu \
  test-clients test-engines soak lint format wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         install into .venv, bring a small real model and watch it run; offline a toy"
	@echo "make web          install the page, too, and serve that pair in a browser"
	@echo "make test         the test suite (no network, no GPU)"
	@echo "make test-long    full grids, soaks, scripts from end to end"
	@echo "make test-oldest  the test suite with the lowest supported torch and transformers"
	@echo "make test-versions  other versions of typer, textual, gradio, huggingface_hub (or LIBRARIES='typer textual')"
	@echo "make test-rooms   the torch-free rooms on another Python: make test-rooms PYTHON=python3.13"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make test-clients coding agents, client libraries, Open WebUI and schemathesis, each in .venv-clients"
	@echo "make test-engines a real vLLM on the CPU, in .venv-vllm, serving the bundled pair"
	@echo "make soak         an hour of mixed load on dflash serve, its memory watched: make soak SOAK_MINUTES=10"
	@echo "make lint         ruff, and mypy over package and tests; make format rewrites what ruff can"
	@echo "make screenshots  pictures of the screens and the page: all into build/screens, the README's into docs"
	@echo "make snapshots    the pictures that tests/ui compares, after a change that is meant"
	@echo "make wheel        build the wheel into dist/"
	@echo "make clean        remove .venv, build output and caches"

demo: $(INSTALLED)
	@$(BIN)/python -m tools.first_run
	@$(BIN)/dflash race --pull --plain

web: $(INSTALLED_WEB)
	@$(BIN)/dflash web

install: $(INSTALLED_DEV)

test: $(INSTALLED_DEV)
	@$(TEST) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_FLAGS)

test-long: $(INSTALLED_DEV)
	@$(TEST) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not gpu" --timeout 3600 $(PYTEST_FLAGS)

test-rooms: $(ROOMS_VENV)/.installed-$(KEY)
	@$(TEST) $(ROOMS_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_FLAGS) $(ROOMS)

screenshots: $(INSTALLED_DEV)
	@$(TEST) $(BIN)/python tests/ui/make_screenshots.py build/screens docs
	@$(TEST) $(BIN)/dflash race --plain --save build/screens/race.cast
	@$(TEST) $(BIN)/python tests/ui/make_race_picture.py build/screens/race.cast docs/race.svg
	@$(TEST) $(BIN)/python tests/ui/web/make_pictures.py build/screens docs

snapshots: $(INSTALLED_DEV)
	@$(TEST) $(BIN)/python tests/ui/make_screenshots.py --snapshots

test-gpu: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest -m gpu --timeout 600 $(PYTEST_FLAGS)

test-oldest: $(OLDEST)/.installed-$(OLDEST_KEY)
	@$(TEST) $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_FLAGS)

test-versions: $(INSTALLED_DEV)
	@$(BIN)/python tests/versions.py $(LIBRARIES) --flags="-n $(JOBS) --dist worksteal $(PYTEST_FLAGS)"

# Installs other people's programs (4 GB with torch's CPU build and npm's agents) and runs them without a network.
test-clients: $(INSTALLED_DEV)
	@$(BIN)/python tests/clients/environments.py $(CLIENTS) $(PIP_FLAGS)
	@$(TEST) $(BIN)/python -m pytest -m clients --timeout 900 $(PYTEST_FLAGS) tests/clients

# vLLM's CPU build and torch's, 3.4 GB.
test-engines: $(INSTALLED_DEV)
	@$(BIN)/python tests/engines/environment.py $(ENGINES) $(PIP_FLAGS)
	@$(TEST) $(BIN)/python -m pytest -m engines $(PYTEST_FLAGS) tests/engines

soak: $(INSTALLED_DEV)
	@$(TEST) $(BIN)/python -m tests.soak.run --minutes $(SOAK_MINUTES) \
	  --out benchmarks/results/soak_demo.json

lint: $(INSTALLED_DEV)
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff format --check --output-format concise .
	@$(BIN)/mypy

format: $(INSTALLED_DEV)
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# hatchling comes with the dev extra, so building needs no network either.
wheel: $(INSTALLED_DEV)
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf .venv .venv-oldest .venv-versions .venv-clients .venv-vllm .venv-rooms-* build dist .mypy_cache .pytest_cache .ruff_cache \
	  .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): folder of the virtual environment
define create_venv
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  f"{sys.executable} is Python {v.major}.{v.minor}; the tested versions need 3.11 or later: make PYTHON=/path/to/python3.11")'
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@rm -f $(1)/.installed-*
endef

# The constraints of this machine, and where it has no card torch's build for the CPU unless a torch is there.
define prepare_versions
	@$(if $(CARD),(grep -v -i -E '$(REPLACED)' constraints.txt; cat constraints-cuda.txt),cat constraints.txt) \
	  > $(CONSTRAINTS)
	$(if $(CARD)$(if $(TORCH_CPU_INDEX),,none),,@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(INSTALL) --retries 0 --timeout 20 --no-deps \
	  --index-url $(TORCH_CPU_INDEX) "$$(grep '^torch==' constraints.txt)" 2>/dev/null || \
	  echo "$(TORCH_CPU_INDEX) cannot be reached: taking the registry's torch")
endef

$(INSTALLED):
	$(call create_venv,$(VENV))
	$(prepare_versions)
	@echo "Installing into $(VENV) (the first time only; torch is large)"
	@$(INSTALL) -c $(CONSTRAINTS) -e .
	@touch $@

$(INSTALLED_WEB): $(INSTALLED)
	@echo "Installing the page's library into $(VENV)"
	@$(INSTALL) -c $(CONSTRAINTS) -e '.[web]'
	@touch $@

# In one go where nothing is installed yet: to find out what belongs together takes pip as long as to install it.
$(INSTALLED_DEV):
	$(if $(wildcard $(INSTALLED)),,$(call create_venv,$(VENV)))
	$(prepare_versions)
	@echo "Installing dflash-local and its test tools into $(VENV) (torch is large)"
	@$(INSTALL) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $(INSTALLED)
	@touch $@

# The lowest versions decide for the packages tied to them; the rest keeps its tested version.
# On Linux the registry's build of an older torch brings its CUDA libraries: several GB.
$(OLDEST)/.installed-$(OLDEST_KEY):
	$(call create_venv,$(OLDEST))
	@grep -v -i -E '^(torch|transformers|tokenizers|huggingface_hub)==' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c $(OLDEST)/constraints.txt \
	  torch==$(OLDEST_TORCH) transformers==$(OLDEST_TRANSFORMERS) -e '.[dev]'
	@touch $@

$(ROOMS_VENV)/.installed-$(KEY):
	@$(ROOMS_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(ROOMS_VENV)
	@rm -f $(ROOMS_VENV)/.installed-*
	@$(ROOMS_VENV)/bin/python -m pip install $(PIP_FLAGS) --disable-pip-version-check $(ROOMS_NEED)
	@touch $@

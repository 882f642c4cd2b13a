# Each target makes what it needs: a virtual environment with plain venv and pip, and nothing twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A test that crashes its process, as one that hangs does in the end, is not begun again without end.
# Files are begun in the order of tests/order.py, the longest first.
# Python keeps what it compiled, wherever else it is told not to: checks of annotations take half a minute to compile,
# in each process of the tests.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 2
SOURCES := src tests benchmarks examples scripts

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow chaos check format bench docs wheel gpu-check comfyui-check pocket clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Sigmascope needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "Python has no venv module; on Debian: apt install python3-venv"; exit 1; }

# One stamp for each set of packages, renewed when what it was made from changes.
$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing sigmascope[$*] into $(VENV) (once; PyTorch is the large part)"
	$(PIP) --editable '.[$*]'
	@touch $@

demo: $(VENV)/installed-lbm ## Make, prove, apply and watch a LoRA on a small trained model
	$(BIN)/sigmascope demo

test: $(VENV)/installed-test ## Run the tests but the slow ones, a process on each core
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/installed-test ## Run the slow tests: whole processes, many combinations
	$(PYTEST) -m slow

chaos: $(VENV)/installed-test ## Try to break it; SEED= repeats a run, N=0.1 is a tenth, ONLY="files bombs" two kinds
	OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m tests.chaos $(ONLY) $(if $(SEED),--seed $(SEED)) $(if $(N),--n $(N))

check: $(VENV)/installed-dev ## Format, lint, types, layers
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev ## Format and mend what the linter can mend
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(VENV)/installed-bench ## Run the benchmarks; each prints a table with ratios
	for script in benchmarks/*.py; do echo "== $$script"; SIGMASCOPE_KEEP=0 PYTHONPATH=. $(BIN)/python $$script || exit 1; done

docs: $(VENV)/installed-docs ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

wheel: $(BIN)/python ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

gpu-check: $(VENV)/installed-test ## Run the tests that need a GPU, and measure on it; without one it fails
	REQUIRE_GPU=1 GPU_FIGURES=build/gpu.json $(BIN)/python -m pytest -m gpu --continue-on-collection-errors --durations 10

comfyui-check: $(VENV)/installed-test ## Run the tests against a ComfyUI: COMFYUI=checkout, COMFYUI_PYTHON=its Python, COMFYUI_FRONTEND=its page, COMFYUI_NODES=packs of nodes
	@test -f "$(COMFYUI)/main.py" || { echo "Name a checkout: make comfyui-check COMFYUI=/path/to/ComfyUI"; exit 1; }
	SIGMASCOPE_COMFYUI="$(abspath $(COMFYUI))" SIGMASCOPE_COMFYUI_PYTHON="$(or $(COMFYUI_PYTHON),$(CURDIR)/$(BIN)/python)" \
		SIGMASCOPE_COMFYUI_FRONTEND="$(if $(COMFYUI_FRONTEND),$(abspath $(COMFYUI_FRONTEND)))" \
		SIGMASCOPE_COMFYUI_NODES="$(if $(COMFYUI_NODES),$(abspath $(COMFYUI_NODES)))" \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m comfyui tests/integrations/comfyui

pocket: $(VENV)/installed-lbm ## Train the pocket model again (about an hour on 2 cores)
	$(BIN)/python scripts/pocket/train.py

clean: ## Remove what the other targets made, but not a training's state in build/pocket
	rm -rf $(VENV) site sigmascope-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

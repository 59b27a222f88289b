# One command a task, the same for a person and for CI. Needs Python >= 3.10 and nothing else; PYTHON says which.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help demo test test-gpu lint kernels wheel check-size clean

help:
	@echo "make demo      build the kernels of mamba2-130m and run a Mamba-2 block on them"
	@echo "make test      the whole test suite that needs no GPU (make test-gpu: the rest)"
	@echo "make lint      ruff and mypy"
	@echo "make kernels   compile the full matrix into artifacts/"
	@echo "make wheel     the distribution, with the kernels that artifacts/ holds, in dist/ (make check-size: its bytes too)"
	@echo "make clean     everything that these commands made, except $(VENV) and artifacts/"

# The stamp is written last: an installation that broke half way is taken up again. Changed dependencies are installed anew.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "Python %d.%d is too old: 3.10 or later is needed (make PYTHON=...)" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what tileops needs into $(VENV) (PyTorch is large: this can take minutes) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[jit,dev]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python examples/mamba2_block.py

# One process a core, hence one thread a process.
test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-gpu: $(READY)
	@$(BIN)/python -m pytest -m gpu

lint: $(READY)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m mypy

kernels: $(READY)
	@$(BIN)/python -m build_kernels --jobs $(JOBS)

wheel: $(READY)
	@rm -rf dist build
	@log=$$($(BIN)/python -m build --no-isolation --wheel --outdir dist . 2>&1) || { echo "$$log"; exit 1; }
	@rm -rf build
	@ls -l dist

# Of the wheel, and of the one that the whole matrix would make.
check-size: wheel
	@$(BIN)/python -m build_kernels.size dist/*.whl

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find tileops build_kernels tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

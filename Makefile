# Everything a developer types; each target sets up .venv first, from a bare Python.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-gpu test-multi-gpu check

demo: $(INSTALLED)
	$(BIN)/python example.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not gpu and not multi_gpu"

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m gpu

test-multi-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m multi_gpu

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy nanovllm
	$(BIN)/python -m pytest -q tests/test_architecture.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

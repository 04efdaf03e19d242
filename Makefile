# Two commands do everything: `make demo` and `make test`. The others are their parts.
.PHONY: demo test install lint types unit integration clean
SHELL := /bin/bash
BIN := .venv/bin

demo: install ## post-train a small model on this machine and watch it learn
	$(BIN)/onecopy demo --seed $(or $(SEED),0)

test: install lint types ## everything that runs without a GPU
	$(BIN)/python -m pytest tests -m "not gpu"

install:
	infra/install.sh $(FLAVOUR)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest tests/unit

integration: install
	$(BIN)/python -m pytest tests/integration

clean: ## stop the local pool and remove what the tools left
	-$(BIN)/onecopy pool down
	rm -rf .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info

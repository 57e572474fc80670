# Every target builds .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/electra
ARGS ?=

.PHONY: pretrain demo test test-fast test-all browser lint bench results flags clean

pretrain: .venv/installed  ## pretrain ELECTRA on the built-in corpus; ARGS="--max_steps 100" adds flags
	$(BIN)/hf-tiny pretrain-electra --output_dir $(OUT) $(ARGS)

demo: .venv/installed  ## train the built-in classifier for a minute or two, once, and open a page to try it on
	test -e runs/demo/all_results.json || $(BIN)/hf-tiny finetune-classifier --max_minutes 2 --output_dir runs/demo
	$(BIN)/hf-tiny demo runs/demo $(ARGS)

test: .venv/installed  ## all tests, no network
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: .venv/installed  ## what takes a minute: no other programs are started, no models trained for long
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: .venv/installed .venv/tensorflow  ## the same with TensorFlow and, where they are to be had, Node and a browser
	-$(MAKE) .node/installed
	-$(MAKE) browser
	$(BIN)/python -m pytest -n 2 --dist loadfile -rs

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed  ## hf_tiny and transformers on the same work, alternating
	$(BIN)/python benchmarks/electra.py
	$(BIN)/python benchmarks/finetune.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/seq2seq.py
	$(BIN)/python benchmarks/vit.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/growth.py

results: .venv/installed  ## render the tables of README.md and docs/ from benchmarks/results
	$(BIN)/python benchmarks/render.py

flags: .venv/installed  ## write hf_tiny/flags.tsv, from which an unknown flag is answered at once
	$(BIN)/python -m hf_tiny.flags

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv/tensorflow: .venv/installed  ## only reads checkpoints; too large for the environment of every developer
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,tf]"
	touch $@

.node/installed:  ## @huggingface/transformers, for the tests that run under Node; its CPU runtime needs no install script
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix .node @huggingface/transformers@4.3.1
	touch $@

browser:  ## Debian's Chromium, for the tests of the pages of hf-tiny demo
	command -v chromium || (apt-get update && apt-get install -y chromium)

clean:
	rm -rf .venv

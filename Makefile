# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
#
# make run    set everything up, run the example notebook on the Pooled GPU kernel
# make test   set everything up, lint, type-check, run all tests
# make lab    open JupyterLab with the Pooled GPU kernel
# make docs   build the documentation; make bench: the benchmarks; make test-long: the soaks

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(foreach part,emulator guard,$(wildcard jupyter_gpupool/$(part)/src/* \
  jupyter_gpupool/$(part)/src/*/* \
  jupyter_gpupool/$(part)/*.txt jupyter_gpupool/$(part)/build.py jupyter_gpupool/$(part)/_generate.py))

.PHONY: run test test-failed test-long lint lab docs bench lock clean

$(VENV)/.ready: pyproject.toml hatch_build.py requirements/lock.txt $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed: run make PYTHON=/path/to/python3.10"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@command -v cc >/dev/null || \
	  { echo "A C compiler is missing (it builds the guard and the emulated driver): apt-get install gcc libc6-dev"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -e ".[test,docs]"
	touch $@

$(VENV)/.lab: $(VENV)/.ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -e ".[lab]"
	touch $@

run: $(VENV)/.ready
	$(BIN)/jupyter gpupool demo

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not gpu and not long"

test-failed: $(VENV)/.ready lint
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not gpu and not long"

test-long: $(VENV)/.ready
	$(BIN)/python -m pytest -m long --timeout 3600

lint: $(VENV)/.ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: $(VENV)/.lab
	$(BIN)/jupyter gpupool demo --lab

docs: $(VENV)/.ready
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

lock:
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links pyproject.toml \
	  --extra test --extra docs --extra lab -o requirements/lock.txt

clean:
	rm -rf $(VENV) build dist docs/_build jupyter_gpupool/emulator/lib jupyter_gpupool/guard/lib

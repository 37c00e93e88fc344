# make demo [QUICK=1] [MODEL=FOLDER]   the main job: QLoRA in one process, under FSDP1 and under FSDP2
# make test [TESTS=...] [QUICK=1]      the whole test suite, what TESTS names, or what tests/quick.txt lists
# make newest, make oldest             the suite with the newest stack, and with the stated floor (tests/oldest.txt)
# make wheels                          wheels in dist/: x86-64 and aarch64, glibc 2.28 and later, every GPU architecture
# make release                         the same, a source distribution, and their sums; BITSHARD_URL=... goes into them
# make aarch64                         the wheel for aarch64 under qemu-user: C tests, first example, core of the suite
# make lint                            layout and lint of Python, C and CUDA
# make tools-tests                     unsloth, axolotl, LLaMA-Factory, ms-swift, deepspeed and others as they are, from PyPI
# make worlds                          8 and 16 processes of this machine's CPU that shard a tiny model: some minutes
# make dev                             editable installs: Python edits count at once, `make test` rebuilds the C core
#
# Each makes .venv/ first, from constraints.txt. PYTHON=... uses the environment of another interpreter as it is, which
# needs bitshard, its bitsandbytes, transformers, peft, accelerate, trl, datasets, matplotlib, gguf, pytest and
# pytest-xdist in it.

# Threads that wait for others of their process spin. On a machine whose cores are busy each then waits for one that is
# not running: a step of the demo takes 35 times as long, with this twice. 10,000 rounds are some 20 us (default: 300,000).
export GOMP_SPINCOUNT ?= 10000

PYTHON ?=
QUICK ?=
MODEL ?=
TESTS ?= $(if $(QUICK),$(shell grep -v '^\#' tests/quick.txt),tests)
# The whole suite runs in lanes, one CPU core each; with a GPU, which tests would share, in one process.
LANES ?= $(if $(wildcard /dev/nvidia0)$(filter command line environment,$(origin TESTS)),0,2)
lanes = $(if $(filter-out 0,$(LANES)),-n $(LANES) --no-loadscope-reorder)
PYTEST ?=
UPSTREAM := bitsandbytes==0.50.2

packages := transformers accelerate peft trl datasets gguf matplotlib psutil pytest pytest-xdist ruff clang-format
sources := setup.py pyproject.toml $(shell find csrc cuda python -type f \
	\( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml' \))
layout := $(shell find csrc cuda tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')

original := .cache/upstream/bitsandbytes/__init__.py

ifeq ($(PYTHON),)
python := .venv/bin/python
tools := .venv/.packages
ready := .venv/.installed
upstream := $(original)
else
python := $(PYTHON)
tools :=
ready := given
upstream :=
endif
pip := $(python) -m pip install -qq --disable-pip-version-check

.PHONY: demo test newest oldest tools-tests worlds wheels release aarch64 lint dev given

demo: $(ready)
	$(python) examples/demo.py $(if $(QUICK),--quick) $(if $(MODEL),--model $(MODEL))

test: $(ready) $(upstream)
	$(python) -m pytest $(TESTS) $(lanes) $(PYTEST)

# Each in an environment of its own below .cache; torch brings its CUDA packages there, some 5 GB.
newest oldest: $(original)
	python3 -m venv .cache/$@
	.cache/$@/bin/python -m pip install -qq --disable-pip-version-check --upgrade \
		$(if $(filter oldest,$@),-c tests/oldest.txt) torch 'setuptools>=77' $(packages)
	.cache/$@/bin/python -m pip install -qq --disable-pip-version-check --force-reinstall --no-deps . ./python/bitsandbytes
	.cache/$@/bin/python -m bitshard
	.cache/$@/bin/python -m pytest $(TESTS) $(lanes) $(PYTEST)

# The pins are in tests/tools/fetch.py; .cache/tools is filled once. No part of `make test`.
tools-tests: $(ready) $(upstream)
	$(python) tests/tools/fetch.py
	$(python) -m pytest tests/tools -o python_files='try_*.py'

# 16 processes share what cores there are; no part of `make test`.
worlds: $(ready)
	$(python) -m pytest tests/worlds -o python_files='try_*.py' $(PYTEST)

# zig's clang, auditwheel and what builds: 90 MB, pinned.
.cache/release-tools/.installed: release/tools.txt
	rm -rf .cache/release-tools
	$(if $(PYTHON),$(PYTHON),python3) -m pip install -qq --disable-pip-version-check --no-deps \
		--target .cache/release-tools -r release/tools.txt
	touch $@

AARCH64 ?=
ARCHITECTURES ?= all
MACHINES ?= x86_64,aarch64
wheels release: .cache/release-tools/.installed
	$(if $(PYTHON),$(PYTHON),python3) release/wheels.py --machines $(MACHINES) \
		--architectures $(ARCHITECTURES) $(if $(filter release,$@),--sdist)

# What it needs is in release/try_aarch64.py, which names what is missing; .cache/aarch64 is filled once.
aarch64: .cache/release-tools/.installed
	$(if $(PYTHON),$(PYTHON),python3) release/wheels.py --machines aarch64 --architectures none --out .cache/aarch64/dist
	$(if $(PYTHON),$(PYTHON),python3) release/try_aarch64.py --out .cache/aarch64/table.md $(AARCH64)

lint: $(tools)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror $(layout)

dev: .venv/.packages
	$(pip) -c constraints.txt -e . -e ./python/bitsandbytes
	touch .venv/.editable .venv/.installed

given:
	$(python) -m bitshard

.venv/.made:
	python3 -m venv .venv
	touch $@

# torch first and alone: what comes after it must not bring another build of it.
.venv/.packages: constraints.txt | .venv/.made
	$(pip) -c constraints.txt torch
	$(pip) -c constraints.txt $(packages)
	touch $@

# They need none of the packages, so `make -j 2` compiles them while pip installs those.
.cache/wheels/.made: $(sources) | .venv/.made
	rm -rf .cache/wheels
	$(python) -m pip wheel -qq --disable-pip-version-check --no-deps -w .cache/wheels . ./python/bitsandbytes
	touch $@

.venv/.installed: .venv/.packages $(if $(wildcard .venv/.editable),$(sources),.cache/wheels/.made)
	if [ -e .venv/.editable ]; then $(python) setup.py -q build_ext --inplace; \
	else $(pip) --no-deps --force-reinstall .cache/wheels/*.whl; fi
	$(python) -m bitshard
	touch $@

# The original, in a folder of its own: checkpoints go both ways between it and the façade (tests/upstream/test_checkpoints.py).
$(original):
	$(if $(PYTHON),$(python),python3) -m pip install -qq --disable-pip-version-check --no-deps --target .cache/upstream $(UPSTREAM)

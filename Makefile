SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: anew audit faults help run soak test lint docs format lock install

DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep GPU >/dev/null && echo gpu || echo cpu)
LOCK := requirements/$(DEVICE).txt
TORCH := $(shell sed -n 's/^torch==\([^ ]*\).*/\1/p' $(LOCK))
# One stamp per content of the lock, of the native part and of pyproject.toml, and per list of modules, each of which the
# editable install maps to its file: a second call installs nothing, after a change one does.
NATIVE := CMakeLists.txt $(sort $(wildcard kernels/csrc/*))
MODULES := $(sort $(shell find hybrid_rl kernels/hybrid_rl_kernels launch -name '*.py'))
STAMP := .venv/.installed-$(shell (cat $(LOCK) $(NATIVE) pyproject.toml; echo $(MODULES)) | sha256sum | cut -c1-16)

# The GPU lock was resolved for 3.12, and some of its versions refuse 3.11.
VERSIONS := $(if $(filter gpu,$(DEVICE)),3.12,3.11/3.12)
CANDIDATES := $(patsubst %,python%,$(subst /, ,$(VERSIONS))) python3
VERSION_CHECK := import sys; sys.exit("{}.{}".format(*sys.version_info) not in "$(VERSIONS)".split("/"))
PYTHON ?= $(shell for p in $(CANDIDATES); do if $$p -c '$(VERSION_CHECK)' 2>/dev/null; then echo $$p; break; fi; done)

export DO_NOT_TRACK := 1
export TOKENIZERS_PARALLELISM := false
export VLLM_NO_USAGE_STATS := 1

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

run: $(STAMP)  ## train the demo; settings with ARGS="--run.num_steps 3"
	.venv/bin/python launch/colocated.py $(ARGS)

# Each worker runs whole files, with engines and fork servers of its own; tests/conftest.py orders them. A worker that
# crashes ends the session: pytest-xdist's new worker may wait forever for files that it is given whole.
WORKERS := 2
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 \
  .venv/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 10

test: lint docs  ## lint, the documentation, and every test that needs no GPU and is not slow
	$(PYTEST) -m "not gpu and not multi_gpu and not slow"

test-slow: $(STAMP)  ## the tests marked slow that need no GPU
	$(PYTEST) -m "slow and not gpu and not multi_gpu"

audit: .venv/bin/uv  ## known vulnerabilities of the locked packages; needs a network
	.venv/bin/python requirements/audit.py requirements/cpu.txt requirements/gpu.txt requirements/flash.txt

soak: $(STAMP)  ## 50,000 fuzz cases; other numbers with ARGS="--cases 5000 --seed 7"
	HF_HUB_OFFLINE=1 .venv/bin/python -m tests.fuzz.soak $(ARGS)

faults: $(STAMP)  ## every fault of every process and file, to profiling/results/faults.csv; an hour
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 .venv/bin/python -m tests.faults.suite $(ARGS)

lint: $(STAMP)  ## ruff, format check and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: $(STAMP)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

format: $(STAMP)  ## let ruff sort, fix and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# The lock is installed with --no-deps. vLLM's metadata asks for these packages, and serving text needs none of them; beside
# torch's CPU build their PyPI builds fail to import, which breaks transformers' probing of them.
UNWANTED := torchvision torchaudio torchcodec
UV := .venv/bin/python requirements/uv.py
COMPILE := $(UV) pip compile --quiet --generate-hashes --no-header --no-annotate --python-platform x86_64-manylinux_2_35 \
  $(addprefix --no-emit-package ,$(UNWANTED))
# The CPU build of torch has a file per Python and platform, and not every source of it names their hashes.
WITHOUT_HASH := /^torch==.*+cpu/,/[^\\]$$/ { s/^\(torch==[^ ]*\).*/\1/; /^ /d }

lock: .venv/bin/uv  ## resolve requirements/*.in again; versions of the present locks stay where they can
	$(COMPILE) $(TORCH_INDEX) --override requirements/overrides.txt --python-version 3.11 requirements/cpu.in -o requirements/cpu.txt
	$(COMPILE) --python-version 3.12 requirements/gpu.in -o requirements/gpu.txt
	sed -i -e '$(WITHOUT_HASH)' -e '1i # From cpu.in by "make lock" for Python 3.11.' requirements/cpu.txt
	sed -i -e '1i # From gpu.in by "make lock" for Python 3.12.' requirements/gpu.txt
	$(COMPILE) --no-deps --python-version 3.12 requirements/flash.in -o requirements/flash.txt
	sed -i -e '1i # From flash.in by "make lock": what FLASH=1 installs beside gpu.txt.' requirements/flash.txt

install: $(STAMP)  ## create .venv from the locked requirements; with flash-attn by FLASH=1
	$(if $(filter-out 0,$(FLASH)),@.venv/bin/python requirements/flash.py)

# PyTorch's own index only where the configured ones lack the CPU build: PyPI's torch is the CUDA one.
TORCH_INDEX = $(if $(filter cpu,$(DEVICE)),$(shell .venv/bin/pip index versions torch 2>/dev/null | grep -F '$(TORCH)' >/dev/null \
  || echo --index https://download.pytorch.org/whl/cpu))

$(STAMP): .venv/bin/uv
	@echo "installing $(LOCK) into .venv"
	@$(UV) pip install --no-deps --compile-bytecode $(TORCH_INDEX) -r $(LOCK)
	@$(UV) pip install --no-deps --no-build-isolation --reinstall-package hybrid_rl -e .
	@rm -f .venv/.installed-* && touch $@

.venv/bin/uv: $(if $(wildcard $(patsubst %,.venv/lib/python%,$(subst /, ,$(VERSIONS)))),,anew)
	@test -n "$(PYTHON)" || { echo "error: none of $(CANDIDATES) is Python $(VERSIONS); give one with PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c '$(VERSION_CHECK)' || { echo "error: PYTHON=$(PYTHON) is not Python $(VERSIONS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "creating .venv with $(PYTHON), and uv in it"
	@"$(PYTHON)" -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' $(LOCK) | .venv/bin/pip install -qq --no-deps --require-hashes -r /dev/stdin

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run test lint format lock install

DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep GPU >/dev/null && echo gpu || echo cpu)
LOCK := requirements/$(DEVICE).txt
TORCH := $(shell sed -n 's/^torch==//p' $(LOCK))
# One stamp per content of the lock and of the native part: a second call installs nothing, after a change one does.
NATIVE := CMakeLists.txt $(sort $(wildcard kernels/csrc/*))
STAMP := .venv/.installed-$(shell cat $(LOCK) $(NATIVE) | sha256sum | cut -c1-16)

# The GPU lock was resolved for 3.12, and some of its versions refuse 3.11.
VERSIONS := $(if $(filter gpu,$(DEVICE)),3.12,3.11/3.12)
CANDIDATES := $(patsubst %,python%,$(subst /, ,$(VERSIONS))) python3
VERSION_CHECK := import sys; sys.exit("{}.{}".format(*sys.version_info) not in "$(VERSIONS)".split("/"))
PYTHON ?= $(shell for p in $(CANDIDATES); do if $$p -c '$(VERSION_CHECK)' 2>/dev/null; then echo $$p; break; fi; done)

export DO_NOT_TRACK := 1
export TOKENIZERS_PARALLELISM := false
export VLLM_NO_USAGE_STATS := 1

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

run: $(STAMP)  ## train the demo; settings with ARGS="--run.num_steps 3"
	.venv/bin/python launch/colocated.py $(ARGS)

test: export HF_HUB_OFFLINE := 1
test: export VLLM_CPU_KVCACHE_SPACE := 1
test: lint  ## lint, then every test that needs no GPU
	.venv/bin/python -m pytest -m "not gpu and not multi_gpu"

lint: $(STAMP)  ## ruff, format check and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: $(STAMP)  ## let ruff sort, fix and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

lock:  ## resolve requirements/*.in again; needs python3.11 and python3.12, each with pip
	python3.11 requirements/lock.py cpu
	python3.12 requirements/lock.py gpu

install: $(STAMP)  ## create .venv from the locked requirements

$(STAMP):
	@test -n "$(PYTHON)" || { echo "error: none of $(CANDIDATES) is Python $(VERSIONS); give one with PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c '$(VERSION_CHECK)' || { echo "error: PYTHON=$(PYTHON) is not Python $(VERSIONS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@.venv/bin/python -c 'import pip; $(VERSION_CHECK)' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	@echo "installing $(LOCK) into .venv; the first time takes a few minutes"
	@# PyTorch's own index only where the configured ones lack the CPU build: PyPI's torch is the CUDA one.
	@index=; if [ $(DEVICE) = cpu ] && ! .venv/bin/pip index versions torch 2>/dev/null | grep -F '$(TORCH)' >/dev/null; then \
	  index="--extra-index-url https://download.pytorch.org/whl/cpu"; fi; \
	  .venv/bin/pip install -qq --no-deps $$index -r $(LOCK)
	@.venv/bin/pip install -qq --no-deps --no-build-isolation -e .
	@rm -f .venv/.installed-* && touch $@

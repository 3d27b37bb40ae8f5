# Two commands do everything on a fresh machine with Python 3.11+: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob
AZUREML := $(VENV)/azureml/.installed

.PHONY: install quickstart test test-slurm chaos check clean

install: $(STAMP)

# torch first and alone, at its pinned version: any package that asks for torch without a version would pull another.
# Bytecode last: pip compiles what it installs, but an editable package only if Python may write beside its sources.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Bloomery needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -q src
	touch $(STAMP)

quickstart: install
	$(BIN)/bloomery quickstart

# Azure's emulator, for the tests of abfs:// URLs. They say why they are skipped where there is no npm.
$(AZURITE): | install
	-command -v npm > /dev/null && npm install --silent --no-fund --no-audit --prefix $(VENV)/azurite azurite@3.35.0

# Microsoft's SDK, by which tests validate the jobs of AzureML: apart, because its packages are none of ours. They say why
# they are skipped where it cannot be installed.
$(AZUREML): | install
	-$(PYTHON) -m venv $(VENV)/azureml && $(VENV)/azureml/bin/python -m pip install --quiet azure-ai-ml==1.35.2 && touch $@

# The checks run beside the tests. pytest keeps what it makes of each `assert` as bytecode: once, before its workers start.
test: export PYTHONDONTWRITEBYTECODE :=
test: export OMP_NUM_THREADS := 1
test: install $(AZURITE) $(AZUREML)
	@$(MAKE) --no-print-directory check & checks=$$!; \
	  $(BIN)/python -m pytest --collect-only -qq --ignore tests/cluster > /dev/null; \
	  $(BIN)/python -m pytest -n 6 --dist worksteal --ignore tests/cluster && wait $$checks

# A real Slurm of three nodes, and hosts that ssh reaches, on this machine. Needs root and Debian's packages; a test that
# cannot run says what is missing.
test-slurm: install
	-[ "$$(id -u)" != 0 ] || command -v slurmctld sshd > /dev/null || (apt-get -qq update && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	  apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client munge openssh-server openssh-client iproute2)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -n 2 --dist loadfile -rs

# Every fault in every layout, 100,000 inputs for each parser, deeper interleavings; writes docs/reliability.md.
chaos: install
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m chaos
	OMP_NUM_THREADS=1 BLOOMERY_FUZZ_INPUTS=100000 BLOOMERY_SIMULATION_DEPTH=2 $(BIN)/python -m pytest tests/test_fuzz.py tests/test_protocol.py -s

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache quickstart runs

# Everything is installed into .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: setup demo test test-all test-torchrl test-distributed lint types bench learn docs clean help

help:
	@echo "make demo    set up, collect 100,000 CartPole frames, show what came out"
	@echo "make test    set up, then lint, types and tests"
	@echo "make test-all  as make test, with the tests that take minutes"
	@echo "make test-torchrl  what needs TorchRL"
	@echo "make test-distributed  all tests of Ray, torch.distributed and RPC"
	@echo "make learn   train all examples with three seeds, write docs/results.md"
	@echo "make bench   side by side with the peers (its own environment)"
	@echo "make clean   remove environments and caches"

# A stamp, so that a second run does not ask the package index again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time this takes about two minutes)"
	@$(PIP) torch
	@$(PIP) -e ".[test,classic-control,ray,submitit,examples]"
	@touch $@

setup: $(VENV)/.installed

demo: setup
	@rm -rf build/demo
	$(BIN)/swath collect CartPole-v1 --frames 100k --envs 8 --seed 0 --out build/demo
	@$(BIN)/python -c "import swath; d = swath.load('build/demo'); print(d.frames); print(d.episodes[:3])"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright --level error

test: setup lint types
	$(BIN)/pytest

# With TorchRL's own objects as guests, in an environment that has it.
$(VENV)-torchrl/.installed: pyproject.toml constraints.txt
	@test -x $(VENV)-torchrl/bin/python || $(PYTHON) -m venv $(VENV)-torchrl
	@$(VENV)-torchrl/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt torch
	@$(VENV)-torchrl/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -e ".[test,classic-control,torchrl]"
	@touch $@

test-torchrl: $(VENV)-torchrl/.installed
	$(VENV)-torchrl/bin/pytest -m torchrl

# With what takes minutes: every layout in new interpreters, hundreds of kills.
test-all: setup lint types
	$(BIN)/pytest -m "slow or not slow"

# Longer tests of collectors on nodes, and what needs Ray.
test-distributed: setup
	$(BIN)/pytest -m "slow or not slow" tests/test_distributed.py tests/test_ray.py tests/test_rpc.py tests/test_two_hosts.py tests/test_examples.py

bench:
	$(MAKE) --no-print-directory -C benchmarks bench

# One run after another: each is timed.
learn: setup
	$(BIN)/python examples/run_all.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-torchrl build benchmarks/.venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Everything is installed into .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: setup demo test test-all test-torchrl test-envs test-distributed lint types bench learn docs clean help

help:
	@echo "make demo    set up, collect 100,000 CartPole frames, show what came out"
	@echo "make test    set up, then lint, types and tests"
	@echo "make test-all  as make test, with the tests that take minutes"
	@echo "make test-torchrl  what needs TorchRL"
	@echo "make test-envs  what needs EnvPool, ale-py, MuJoCo, dm_control or PettingZoo"
	@echo "make test-distributed  all tests of Ray, torch.distributed and RPC"
	@echo "make docs    build the documentation site, build/docs/html (its own environment)"
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

# Envs of other packages, in an environment that has them all.
ENV_EXTRAS := envpool,atari,mujoco,dm-control,pettingzoo
$(VENV)-envs/.installed: pyproject.toml constraints.txt
	@test -x $(VENV)-envs/bin/python || $(PYTHON) -m venv $(VENV)-envs
	@$(VENV)-envs/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt torch
	@$(VENV)-envs/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -e ".[test,classic-control,$(ENV_EXTRAS)]"
	@touch $@

test-envs: $(VENV)-envs/.installed
	$(VENV)-envs/bin/pytest tests/test_user_envs.py

# With what takes minutes: every layout in new interpreters, hundreds of kills.
test-all: setup lint types
	$(BIN)/pytest -m "slow or not slow"

# Longer tests of collectors on nodes, and what needs Ray.
test-distributed: setup
	$(BIN)/pytest -m "slow or not slow" tests/test_distributed.py tests/test_ray.py tests/test_rpc.py tests/test_two_hosts.py tests/test_examples.py

# The site imports swath, and fetches nothing; any warning is an error, dangling references included. All pages are read
# each time (-E -a): a page that is not read again would not warn again.
DOCS := $(VENV)-docs
$(DOCS)/.installed: pyproject.toml constraints.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt torch
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(DOCS)/.installed
	$(DOCS)/bin/sphinx-build -q -E -a -W --keep-going -d build/docs/doctrees docs build/docs/html
	@echo "build/docs/html/index.html"

bench:
	$(MAKE) --no-print-directory -C benchmarks bench

# One run after another: each is timed.
learn: setup
	$(BIN)/python examples/run_all.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-torchrl $(VENV)-docs $(VENV)-envs build benchmarks/.venv .pytest_cache .ruff_cache .hypothesis MUJOCO_LOG.TXT
	find . -name __pycache__ -prune -exec rm -rf {} +

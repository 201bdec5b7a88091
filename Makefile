# Everything is installed into .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests wait more than they compute, so there are more processes than cores. What is about time has the machine to itself.
PYTEST   ?= pytest
# Hundreds of processes import what is here: not one should have to compile it again.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL ?= -n 3 --dist loadgroup
RESULTS  := build/results

.PHONY: house surface setup demo check test test-together test-alone test-all test-torchrl test-envs test-browser test-distributed lint types coverage mutations chaos bench compare learn recordings docs clean help

help:
	@echo "make demo    set up, collect 100,000 CartPole frames, show what came out"
	@echo "make check   set up, then lint, types and the tests that start no process: a minute, while writing"
	@echo "make test    set up, then lint, types and tests: what a change must pass"
	@echo "make test-all  as make test, with full matrices, kill series, trainings, TorchRL's objects and others' envs"
	@echo "make test-torchrl  what needs TorchRL"
	@echo "make test-envs  what needs EnvPool, ale-py, MuJoCo, dm_control or PettingZoo"
	@echo "make test-browser  open reports in Chromium (installed if root may); what it saw: build/report"
	@echo "make test-distributed  all tests of Ray, torch.distributed and RPC"
	@echo "make coverage  which lines the tests reach, in this process and in all others"
	@echo "make mutations  break the source in twenty places, one after another: do the tests see it?"
	@echo "make chaos   random calls and real kills against every collector: make chaos ARGS='--minutes 10 --seed 3'"
	@echo "make docs    build the documentation site, build/docs/html (its own environment)"
	@echo "make learn   train all examples with three seeds, write docs/results.md"
	@echo "make recordings  type the commands of docs/recordings.md into a terminal again, and keep what it shows"
	@echo "make bench   side by side with the peers (its own environment)"
	@echo "make compare BASE=REV  this source against another state of it, in turns: is it as fast?"
	@echo "make surface  compare what TorchRL has with what swath has, write docs/peer-surface.md"
	@echo "make house   how big the source is: code by folder, long functions, circles"
	@echo "make clean   remove environments and caches"

# Environments, and the extras of each. A stamp, so that a second run does not ask the package index again.
$(VENV)/.installed:         EXTRAS := test,classic-control,ray,submitit,examples
$(VENV)-torchrl/.installed: EXTRAS := test,classic-control,torchrl
$(VENV)-envs/.installed:    EXTRAS := test,classic-control,envpool,atari,mujoco,dm-control,pettingzoo
$(VENV)-docs/.installed:    EXTRAS := docs
ENVIRONMENTS := $(VENV) $(VENV)-torchrl $(VENV)-envs $(VENV)-docs

$(ENVIRONMENTS:%=%/.installed): %/.installed: pyproject.toml constraints.txt
	@test -x $*/bin/python || $(PYTHON) -m venv $*
	@echo "installing into $* (the first time this takes a minute or two)"
	@$*/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt torch
	@$*/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

setup: $(VENV)/.installed

demo: setup
	@rm -rf build/demo
	$(BIN)/swath collect CartPole-v1 --frames 100k --envs 8 --seed 0 --out build/demo
	@$(BIN)/python -c "import swath; d = swath.load('build/demo'); print(d.frames); print(d.episodes[:3])"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: setup
	$(BIN)/pyright --level error

check: setup lint types
	$(BIN)/$(PYTEST) $(PARALLEL) -m "not slow and not processes and not alone"

test: setup lint types test-together test-alone

test-together: setup
	$(BIN)/$(PYTEST) $(PARALLEL) -m "not slow and not alone and not browser" --junitxml=$(RESULTS)/test.xml

test-alone: setup
	$(BIN)/$(PYTEST) -m "not slow and alone" --junitxml=$(RESULTS)/test-alone.xml

# With TorchRL's own objects as guests.
test-torchrl: $(VENV)-torchrl/.installed
	$(VENV)-torchrl/bin/$(PYTEST) $(PARALLEL) -m torchrl --junitxml=$(RESULTS)/test-torchrl.xml

# Envs of other packages.
test-envs: $(VENV)-envs/.installed
	$(VENV)-envs/bin/$(PYTEST) $(PARALLEL) tests/test_user_envs.py --junitxml=$(RESULTS)/test-envs.xml

# Reports in a real browser. Debian's package, if there is none and root may install it.
test-browser: setup
	@$(BIN)/python tools/chromium.py || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; \
		else echo "there is no Chromium: apt-get install --no-install-recommends chromium, as root" >&2; exit 1; fi; }
	$(BIN)/$(PYTEST) -m browser tests/test_report_browser.py --junitxml=$(RESULTS)/test-browser.xml

# With what takes minutes: every layout in new interpreters, hundreds of kills, trainings; and every guest.
test-all: setup lint types
	$(BIN)/$(PYTEST) $(PARALLEL) -m "not alone"
	$(BIN)/$(PYTEST) -m alone
	$(MAKE) --no-print-directory test-torchrl test-envs test-browser

# Longer tests of collectors on nodes, and what needs Ray.
test-distributed: setup
	$(BIN)/$(PYTEST) -m "slow or not slow" tests/test_distributed.py tests/test_ray.py tests/test_rpc.py tests/test_two_hosts.py tests/test_examples.py

# Which lines `make test` reaches, in every process. (What is about time is left out: tracing takes some.)
# A test of other people's forks fails under it, since it is also in their processes.
coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: setup
	rm -rf build/coverage
	mkdir -p build/coverage
	-$(BIN)/coverage run -m pytest $(PARALLEL) -m "not slow and not alone"
	$(BIN)/coverage combine -q
	$(BIN)/coverage html -q
	$(BIN)/coverage report | tail -n 45
	@echo "build/coverage/html/index.html"

# Whether tests see it when the source is wrong.
mutations: setup
	$(BIN)/python tests/mutations.py

# How long, how many kills, which collector, which seed: ARGS="--help".
chaos: setup
	$(BIN)/python tests/chaos.py $(ARGS)

# The site imports swath, and fetches nothing; any warning is an error, dangling references included. All pages are read
# each time (-E -a): a page that is not read again would not warn again.
docs: $(VENV)-docs/.installed
	$(VENV)-docs/bin/sphinx-build -q -E -a -W --keep-going -d build/docs/doctrees docs build/docs/html
	@echo "build/docs/html/index.html"

bench:
	$(MAKE) --no-print-directory -C benchmarks bench

# Every name and argument of TorchRL's, and whether it is here: what tools/peer_surface.toml does not explain is an error.
surface: $(VENV)-torchrl/.installed
	$(VENV)-torchrl/bin/python tools/peer_surface.py

# This source against another state of it, in turns.
compare:
	$(MAKE) --no-print-directory -C benchmarks compare BASE="$(BASE)"

# One run after another: each is timed.
learn: setup
	$(BIN)/python examples/run_all.py $(ARGS)

# In new environments, with what pip brings. Needs tmux.
recordings: setup
	$(BIN)/python tools/record.py $(ARGS)

# How big the source is, and how it hangs together: ARGS=--all lists each place.
house: setup
	$(BIN)/python tools/house.py $(ARGS)

clean:
	rm -rf $(ENVIRONMENTS) build benchmarks/.venv .pytest_cache .ruff_cache .hypothesis MUJOCO_LOG.TXT
	find . -name __pycache__ -prune -exec rm -rf {} +

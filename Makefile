# Needs Python 3.10 or later, git and make; everything else is installed into $(VENV).
VENV ?= .venv
PYTHON ?= python3
LOCK ?= constraints.txt

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# What takes minutes prints a line for each package.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off
TORCH := 2.13.0
NPM := sh webui/scripts/npm.sh $(abspath $(BIN)/python)
BUILD_UI := $(BIN)/python webui/scripts/build.py
FAST_TESTS ?= $(addprefix tests/,journal messages storage config search)

.PHONY: help demo ui docs test-ui browser format test test-fast test-long test-all test-stores test-versions exactness fault-matrix test-backends test-clients check bench bench-peers bench-data bench-search \
  proof soak faults gpu gpu-wheels lock clean

help:
	@echo "make demo       a hyperparameter search from start to leaderboard, under 3 minutes"
	@echo "make ui         the web UI, built for the master to serve"
	@echo "make docs       the documentation as a site, into build/site and for the master to serve"
	@echo "make test-ui    the web UI, built and tested without a browser"
	@echo "make browser    a Chromium for the tests of the web UI, unless there is one"
	@echo "make test       the tests that are short, and by turns a tenth of the long ones"
	@echo "make test-long  the tests that are not slow, half an hour more"
	@echo "make test-fast  the tests that start no processes, in a small environment"
	@echo "make test-all   all tests, campaigns in full counts"
	@echo "make test-stores  all tests of storages, with an Azurite for az://"
	@echo "make test-versions  the lowest and the newest dependencies, on each Python found here"
	@echo "make exactness  every cell of the matrix of interrupted trainings, about 10 minutes"
	@echo "make fault-matrix  what is seen of each fault of a worker, as a table, about 10 minutes"
	@echo "make test-backends  DeepSpeed and Horovod, built in environments of their own"
	@echo "make test-clients  six releases of other trackers' clients, with WANDB_SRC= and MLFLOW_SRC=CHECKOUT their tests"
	@echo "make format     what the linter and the formatter can mend"
	@echo "make check      linter, formatter, types and documentation"
	@echo "make bench      the benchmarks, as a table"
	@echo "make bench-peers  training steps and worker groups of Paceline and of others, 20 minutes"
	@echo "make bench-data  reading data by Paceline and by others, 40 minutes"
	@echo "make bench-search  searches of Paceline and of others, one hour on two idle cores"
	@echo "make proof      a larger model whose workers are killed every two minutes, here and elsewhere, one hour"
	@echo "make soak       what grows in a master that has 10,000 trials, one hour"
	@echo "make faults     kills, failing calls, power losses, flipped bits and faults of machines, in full counts, an hour or more"
	@echo "make gpu        what only a GPU can tell, in 9 minutes; small on the CPU without one"
	@echo "make gpu-wheels  what \`make gpu\` needs besides torch on a machine without a network"
	@echo "make lock       exact versions of all dependencies, into $(LOCK)"
	@echo "make clean      remove what builds and tests left"

demo: demo-says $(VENV)/.installed-examples
	@$(MAKE) --no-print-directory ui || echo "The demo goes on without the web UI." >&2
	@export PATH="$(abspath $(BIN)):$$PATH"; exec sh examples/demo.sh

# Nothing tells a person why pip is silent while it unpacks torch.
.PHONY: demo-says
demo-says:
	@[ -e $(VENV)/.installed-examples ] || { \
	  echo "1 of 3, once: pip installs Paceline, torch and scikit-learn into $(VENV). It takes some"; \
	  echo "minutes, on a busy machine up to half an hour, and is silent while it unpacks torch."; \
	  echo "2 of 3, once: the web UI is built. 3 of 3: the search runs, for less than 3 minutes."; }

# A machine without Node gets it as a package.
NODE := $(NPM) --version >/dev/null 2>&1 || $(PIP) install -r webui/scripts/node.txt

ui: | $(BIN)/python
	@$(BUILD_UI) --check || { { $(NODE); } && $(BUILD_UI); }

# It fails on dead links and anchors, pages in no group, and public names without docstring.
docs: $(VENV)/.installed-dev
	@$(BIN)/python docs/site/build.py

# Tests in a browser skip, and say so, where the web UI cannot be built or no browser can be had.
test-ui: | $(BIN)/python
	@if $(MAKE) --no-print-directory ui; then \
	  [ -d webui/node_modules ] || { { $(NODE); } && $(NPM) ci --no-audit --no-fund --loglevel=error; } \
	  && $(NPM) test --silent; \
	else echo "NOT TESTED: the web UI, as it cannot be built here." >&2; fi

# Any Chromium will do: the machine's, Debian's for who may install it, else Playwright's own.
# Its headless shell, where there is one, takes a third of the processor time.
browser: $(VENV)/.installed-dev
	@for name in chromium chromium-browser google-chrome; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	  && { apt-get install -y -qq --no-install-recommends \
	      chromium chromium-headless-shell >/dev/null 2>&1 \
	    || apt-get install -y -qq --no-install-recommends chromium >/dev/null; }; then exit 0; fi; \
	$(BIN)/python -m playwright install chromium \
	  || echo "NOT TESTED: the web UI in a browser, as none can be installed here." >&2

# Thousands of processes import it, and some machines keep Python from storing what it compiles.
COMPILE := @$(BIN)/python -m compileall -q -x /test_ src tests && $(BIN)/python tests/compile_tests.py

# Most tests wait for processes, so several at once fit on two cores. The tests of a file share what
# is slow to start, such as a cluster, so one process runs them all.
ONE_FILE_EACH := --dist loadfile --no-loadscope-reorder
TEST_PROCESSES ?= 6
# So many tests that failed run once more alone: what passes then is named, and has a defect of order
# or of load to be found.
MOST_REPEATED ?= 5

# A provider to sign in by, which runs with Node; its tests skip, and say so, where none can be had.
oidc: | $(BIN)/python
	@[ -d build/oidc/node_modules ] || { mkdir -p build/oidc && { $(NODE); } && $(NPM) install \
	  --prefix $(abspath build/oidc) --no-audit --no-fund --loglevel=error oidc-provider@9.13.3; } \
	  || echo "NOT TESTED: sign-in by OpenID Connect, as no provider can be installed here." >&2

# The turn of the long tests goes by the number of commits, so one commit has the same tests again.
test: export PACELINE_TEST_TURN ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
test-long: export PACELINE_TEST_TURN =

test test-long: $(VENV)/.installed-dev test-ui browser oidc
	$(COMPILE)
	@export PYTHONPATH=$(abspath tests/quick_start) status=0; \
	$(BIN)/python -m pytest -q -m "not slow" --cache-clear -n $(TEST_PROCESSES) $(ONE_FILE_EACH) \
	  || status=$$?; \
	failed=.pytest_cache/v/cache/lastfailed; \
	if [ $$status -eq 1 ] && [ "$$(grep -c '"tests/' $$failed)" -le $(MOST_REPEATED) ]; then \
	  echo "Failed among the others, so a defect somewhere; now each of them alone:"; \
	  exec $(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none tests; \
	fi; exit $$status

# FAST_TESTS="tests/search" runs less.
test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -m "not slow" $(FAST_TESTS)

test-all: $(VENV)/.installed-dev test-ui browser oidc
	$(COMPILE)
	PACELINE_TEST_FULL=1 $(BIN)/python -m pytest -q --hypothesis-profile=random

# All tests of storages, with a server for each of them.
test-stores: $(VENV)/.installed-dev build/azurite/.installed
	AZURITE=$(abspath build/azurite/node_modules/.bin/azurite-blob) \
	  $(BIN)/python -m pytest -q tests/storage

build/azurite/.installed: | $(BIN)/python
	@mkdir -p build/azurite
	@$(NODE)
	$(NPM) install --prefix $(abspath build/azurite) --no-audit --no-fund --loglevel=error \
	  azurite@3.37.0
	@touch $@

# VERSIONS="--only lowest --python /usr/bin/python3" tries less.
test-versions: $(VENV)/.installed-dev
	$(BIN)/python tests/versions/try_versions.py $(VERSIONS)

exactness: $(VENV)/.installed-dev
	PYTHONPATH=$(abspath tests/quick_start) \
	  $(BIN)/python -m pytest -q tests/exactness -n 2 --dist worksteal

# What is seen of each fault of one rank, for each way to start workers, as a table.
fault-matrix: $(VENV)/.installed-dev
	@mkdir -p build && rm -f build/fault-cells.jsonl
	PACELINE_FAULT_CELLS=$(abspath build/fault-cells.jsonl) \
	  $(BIN)/python -m pytest -q tests/system/test_fault_matrix.py -n 2 --dist worksteal; \
	  status=$$?; $(BIN)/python tests/system/fault_table.py build/fault-cells.jsonl; exit $$status

# The real libraries; Horovod is built for 3 minutes or more, once.
test-backends: $(VENV)/backends-deepspeed/.installed $(VENV)/backends-horovod/.installed
	$(VENV)/backends-deepspeed/bin/python -m pytest -q tests/backends/test_deepspeed.py
	$(VENV)/backends-horovod/bin/python -m pytest -q tests/backends/test_horovod.py

# Environments of the clients are made at their first use.
test-clients: $(VENV)/.installed-test
	$(BIN)/python tests/clients/run_clients.py wandb
	CLIENT_ENVS=$(abspath build/clients) $(BIN)/python tests/clients/run_mlflow.py

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix --exit-zero --quiet
	$(BIN)/ruff format

check: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python docs/site/build.py

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run.py

bench-peers: $(VENV)/peers/.installed
	$(VENV)/peers/bin/python benchmarks/run.py peers ray-train

# Local files and a server of objects; BENCH_DATA="data-tokens" runs less.
BENCH_DATA ?= $(foreach shape,rows images tokens,data-$(shape) data-$(shape)-s3)

bench-data: $(VENV)/peers/.installed
	BENCH_PEERS_PYTHON=$(abspath $(VENV)/peers/bin/python) \
	  $(VENV)/peers/bin/python benchmarks/run.py $(BENCH_DATA)

# Results are kept, so that it can be interrupted; BENCH_SEARCH="--seeds 3 --family nets" runs less.
BENCH_SEARCH ?= --picture docs/images/search-quality.svg

bench-search: $(VENV)/search/.installed
	OMP_NUM_THREADS=1 $(VENV)/search/bin/python benchmarks/search_quality.py $(BENCH_SEARCH)
	OMP_NUM_THREADS=1 $(VENV)/search/bin/python benchmarks/search_speed.py

# A model of 25 million parameters whose workers are killed every two minutes; takes an hour.
proof: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/proof/prove.py

# A master that has 10,000 trials in an hour: what grows?
soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py

# A library that has calls of libc fail is built first, see tests/faults; FAULTS="--kills 10" runs
# less. Each round is named by a number, by which it can be run alone.
FAULTS ?= --kills 1000 --failures 1000 --power-losses 200 --node-faults 100

faults: $(VENV)/.installed-dev
	$(COMPILE)
	$(BIN)/python -m pytest -q tests/faults
	$(BIN)/python tests/faults/campaign.py $(FAULTS)

# The interpreter whose torch sees a GPU, as it is; else that of development, for a rehearsal.
gpu:
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  PYTHON="$(PYTHON)" exec sh benchmarks/gpu.sh $(GPU_ARGS); \
	else $(MAKE) --no-print-directory $(VENV)/.installed-dev && \
	  PYTHON="$(abspath $(BIN)/python)" exec sh benchmarks/gpu.sh $(GPU_ARGS); fi

# For another machine: the versions of the lock, without torch and what only that needs.
GPU_PYTHON ?= 3.12
GPU_WHEELS := --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
  $(foreach tag,2_28 2_27 2_24 2_17 2_12 2_5,--platform manylinux_$(tag)_x86_64) \
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64

gpu-wheels: | $(BIN)/python
	$(PIP) install uv
	@rm -rf wheels && mkdir wheels
	@{ sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml | grep -v '^torch'; \
	  printf '%s\n' pytest pytest-timeout pytest-xdist obstore moto flask flask-cors; } \
	  | $(BIN)/uv pip compile - --quiet \
	  --python-version $(GPU_PYTHON) --python-platform x86_64-manylinux_2_28 \
	  --constraint constraints.txt --no-header --no-annotate > wheels/versions.txt
	@echo pytorch-ignite >> wheels/versions.txt
	$(PIP) download $(GPU_WHEELS) --dest wheels --requirement wheels/versions.txt
	@du -sh wheels

# CUDA's packages appear in the lock and do no harm where torch comes without CUDA. What is in the
# lock already stays at its version; delete the file to raise all of them.
lock: $(VENV)/.installed-dev
	$(PIP) install uv
	@[ ! -e $(LOCK) ] || cp $(LOCK) $(LOCK).new
	@echo "torch==$(TORCH)" | $(BIN)/uv pip compile pyproject.toml --quiet --universal \
	   --python-version 3.10 --all-extras --no-header --no-annotate --constraint - \
	   --output-file $(LOCK).new > /dev/null
	@{ echo "# Exact versions for every supported Python; regenerate with: make lock"; \
	   cat $(LOCK).new; } > $(LOCK)
	@rm $(LOCK).new

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis paceline_runs
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed again when the project's metadata or the lock change. Development includes what the
# examples need, so one environment serves both.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -c constraints.txt -e '.[dev,ray,s3,data]'
	@touch $@ $(VENV)/.installed-examples $(VENV)/.installed-test

# Enough for a change in a room that starts no processes.
$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.installed-examples: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -c constraints.txt -e '.[examples]'
	@touch $@

# The peers pin other versions than the lock, so they live apart.
$(VENV)/peers/.installed: pyproject.toml benchmarks/peers.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/peers
	$(VENV)/peers/bin/python -m pip --disable-pip-version-check --quiet install \
	  -r benchmarks/peers.txt -e '.[data,s3]'
	$(VENV)/peers/bin/python -m pip --disable-pip-version-check --quiet install \
	  --no-deps mosaicml-streaming==0.13.0
	@touch $@

$(VENV)/search/.installed: pyproject.toml benchmarks/search_peers.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/search
	$(VENV)/search/bin/python -m pip --disable-pip-version-check --quiet install \
	  -r benchmarks/search_peers.txt -e .
	@touch $@

# They are built against the torch that is there already.
$(VENV)/backends-%/.required: tests/backends/%.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/backends-$*
	$(VENV)/backends-$*/bin/python -m pip --disable-pip-version-check --quiet install \
	  -r $< -e .
	@touch $@

$(VENV)/backends-deepspeed/.installed: $(VENV)/backends-deepspeed/.required
	DS_BUILD_OPS=0 $(VENV)/backends-deepspeed/bin/python -m pip --disable-pip-version-check \
	  --quiet install --no-build-isolation deepspeed==0.19.8
	@touch $@

$(VENV)/backends-horovod/.installed: tests/backends/install_horovod.sh \
  $(VENV)/backends-horovod/.required
	sh $< $(VENV)/backends-horovod/bin
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "PYTHON must be Python 3.10 or later. Hint: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

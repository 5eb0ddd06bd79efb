# make help: what there is.
# Everything happens in .venv; nothing outside of this directory is changed, but for the data of `make run` under root.

PYTHON ?= python3
# the broker of `make run` and `make demo`, with dtx's own credentials; none: dtx keeps the messages itself
BROKER ?= $(DTX_BROKER)
# PostgreSQL refuses to run as root, and the account that it runs as instead cannot enter root's home
DATA_DIR ?= $(if $(filter 0,$(shell id -u)),/var/lib/dtx,$(CURDIR)/.dtx-data)
# further words for the command that is run
ARGS ?=
# processes that run tests; each has servers of its own
JOBS ?= 3
# the benchmarks of `make bench`
BENCH ?= branches passthrough restart queue
# `make sim`: how long, from which seed, and where it ends if that comes first (0: never)
SECONDS ?= 600
SEED ?= 0
SEEDS ?= 0
STEPS ?= 0
# seconds for which `make soak` does harm, both modes together
SOAK ?= 600

# seconds that `make fuzz` spends on each target
FUZZ ?= 60

# the RabbitMQ client, 5.0 or newer, that `make java` compiles against
AMQP_CLIENT ?= /usr/share/java/amqp-client.jar

BIN := .venv/bin
STAMP := .venv/.installed
# Spark is half a gigabyte, and needed by the pipeline and its tests alone
PIPELINE := .venv/.pipeline

.DEFAULT_GOAL := help
.PHONY: help install run demo pipeline-demo java xa-switch test walkthrough crash crash-tm sim soak overload pipeline fuzz check format bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'BROKER=amqp://user:password@host:port/   the broker of run and demo (default: none, dtx is the broker)'
	@echo 'DATA_DIR=directory                       the data of run (default: $(DATA_DIR))'
	@echo 'JOBS=3                                   processes of test (0: none but the first, for a debugger)'
	@echo 'ARGS="..."                               further words, e.g. make test ARGS="tests/unit -x"'
	@echo 'PYTHON=python3.12                        the Python that .venv is made with (3.11 or newer)'

install: $(STAMP) ## make .venv and install dtx with everything that tests need

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	    echo 'dtx needs Python 3.11 or newer and there is no $(PYTHON): install it, or make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "dtx needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 install" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo 'this Python cannot make virtual environments: install its venv package (Debian: apt install python3-venv)' >&2; exit 1; }
	@if [ -e .venv ] && ! $(BIN)/python -c 'import pip' 2>/dev/null; then rm -rf .venv; fi
	@[ -x $(BIN)/python ] || { echo 'making .venv'; $(PYTHON) -m venv .venv; }
	@echo 'installing dtx and what it needs into .venv'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[interop]' 2>/dev/null || \
	    echo 'python-qpid-proton cannot be built here (it needs a C compiler): the tests beside it are skipped'
	@touch $@

$(PIPELINE): $(STAMP)
	@echo 'installing Spark and what else the pipeline needs into .venv: half a gigabyte, some minutes'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[pipeline]'
	@touch $@

run: install ## start dtx with its embedded PostgreSQL, in front of BROKER or as the broker itself
	@$(if $(BROKER),DTX_BROKER='$(BROKER)') exec $(BIN)/dtx serve --data-dir '$(DATA_DIR)' $(ARGS)

demo: install ## move money between PostgreSQL and a queue, kill dtx in between, recover
	@BROKER='$(BROKER)' exec $(BIN)/python -m dtx.demo $(ARGS)

pipeline-demo: install $(PIPELINE) ## a fleet with faults on Spark: archive, reconcile, report (ARGS="--keep DIRECTORY")
	@exec $(BIN)/python -m dtx.demo.pipeline $(ARGS)

test: install $(PIPELINE) ## run all tests; they start their own PostgreSQL and RabbitMQ
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

walkthrough: install ## go through the web pages with a browser, and keep a picture of every step (ARGS="--into DIRECTORY")
	@$(BIN)/python -m tests.walkthrough $(ARGS)

crash: install ## kill dtx, PostgreSQL and RabbitMQ at every failpoint, hours (ARGS="--only standalone --every 4 --results FILE")
	@$(BIN)/python -m tests.crash.matrix $(ARGS)

crash-tm: install ## kill programs that use the Python transaction manager, 100,000 transactions (ARGS="--transactions 5000 --seed 1")
	@$(BIN)/python -m tests.crash.tm_campaign $(ARGS)

sim: install ## run dtx on a simulated database, broker, network and clock (make sim SECONDS=36000)
	@PYTHONHASHSEED=0 exec $(BIN)/python -m tests.sim --first $(SEED) --seeds $(SEEDS) --steps $(STEPS) --seconds $(SECONDS) $(ARGS)

soak: install ## move money through 2PC while everything dies, 10 minutes (SOAK=3600 ARGS="--mode alongside --seed 1")
	@$(BIN)/python -m tests.soak --seconds $(SOAK) $(ARGS)
	@DTX_SOAK_SECONDS=$$(($(SOAK) / 4)) $(BIN)/python -m pytest -q -rP tests/crash/test_standalone_soak.py

overload: install ## 12,000 clients, some of which behave badly: how long others wait, what memory it takes; 5 minutes
	@DTX_OVERLOAD=long $(BIN)/python -m pytest -q -rP tests/overload $(ARGS)

pipeline: install $(PIPELINE) ## the pipeline's tests in their long form, with Spark's own settings
	@DTX_PIPELINE=long $(BIN)/python -m pytest -q -rP tests/unit/pipeline tests/integration/pipeline $(ARGS)

fuzz: install ## look for input that dtx does not stand, FUZZ seconds for each target (ARGS="--keep table": into the corpus)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev,fuzz]'
	@$(BIN)/python -m tests.fuzz.campaign --seconds $(FUZZ) $(ARGS)

java: ## build dtx-client.jar, XA for Java's transaction managers, in build/java (AMQP_CLIENT=amqp-client.jar)
	@command -v javac >/dev/null || { echo 'javac is missing: install a JDK (Debian: apt install default-jdk-headless)' >&2; exit 1; }
	@[ -r '$(AMQP_CLIENT)' ] || { echo 'no RabbitMQ client at $(AMQP_CLIENT): make java AMQP_CLIENT=/path/to/amqp-client.jar' \
	    '(Debian: apt install librabbitmq-client-java)' >&2; exit 1; }
	@rm -rf build/java && mkdir -p build/java/classes
	@javac --release 8 -Xlint:all,-options -Werror -cp '$(AMQP_CLIENT)' -d build/java/classes dtx/client/java/src/dtx/client/*.java
	@cd build/java && jar cf dtx-client.jar -C classes .
	@echo build/java/dtx-client.jar

xa-switch: install ## build libdtx_xa_switch.so, XA for C's transaction managers, in build/xa_switch (CC=cc)
	@$(BIN)/python -m dtx.client.xa_switch.build --into build/xa_switch

check: install $(PIPELINE) ## lint, format, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## repair what lint and format can repair themselves
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install ## run the benchmarks, some minutes (make bench BENCH=branches ARGS=--help)
	@for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; echo; done

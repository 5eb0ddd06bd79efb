# make help: the list of targets.
# Everything is installed in .venv. Outside of this directory, only `make run` under root and `make rabbitmq4` write.

PYTHON ?= python3
# the broker of `make run` and `make demo`, with dtx's own credentials; without it, dtx stores the messages
BROKER ?= $(DTX_BROKER)
# under root, PostgreSQL runs as another account, which has no access to root's home
DATA_DIR ?= $(if $(filter 0,$(shell id -u)),/var/lib/dtx,$(CURDIR)/.dtx-data)
# further arguments for the command
ARGS ?=
# number of test processes; each has its own servers
JOBS ?= 3
# the benchmarks of `make bench`
BENCH ?= branches passthrough restart queue
# unit tests that `make test-servers` also runs, for the floor of 100 % branch coverage of dtx/xa and dtx/wire
CORE := $(addprefix tests/unit/,fuzz manager server wire xa)
# tests with a broker
RABBITMQ_TESTS := tests/contract $(addprefix tests/servers/,alongside proxy branches crash test_cli_doctor_broker.py)
# parts of `make evidence`, and minutes for each part without a fixed size
PARTS ?= sim matrix tm soak members cluster repeats brokers scenarios overload fuzz pipeline walkthrough
MINUTES ?= 10

# the RabbitMQ client, 5.0 or newer, that `make java` compiles against
AMQP_CLIENT ?= /usr/share/java/amqp-client.jar

BIN := .venv/bin
STAMP := .venv/.installed
# Spark takes half a gigabyte, and only the pipeline and its tests need it
PIPELINE := .venv/.pipeline

.DEFAULT_GOAL := help
.PHONY: help install run demo pipeline-demo java xa-switch test test-servers rabbitmq4 test-rabbitmq4 evidence check docs format bench

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'BROKER=amqp://user:password@host:port/   the broker of run and demo (default: none, dtx stores the messages)'
	@echo 'DATA_DIR=directory                       the data of run (default: $(DATA_DIR))'
	@echo 'PARTS="sim soak"                         parts of evidence (default: $(PARTS))'
	@echo 'MINUTES=10                               duration of each part that has no fixed size'
	@echo 'JOBS=3                                   number of test processes (0: no further process, for a debugger)'
	@echo 'ARGS="..."                               further arguments, e.g. make test ARGS="tests/unit -x"'
	@echo 'PYTHON=python3.12                        the Python for .venv (3.11 or newer)'

install: $(STAMP) ## make .venv, and install dtx and the dependencies of its tests

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	    echo 'dtx needs Python 3.11 or newer and there is no $(PYTHON): install it, or make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "dtx needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 install" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo 'this Python cannot make virtual environments: install its venv package (Debian: apt install python3-venv)' >&2; exit 1; }
	@if [ -e .venv ] && ! $(BIN)/python -c 'import pip' 2>/dev/null; then rm -rf .venv; fi
	@[ -x $(BIN)/python ] || { echo 'making .venv'; $(PYTHON) -m venv .venv; }
	@echo 'installing dtx and its dependencies into .venv'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[interop]' 2>/dev/null || \
	    echo 'python-qpid-proton cannot be built here (it needs a C compiler): the tests with it are skipped'
	@touch $@

$(PIPELINE): $(STAMP)
	@echo 'installing Spark and other dependencies of the pipeline into .venv: half a gigabyte, some minutes'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[pipeline]'
	@touch $@

run: install ## start dtx with its embedded PostgreSQL, alongside BROKER or standalone
	@$(if $(BROKER),DTX_BROKER='$(BROKER)') exec $(BIN)/dtx serve --data-dir '$(DATA_DIR)' $(ARGS)

demo: install ## move money between PostgreSQL and a queue, kill dtx in between, recover
	@BROKER='$(BROKER)' exec $(BIN)/python -m examples.demo $(ARGS)

pipeline-demo: install $(PIPELINE) ## a fleet with faults on Spark: archive, reconcile, report (ARGS="--keep DIRECTORY")
	@exec $(BIN)/python -m examples.demo.pipeline $(ARGS)

test: install $(PIPELINE) ## run the tests for daily work, in minutes; they start their own PostgreSQL and RabbitMQ
	@$(BIN)/python -m pytest --numprocesses $(JOBS) $(ARGS)

test-servers: install $(PIPELINE) ## run the tests that start servers, with each failpoint once, and check coverage floors
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --cov --cov-report= $(CORE) tests/servers $(ARGS)
	@$(BIN)/coverage report --include='dtx/xa/*,dtx/wire/*' --fail-under=100 --precision=2
	@$(BIN)/coverage report --fail-under=90 --precision=2 --format=total

rabbitmq4: install ## make RabbitMQ 4 for tests, once, in /var/cache/dtx (needs root on Debian, or Docker)
	@$(BIN)/python -m tests.support.rabbitmq_install

test-rabbitmq4: install rabbitmq4 ## run the tests with a broker against RabbitMQ 4
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --rabbitmq 4 $(RABBITMQ_TESTS) $(ARGS)

evidence: install $(PIPELINE) ## run long tests, with result files in docs/evidence (PARTS="sim soak" MINUTES=60)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[dev,fuzz]' || \
	    echo 'atheris has wheels only for Linux on x86-64: the part fuzz is left out'
	@$(BIN)/python -c 'import duckdb' 2>/dev/null || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[bench]'
	@$(BIN)/python -m pytest --quiet --minutes $(MINUTES) $(addprefix tests/evidence/,$(PARTS)) $(ARGS)
	@$(BIN)/python -m tests.support.pages

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

check: install $(PIPELINE) ## check lint, format, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install $(PIPELINE) ## build the documentation site in build/docs, warnings are errors
	@$(BIN)/sphinx-build -q -E -W --keep-going -j 2 -d build/doctrees docs build/docs
	@echo build/docs/index.html

format: install ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install ## run the benchmarks, some minutes (make bench BENCH=branches ARGS=--help); RESULTS=docs/evidence/speed records
	@for name in $(BENCH); do echo "== $$name"; \
	    $(BIN)/python -m $(if $(RESULTS),benchmarks.record '$(RESULTS)' $$name,benchmarks.$$name) $(ARGS) || exit 1; echo; done

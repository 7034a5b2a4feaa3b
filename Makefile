# `make` tells what there is. Everything runs from .venv, which the first target that needs it creates.

PYTHON ?= python3
TRIMQ_HOME ?= $(CURDIR)/data
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# compileall follows no links: the folders, not trimq/.
ROOMS := protocol remoting namesrv client broker pipeline
SOURCES := trimq pyspark_rocketmq.py pyspark_rocketmq_store.py bench tools tests
SPARK ?= oldest newest
# Tests mostly wait, for time and for other processes. More workers than cores, and what they wait for is late.
WORKERS ?= 2
# With NIGHTLY=1 also what is long and rare.
NIGHTLY ?=
# NATIVE=off: without the native extension, though it be installed.
NATIVE ?= on
$(if $(filter on off,$(NATIVE)),,$(error NATIVE=$(NATIVE): on or off is expected))

.DEFAULT_GOAL := help
.PHONY: help run native test test-native fuzz-native miri test-newest coverage coverage-spark crash mutations nightly test-partners test-clients test-spark check-spark test-operations check check-format \
	check-lint check-types check-public-types check-layers check-generated check-native \
	docs format generate bench lock changelog wheels release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# -- the environment ----------------------------------------------------------------------------------------------
# One stamp a stage, so that a second `make test` starts at once. --require-hashes: only what the lock files name.

$(VENV)/.venv-stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TriMQ needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.build-stamp: $(VENV)/.venv-stamp requirements/build.txt
	@$(PIP) install --require-hashes -r requirements/build.txt
	@touch $@

$(VENV)/.run-stamp: $(VENV)/.build-stamp requirements/run.txt pyproject.toml
	@echo "installing into $(VENV) ..."
	@$(PIP) install --no-build-isolation --require-hashes -r requirements/run.txt
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp requirements/dev.txt
	@echo "installing the tools for tests and checks ..."
	@$(PIP) install --no-build-isolation --require-hashes -r requirements/dev.txt
	@touch $@

# PySpark is heavy (400 MB), and two versions are tested: each has an environment of its own.
.PRECIOUS: .venv-spark-%/.stamp
.venv-spark-%/.stamp: requirements/spark-%.txt requirements/build.txt pyproject.toml
	@echo "installing PySpark ($*) into .venv-spark-$* ..."
	@$(PYTHON) -m venv .venv-spark-$*
	@.venv-spark-$*/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/build.txt
	@.venv-spark-$*/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation --require-hashes \
		-r requirements/spark-$*.txt
	@.venv-spark-$*/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps --editable .
	@touch $@

.venv-docs/.stamp: requirements/docs.txt
	@echo "installing Sphinx into .venv-docs ..."
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip --disable-pip-version-check --quiet install --only-binary :all: --require-hashes \
		-r requirements/docs.txt
	@touch $@

# Pythons that Debian offers in its testing suite. What has no wheel for one of them yet is built: gcc. The stamp has a name
# of its own: with that of the other environments, `make VENV=.venv-newest` would have two rules for it.
.venv-newest/.newest-stamp: $(VENV)/.build-stamp requirements/dev.txt requirements/build.txt pyproject.toml .ci/newest-python
	@echo "installing the newest Python into .python-newest, the tools for tests into .venv-newest ..."
	@.ci/newest-python .python-newest
	@$(call other_python,.python-newest,.venv-newest,requirements/dev.txt)
	@touch $@

# The newest one for which PySpark and what it needs have wheels.
SPARK_PYTHON := 3.14
.venv-spark-coverage/.stamp: $(VENV)/.build-stamp requirements/spark-newest.txt requirements/build.txt pyproject.toml .ci/newest-python Makefile
	@echo "installing Python $(SPARK_PYTHON) into .python-spark, PySpark into .venv-spark-coverage ..."
	@.ci/newest-python .python-spark $(SPARK_PYTHON)
	@$(call other_python,.python-spark,.venv-spark-coverage,requirements/spark-newest.txt)
	@touch $@

# other_python,PYTHON,VENV,LOCK: these Pythons come without ensurepip, so that pip is brought from elsewhere, and then by itself.
other_python = rm -rf $(2) && "$$(realpath $(1)/python)" -m venv --without-pip $(2) && \
	$(PIP) install --no-deps --target "$$(echo $(2)/lib/python3.*/site-packages)" pip && \
	$(2)/bin/python -m pip --disable-pip-version-check --quiet install --ignore-installed --no-deps pip && \
	$(2)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/build.txt && \
	CPATH="$(CURDIR)/$(1)/include" $(2)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation \
		--require-hashes -r $(3) && \
	$(2)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps --editable .

# -- the native extension ----------------------------------------------------------------------------------------------
# One wheel serves the Pythons of all environments. No target fails for want of it: where it cannot be made, make-wheel says
# so in one line, and what was installed of older sources goes. Without Rust no stamp is left, so that the next make looks
# again; a build that failed is tried again after a change of native/, or by `make native`.

EXTENSION := build/native
extension = $(if $(filter on,$(NATIVE)),$(1)/.native-stamp)
SPARK_VENVS := .venv-spark-oldest .venv-spark-newest .venv-spark-coverage
ifeq ($(NATIVE),off)
export TRIMQ_NATIVE := off
endif
build_extension = PYTHON="$(VENV)/bin/python" native/make-wheel $(EXTENSION) --no-build-isolation

$(EXTENSION)/stamp: $(shell find native -name target -prune -o -type f -print) | $(VENV)/.build-stamp
	@! native/make-wheel --look 2>/dev/null || echo "building the native extension (once; half a minute) ..."
	@rm -f $@; $(build_extension); case $$? in 0 | 1) touch $@ ;; esac

$(VENV)/.native-stamp: $(VENV)/.run-stamp
$(patsubst %,%/.native-stamp,$(filter-out $(VENV),.venv-newest)): %/.native-stamp: %/.newest-stamp
$(patsubst %,%/.native-stamp,$(filter-out $(VENV),$(SPARK_VENVS))): %/.native-stamp: %/.stamp
$(patsubst %,%/.native-stamp,$(sort $(VENV) .venv-newest $(SPARK_VENVS))): %/.native-stamp: $(EXTENSION)/stamp
	@rm -f $@; pip="$*/bin/python -m pip --disable-pip-version-check --quiet"; wheel=$$(ls $(EXTENSION)/*.whl 2>/dev/null); \
	if [ -n "$$wheel" ]; then \
		$$pip install --no-index --no-deps --force-reinstall "$$wheel" && touch $@ || echo "native: not installed into $*" >&2; \
	elif [ -e $*/lib/python3*/site-packages/trimq_native ]; then \
		$$pip uninstall --yes trimq-native && touch $@; \
	fi

native: $(VENV)/.run-stamp ## build and install the native extension, which the broker is faster with (Rust); fails where it cannot
	@rm -f $(EXTENSION)/stamp; $(build_extension) || { code=$$?; [ $$code -ne 1 ] || tail -n 20 $(EXTENSION)/build.log >&2; exit $$code; }
	@touch $(EXTENSION)/stamp
	@$(MAKE) --no-print-directory NATIVE=on $(VENV)/.native-stamp
	@TRIMQ_NATIVE=on $(BIN)/python -c 'from trimq.protocol.native import NATIVE; print(NATIVE.status); raise SystemExit(not NATIVE.is_on)'

# Byte code is written even where PYTHONDONTWRITEBYTECODE is set: without it a start takes twice as long.
compile = $(BIN)/python -m compileall -q trimq/__init__.py $(ROOMS)

# -- using it -----------------------------------------------------------------------------------------------------

run: $(VENV)/.run-stamp $(call extension,$(VENV)) ## start a broker with its name server on 127.0.0.1; the store is in ./data or $(TRIMQ_HOME)
	@mkdir -p "$(TRIMQ_HOME)"
	@$(compile)
	@cd "$(TRIMQ_HOME)" && exec "$(CURDIR)/$(BIN)/mqbroker" -c "$(CURDIR)/conf/local.conf" $(ARGS)

# -- working on it ------------------------------------------------------------------------------------------------

# pytest's exit code 5 means that no test was run: say so, it is a failure like any other.
no_test = { code=$$?; [ $$code -ne 5 ] || echo "$@: NO TEST WAS RUN" >&2; exit $$code; }
common = $(if $(NIGHTLY),,and not nightly)
# pytest,MARKERS,ARGUMENTS: one test after the other.
pytest = $(compile) && $(BIN)/python -m pytest -m "$(1) $(common)" $(2) $(ARGS) || $(no_test)
# pytest_beside,MARKERS,ARGUMENTS: several at a time, and then those that are to be alone.
pytest_beside = $(compile); beside=0; alone=0; \
	$(BIN)/python $(measured) -m pytest -n $(WORKERS) --dist loadgroup -m "$(1) and not alone $(common)" $(2) $(ARGS) || beside=$$?; \
	$(BIN)/python $(measured) -m pytest -m "$(1) and alone $(common)" $(2) $(ARGS) || alone=$$?; \
	case "$$beside $$alone" in "0 0" | "0 5" | "5 0") ;; "5 5") (exit 5) || $(no_test) ;; *) exit 1 ;; esac

test: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the tests; ARGS='-k name' for some of them, NATIVE=off without the native extension
	@$(call pytest_beside,not partners and not slow)

# with_cargo,COMPONENTS,COMMANDS: in native/; where a component is missing this is left out, which in CI is a failure.
with_cargo = native/make-wheel --look $(1) || { [ -z "$$CI" ] && echo "$@: left out"; exit; }; cd native && $(2)

# In CI the same random examples each time, as Python's tests have them.
test-native: ## run the tests of the native extension that are in Rust
	@$(call with_cargo,,$${CI:+env PROPTEST_RNG_SEED=22} cargo test --locked --quiet)

# An example that fails is printed, and kept in native/core/tests/proptest-regressions/, from where each run tries it again.
fuzz-native: MINUTES ?= 60
fuzz-native: suite = cargo test --locked --quiet --release --package trimq-native-core --test suite
fuzz-native: ## try new examples on the native extension, for an hour or MINUTES=5
	@mkdir -p build
	@$(call with_cargo,,$(suite) --no-run && end=$$(($$(date +%s) + 60 * $(MINUTES))) && turns=0 && \
		while [ $$(date +%s) -lt $$end ]; do \
			PROPTEST_CASES=20000 $(suite) >../build/fuzz-native.log 2>&1 || { cat ../build/fuzz-native.log; exit 1; }; \
			turns=$$((turns + 1)); \
		done && echo "native: $$turns turns of 20000 new examples for each test")

# A few examples of each test: they are interpreted, a thousand times slower.
miri: ## run the tests of the native extension in Miri, which sees undefined behaviour (a nightly Rust)
	@cargo +nightly miri --version >/dev/null 2>&1 || \
		{ echo "native: Miri is missing, $@: left out; rustup toolchain install nightly --component miri,rust-src"; \
			test -z "$${CI:-}"; exit; }; \
		cd native && cargo +nightly miri test --locked --quiet --package trimq-native-core

test-newest: BIN = .venv-newest/bin
test-newest: .venv-newest/.newest-stamp $(call extension,.venv-newest) ## run the tests with the newest Python that Debian offers
	@$(call pytest_beside,not partners and not slow)

# Of the tests that are measured: what is run of the code, by processes that they start too. Python's own way of measuring,
# from 3.12 on, makes them slower by some percent only; the old one loses what follows a coroutine that is cancelled.
# What was measured is in .coverage/.
coverage coverage-spark: measured = -m coverage run
coverage: export COVERAGE_CORE = sysmon
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage/unit/data
coverage: BIN = .venv-newest/bin
coverage: .venv-newest/.newest-stamp $(call extension,.venv-newest) ## test-newest, and look whether the tests run enough of the code
	@rm -rf .coverage/unit && mkdir -p .coverage/unit
	@$(call pytest_beside,not partners and not slow)
	@$(call enough,unit)

# enough,LEG: the processes' figures put together, and compared with tests/coverage/floor.toml. Processes that tests kill
# leave files with nothing in them, of which combine warns.
enough = $(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage json --quiet -o .coverage/$(1).json && \
	$(BIN)/python -m tests.coverage.floor $(1) .coverage/$(1).json

crash: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## cut the power, and fail, at every disk call of a script; 200 power cuts of a whole broker
	@$(call pytest,slow and not partners,-o faulthandler_timeout=0 tests/crash)

# It is Python's code that is broken, and its ways are those without the extension; those of the extension build one for themselves.
mutations: $(VENV)/.dev-stamp .venv-spark-newest/.stamp ## break the code in many ways, and see that the tests find each; ARGS=recovery for some
	@$(compile)
	@$(BIN)/python -m tests.crash.mutations $(ARGS)

# What is long and rare: before an issue is called resolved, and each night.
nightly: mutations $(call extension,$(VENV)) ## mutations, crashes with more seeds, 50 kills under load, long partner tests, both PySpark, the extension's examples
	@$(BIN)/python -m tests.crash --seeds 1-3
	@$(BIN)/python -m tests.crash.kill --kills 50
	@$(BIN)/python -m pytest -m "partners and nightly" tests/interop tests/client tests/crash
	@$(MAKE) --no-print-directory test-spark NIGHTLY=1
	@$(BIN)/python -m pytest --hypothesis-profile=nightly -o timeout=1800 -o faulthandler_timeout=0 tests/protocol/test_native_twins.py
	@$(BIN)/python -m pytest --hypothesis-profile=nightly -o timeout=1800 -o faulthandler_timeout=0 -k twins tests/broker/test_send_native.py
	@$(MAKE) --no-print-directory fuzz-native MINUTES=5
	@$(MAKE) --no-print-directory miri

test-partners: $(VENV)/.dev-stamp ## clients, Spark, operations: all of them, though one fails
	@$(MAKE) --no-print-directory --keep-going test-clients check-spark test-spark test-operations

test-clients: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the tests with official clients and Apache's broker (JDK with Maven, Node.js, Go)
	@$(call pytest_beside,partners,tests/interop tests/client tests/crash tests/bench)

# What depends on no version of PySpark runs with the newest only; Delta Lake has no release for that.
test-spark: $(SPARK:%=.venv-spark-%/.stamp) $(foreach which,$(SPARK),$(call extension,.venv-spark-$(which))) ## run the tests with real Spark (JDK); SPARK=newest for one PySpark only
	@for which in $(SPARK); do .venv-spark-$$which/bin/python -m compileall -q trimq/__init__.py $(ROOMS) &&  \
		.venv-spark-$$which/bin/python -c 'import pyspark; print("PySpark", pyspark.__version__)' && \
		case $$which in newest) marks="not oldest_pyspark" ;; *) marks="not one_pyspark" ;; esac && \
		.venv-spark-$$which/bin/python -m pytest tests/spark -m "$$marks $(common)" -o faulthandler_timeout=0 $(ARGS) || exit; done

coverage-spark: export COVERAGE_FILE = $(CURDIR)/.coverage/spark/data
coverage-spark: export COVERAGE_CORE = sysmon
coverage-spark: BIN = .venv-spark-coverage/bin
coverage-spark: .venv-spark-coverage/.stamp $(call extension,.venv-spark-coverage) ## test-spark with the newest PySpark and a newer Python, and look whether the tests run enough of pipeline/
	@rm -rf .coverage/spark && mkdir -p .coverage/spark
	@$(compile)
	@$(BIN)/python $(measured) -m pytest tests/spark tests/pipeline -m "not oldest_pyspark $(common)" -o faulthandler_timeout=0 $(ARGS)
	@$(call enough,spark)

check-spark: $(SPARK:%=.venv-spark-%/.stamp) ## types of pipeline/ against the real PySpark
	@for which in $(SPARK); do .venv-spark-$$which/bin/mypy trimq/pipeline pyspark_rocketmq.py pyspark_rocketmq_store.py tests/spark || exit; done

test-operations: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the tests with Docker and Prometheus (Debian's packages; root), and a release of a clone
	@$(call pytest,partners,tests/docker tests/broker/metrics tests/packaging)

check: $(VENV)/.dev-stamp ## format, lint, types, layers, generated files, Rust; reports all of them, fails on any
	@$(MAKE) --no-print-directory --keep-going check-format check-lint check-types check-public-types check-layers check-generated check-native

check-format: $(VENV)/.dev-stamp
	@$(BIN)/ruff format --check .

check-lint: $(VENV)/.dev-stamp
	@$(BIN)/ruff check .

check-types: $(VENV)/.dev-stamp
	@$(BIN)/mypy $(SOURCES)

check-public-types: $(VENV)/.dev-stamp
	@PYTHONPATH="$(CURDIR):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		$(BIN)/basedpyright --ignoreexternal --verifytypes trimq.client > $(VENV)/verifytypes.txt || { cat $(VENV)/verifytypes.txt; exit 1; }
	@echo "client: $$(grep 'Type completeness score' $(VENV)/verifytypes.txt)"

check-layers: $(VENV)/.dev-stamp
	@$(BIN)/lint-imports

check-generated: $(VENV)/.dev-stamp
	@$(BIN)/python -m trimq.protocol.generate_codes --check && $(BIN)/python -m trimq.protocol.generate_properties --check && $(BIN)/python conf/generate.py --check && echo "generated files are current"

# The interpreter is named, since clippy would build anew for each one that happens to be first in PATH.
check-native: $(VENV)/.venv-stamp
	@$(call with_cargo,fmt clippy,cargo fmt --check && \
		PYO3_PYTHON="$(abspath $(BIN)/python)" cargo clippy --locked --quiet --all-targets -- -D warnings && echo "native: format and lints are fine")

# All pages are read each time: Sphinx reports warnings only of pages that it reads.
SITE := build/site
docs: .venv-docs/.stamp ## build the site of docs/ in build/site, without a network; fails on a link or an anchor whose target does not exist
	@rm -rf $(SITE)
	@.venv-docs/bin/sphinx-build -c docs/site --fresh-env --doctree-dir $(SITE)-doctrees --fail-on-warning --keep-going --quiet . $(SITE)
	@echo "docs: $(SITE)/index.html"

format: $(VENV)/.dev-stamp ## format the code and mend what the linter can
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

generate: $(VENV)/.dev-stamp ## make the files that are made from others
	@$(BIN)/python -m trimq.protocol.generate_codes
	@$(BIN)/python -m trimq.protocol.generate_properties
	@$(BIN)/python conf/generate.py

bench: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the benchmarks
	@$(compile)
	@$(BIN)/python -m bench $(ARGS)

lock: $(VENV)/.venv-stamp ## resolve the lock files anew; UPGRADE=1 takes the newest versions
	@requirements/lock

changelog: $(VENV)/.dev-stamp ## put the fragments of changelog.d into CHANGELOG.md
	@$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'from importlib.metadata import version; print(version("trimq"))')"

wheels: $(VENV)/.build-stamp ## make sdist and wheel of trimq, and the wheel of the native extension for this kind of machine, in dist/
	@NATIVE=$(NATIVE) .ci/wheels dist

release: $(VENV)/.dev-stamp ## changelog, sdist, wheels, a check in a fresh environment, commit and tag: VERSION=1.2.3
	@VERSION="$(VERSION)" .ci/release

clean: ## remove the environment and the tools' caches (not ./data)
	rm -rf $(VENV) .venv-newest .venv-docs .venv-spark-* .python-newest .python-spark .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist native/target

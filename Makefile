# `make` lists the targets. Everything runs from .venv, which the first target that needs it creates.

PYTHON ?= python3
TRIMQ_HOME ?= $(CURDIR)/data
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# compileall follows no links: the folders, not trimq/.
PACKAGES := protocol remoting namesrv controller client broker pipeline
SOURCES := trimq pyspark_rocketmq.py pyspark_rocketmq_store.py bench tools tests
SPARK ?= oldest newest
# Tests mostly wait, for time and for other processes: on two cores three at once are faster than two.
WORKERS ?= 3
# NIGHTLY=1: also run the tests that are long and test rare cases.
NIGHTLY ?=
# NATIVE=off: without the native extension, even if it is installed.
NATIVE ?= on
$(if $(filter on off,$(NATIVE)),,$(error NATIVE=$(NATIVE): expected on or off))

.DEFAULT_GOAL := help
.PHONY: help run native test test-native fuzz-native miri test-newest coverage coverage-spark crash mutations nightly test-partners test-clients test-spark check-spark test-operations check check-format \
	check-lint check-types check-public-types check-layers check-generated check-native \
	docs format generate bench lock changelog wheels release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# -- the environment ----------------------------------------------------------------------------------------------
# One stamp per stage, so that a second `make test` starts immediately. --require-hashes: only packages in the lock files.

$(VENV)/.venv-stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TriMQ needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "cannot create a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
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

# PySpark is large (400 MB), and two versions are tested: each has its own environment.
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

# Pythons of Debian's testing suite. Packages without a wheel for them are built, which needs gcc. The stamp has a name of
# its own: with the name used in other environments, `make VENV=.venv-newest` would have two rules for it.
.venv-newest/.newest-stamp: $(VENV)/.build-stamp requirements/dev.txt requirements/build.txt pyproject.toml .ci/newest-python
	@echo "installing the newest Python into .python-newest, the tools for tests into .venv-newest ..."
	@.ci/newest-python .python-newest
	@$(call other_python,.python-newest,.venv-newest,requirements/dev.txt)
	@touch $@

# The newest Python for which PySpark and its dependencies have wheels.
SPARK_PYTHON := 3.14
.venv-spark-coverage/.stamp: $(VENV)/.build-stamp requirements/spark-newest.txt requirements/build.txt pyproject.toml .ci/newest-python Makefile
	@echo "installing Python $(SPARK_PYTHON) into .python-spark, PySpark into .venv-spark-coverage ..."
	@.ci/newest-python .python-spark $(SPARK_PYTHON)
	@$(call other_python,.python-spark,.venv-spark-coverage,requirements/spark-newest.txt)
	@touch $@

# other_python,PYTHON,VENV,LOCK: these Pythons have no ensurepip, so the pip of $(VENV) installs pip, which then reinstalls itself.
other_python = rm -rf $(2) && "$$(realpath $(1)/python)" -m venv --without-pip $(2) && \
	$(PIP) install --no-deps --target "$$(echo $(2)/lib/python3.*/site-packages)" pip && \
	$(2)/bin/python -m pip --disable-pip-version-check --quiet install --ignore-installed --no-deps pip && \
	$(2)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/build.txt && \
	CPATH="$(CURDIR)/$(1)/include" $(2)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation \
		--require-hashes -r $(3) && \
	$(2)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps --editable .

# -- the native extension ----------------------------------------------------------------------------------------------
# One wheel serves the Pythons of all environments. No target fails without it: if it cannot be built, make-wheel prints one
# line, and an extension built from older sources is uninstalled. Without Rust no stamp is written, so that the next make
# checks again; a failed build is tried again after a change of native/, or by `make native`.

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

native: $(VENV)/.run-stamp ## build and install the native extension, which makes the broker faster (Rust); fails if it cannot be built
	@rm -f $(EXTENSION)/stamp; $(build_extension) || { code=$$?; [ $$code -ne 1 ] || tail -n 20 $(EXTENSION)/build.log >&2; exit $$code; }
	@touch $(EXTENSION)/stamp
	@$(MAKE) --no-print-directory NATIVE=on $(VENV)/.native-stamp
	@TRIMQ_NATIVE=on $(BIN)/python -c 'from trimq.protocol.native import NATIVE; print(NATIVE.status); raise SystemExit(not NATIVE.is_on)'

# Byte code is written even if PYTHONDONTWRITEBYTECODE is set: without it a start takes twice as long.
compile = $(BIN)/python -m compileall -q trimq/__init__.py $(PACKAGES)

# -- using it -----------------------------------------------------------------------------------------------------

run: $(VENV)/.run-stamp $(call extension,$(VENV)) ## start a broker with its name server on 127.0.0.1; the store is in ./data or $(TRIMQ_HOME)
	@mkdir -p "$(TRIMQ_HOME)"
	@$(compile)
	@cd "$(TRIMQ_HOME)" && exec "$(CURDIR)/$(BIN)/mqbroker" -c "$(CURDIR)/conf/local.conf" $(ARGS)

# -- working on it ------------------------------------------------------------------------------------------------

# pytest's exit code 5 means that no test was run: report it as a failure.
no_test = { code=$$?; [ $$code -ne 5 ] || echo "$@: NO TEST WAS RUN" >&2; exit $$code; }
common = $(if $(NIGHTLY),,and not nightly)
# pytest,MARKERS,ARGUMENTS: one test after the other.
pytest = $(compile) && $(BIN)/python -m pytest -m "$(1) $(common)" $(2) $(ARGS) || $(no_test)
# pytest_beside,MARKERS,ARGUMENTS: tests in parallel, then those that must run alone.
pytest_beside = $(compile); beside=0; alone=0; \
	$(BIN)/python $(measured) -m pytest -n $(WORKERS) --dist loadgroup -m "$(1) and not alone $(common)" $(2) $(ARGS) || beside=$$?; \
	$(BIN)/python $(measured) -m pytest -m "$(1) and alone $(common)" $(2) $(ARGS) || alone=$$?; \
	case "$$beside $$alone" in "0 0" | "0 5" | "5 0") ;; "5 5") (exit 5) || $(no_test) ;; *) exit 1 ;; esac

test: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the tests; ARGS='-k name' for some of them, NATIVE=off without the native extension
	@$(call pytest_beside,not partners and not slow)

# with_cargo,COMPONENTS,COMMANDS: runs in native/. If a component is missing it is skipped, which is a failure in CI.
with_cargo = native/make-wheel --look $(1) || { [ -z "$$CI" ] && echo "$@: skipped"; exit; }; cd native && $(2)

# In CI the random examples are the same each time, as in the Python tests.
test-native: ## run the Rust tests of the native extension
	@$(call with_cargo,,$${CI:+env PROPTEST_RNG_SEED=22} cargo test --locked --quiet)

# A failing example is printed, and stored in native/core/tests/proptest-regressions/; every later run tries it again.
fuzz-native: MINUTES ?= 60
fuzz-native: suite = cargo test --locked --quiet --release --package trimq-native-core --test suite
fuzz-native: ## try new examples on the native extension, for an hour or MINUTES=5
	@mkdir -p build
	@$(call with_cargo,,$(suite) --no-run && end=$$(($$(date +%s) + 60 * $(MINUTES))) && turns=0 && \
		while [ $$(date +%s) -lt $$end ]; do \
			PROPTEST_CASES=20000 $(suite) >../build/fuzz-native.log 2>&1 || { cat ../build/fuzz-native.log; exit 1; }; \
			turns=$$((turns + 1)); \
		done && echo "native: $$turns turns of 20000 new examples for each test")

# Only a few examples of each test: interpreted, they are a thousand times slower.
miri: ## run the tests of the native extension in Miri, which detects undefined behaviour (a nightly Rust)
	@cargo +nightly miri --version >/dev/null 2>&1 || \
		{ echo "native: Miri is missing, $@ skipped; rustup toolchain install nightly --component miri,rust-src"; \
			test -z "$${CI:-}"; exit; }; \
		cd native && cargo +nightly miri test --locked --quiet --package trimq-native-core

test-newest: BIN = .venv-newest/bin
test-newest: .venv-newest/.newest-stamp $(call extension,.venv-newest) ## run the tests with the newest Python that Debian offers
	@$(call pytest_beside,not partners and not slow)

# Coverage of the tests and of the processes that they start. sys.monitoring (Python 3.12 and later) slows them down by a few
# percent only; the older trace function loses the code after a coroutine that is cancelled. The data is in .coverage/.
coverage coverage-spark: measured = -m coverage run
coverage: export COVERAGE_CORE = sysmon
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage/unit/data
coverage: BIN = .venv-newest/bin
coverage: .venv-newest/.newest-stamp $(call extension,.venv-newest) ## test-newest, and check the coverage
	@rm -rf .coverage/unit && mkdir -p .coverage/unit
	@$(call pytest_beside,not partners and not slow)
	@$(call enough,unit)

# enough,LEG: combine the data of all processes, and compare the coverage with tests/coverage/floor.toml. Processes that tests
# kill leave empty files, of which combine warns.
enough = $(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage json --quiet -o .coverage/$(1).json && \
	$(BIN)/python -m tests.coverage.floor $(1) .coverage/$(1).json

# One after the other: most of these tests have a process of their own for each core. SHARE=2/8: an eighth, see
# tests/crash/share.py.
crash: export CRASH_SHARE = $(SHARE)
crash: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## cut the power at every disk call of a script, and fail at most; 200 power cuts of a whole broker; simulations; and the other slow tests
	@$(call pytest,slow and not partners,-o timeout=600 -o faulthandler_timeout=0 --ignore=tests/spark)

# Python code is mutated, and tested without the extension; the mutations of the extension build their own.
mutations: $(VENV)/.dev-stamp .venv-spark-newest/.stamp ## mutate the code, and check that the tests detect each mutation; ARGS=recovery for some of them
	@$(compile)
	@$(BIN)/python -m tests.crash.mutations $(ARGS)

# Long tests of rare cases: run before an issue is resolved, and each night.
nightly: mutations $(call extension,$(VENV)) ## mutations, crashes with more seeds and all errors, 2000 simulations, 50 kills under load, long partner tests, both PySpark, the extension's examples
	@$(BIN)/python -m tests.crash --seeds 1-3
	@$(BIN)/python -m tests.simulation --seeds 0-1999
	@$(BIN)/python -m pytest -o faulthandler_timeout=0 -m "nightly and not partners" tests/simulation tests/bench
	@$(BIN)/python -m tests.crash.kill --kills 50
	@$(BIN)/python -m pytest -o faulthandler_timeout=0 -m "partners and nightly" tests/interop tests/client tests/crash tests/bench
	@$(MAKE) --no-print-directory test-spark NIGHTLY=1
	@$(BIN)/python -m pytest --hypothesis-profile=nightly -o timeout=1800 -o faulthandler_timeout=0 tests/protocol/test_native_twins.py tests/store/test_log_rows.py \
		tests/store/tiered/bucket/test_two_owners.py
	@$(BIN)/python -m pytest --hypothesis-profile=nightly -o timeout=1800 -o faulthandler_timeout=0 -k twins tests/broker/test_send_native.py
	@$(BIN)/python -m pytest --hypothesis-profile=nightly -o timeout=1800 -o faulthandler_timeout=0 -k paths tests/broker/test_transaction_mixed.py \
		tests/broker/test_timer_paths.py tests/broker/test_sql_paths.py tests/broker/test_reply_paths.py
	@$(MAKE) --no-print-directory fuzz-native MINUTES=5
	@$(MAKE) --no-print-directory miri

test-partners: $(VENV)/.dev-stamp ## tests with clients, Spark and operations; all run even if one fails
	@$(MAKE) --no-print-directory --keep-going test-clients check-spark test-spark test-operations

test-clients: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the tests with official clients, Apache's broker and an object store (JDK with Maven, Node.js, Go)
	@$(call pytest_beside,partners,tests/interop tests/client tests/crash tests/bench)

# Tests that depend on no version of PySpark run with the newest only; those of Delta Lake, which does not support it, do not.
test-spark: $(SPARK:%=.venv-spark-%/.stamp) $(foreach which,$(SPARK),$(call extension,.venv-spark-$(which))) ## run the tests with real Spark (JDK); SPARK=newest for one PySpark only
	@for which in $(SPARK); do .venv-spark-$$which/bin/python -m compileall -q trimq/__init__.py $(PACKAGES) &&  \
		.venv-spark-$$which/bin/python -c 'import pyspark; print("PySpark", pyspark.__version__)' && \
		case $$which in newest) marks="not oldest_pyspark" ;; *) marks="not one_pyspark" ;; esac && \
		.venv-spark-$$which/bin/python -m pytest tests/spark -m "$$marks $(common)" -o faulthandler_timeout=0 $(ARGS) || exit; done

coverage-spark: export COVERAGE_FILE = $(CURDIR)/.coverage/spark/data
coverage-spark: export COVERAGE_CORE = sysmon
coverage-spark: BIN = .venv-spark-coverage/bin
coverage-spark: .venv-spark-coverage/.stamp $(call extension,.venv-spark-coverage) ## test-spark with the newest PySpark and a newer Python, and check the coverage of pipeline/
	@rm -rf .coverage/spark && mkdir -p .coverage/spark
	@$(compile)
	@$(BIN)/python $(measured) -m pytest tests/spark tests/pipeline -m "not oldest_pyspark $(common)" -o faulthandler_timeout=0 $(ARGS)
	@$(call enough,spark)

check-spark: $(SPARK:%=.venv-spark-%/.stamp) ## check the types of pipeline/ against the real PySpark
	@for which in $(SPARK); do .venv-spark-$$which/bin/mypy trimq/pipeline pyspark_rocketmq.py pyspark_rocketmq_store.py tests/spark || exit; done

test-operations: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the tests with Docker and Prometheus (Debian's packages; root), and a release of a clone
	@$(call pytest,partners,tests/docker tests/broker/metrics tests/packaging)

check: $(VENV)/.dev-stamp ## format, lint, types, layers, generated files, Rust; all run, and any failure fails
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

# The interpreter is fixed: otherwise clippy rebuilds for each one that is first in PATH.
check-native: $(VENV)/.venv-stamp
	@$(call with_cargo,fmt clippy,cargo fmt --check && \
		PYO3_PYTHON="$(abspath $(BIN)/python)" cargo clippy --locked --quiet --all-targets -- -D warnings && echo "native: format and lints are fine")

# All pages are read each time: Sphinx reports warnings only of pages that it reads.
SITE := build/site
docs: .venv-docs/.stamp ## build the site of docs/ in build/site, without a network; fails on a link or an anchor whose target does not exist
	@rm -rf $(SITE)
	@.venv-docs/bin/sphinx-build -c docs/site --fresh-env --doctree-dir $(SITE)-doctrees --fail-on-warning --keep-going --quiet . $(SITE)
	@echo "docs: $(SITE)/index.html"

format: $(VENV)/.dev-stamp ## format the code and apply the linter's fixes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

generate: $(VENV)/.dev-stamp ## write the generated files
	@$(BIN)/python -m trimq.protocol.generate_codes
	@$(BIN)/python -m trimq.protocol.generate_properties
	@$(BIN)/python conf/generate.py

bench: $(VENV)/.dev-stamp $(call extension,$(VENV)) ## run the benchmarks
	@$(compile)
	@$(BIN)/python -m bench $(ARGS)

lock: $(VENV)/.venv-stamp ## update the lock files; UPGRADE=1 takes the newest versions
	@requirements/lock

changelog: $(VENV)/.dev-stamp ## put the fragments of changelog.d into CHANGELOG.md
	@$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'from importlib.metadata import version; print(version("trimq"))')"

wheels: $(VENV)/.build-stamp ## make sdist and wheel of trimq, and the wheel of the native extension for this kind of machine, in dist/
	@NATIVE=$(NATIVE) .ci/wheels dist

release: $(VENV)/.dev-stamp ## changelog, sdist, wheels, a check in a fresh environment, commit and tag: VERSION=1.2.3
	@VERSION="$(VERSION)" .ci/release

clean: ## remove the environment and the tools' caches (not ./data)
	rm -rf $(VENV) .venv-newest .venv-docs .venv-spark-* .python-newest .python-spark .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist native/target

# Everything a developer runs. Each target does its own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KILLS ?= 3
# Seconds for which everybody works at once, in each of the tests that let them.
SECONDS ?= 8
# Tests wait for the disk more than for anything else, and none of them pulls the plug: in memory, where there is room.
TEST_TMP ?= $(shell test -w /dev/shm && test "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 8000000 && echo /dev/shm)
# Tests start dozens of Java machines for a few rows each: their classes come from an archive, compiled just once.
CLASSES := $(abspath $(VENV))/spark-classes.jsa
QUICK_JAVA := -XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr
TEST_JAVA := $(QUICK_JAVA) -XX:SharedArchiveFile=$(CLASSES)
# And no test has so much data that it needs 200 partitions, compiled queries or a page to watch it.
QUICK_SPARK := -Dspark.sql.shuffle.partitions=2 -Dspark.default.parallelism=2 -Dspark.ui.enabled=false \
	-Dspark.sql.codegen.wholeStage=false -Dspark.sql.adaptive.enabled=false
TEST_SPARK := SPARK_SUBMIT_OPTS='$(TEST_JAVA) $(QUICK_SPARK) -Dspark.executor.extraJavaOptions="$(TEST_JAVA)"'
SOAK_KILLS ?= 200
SOAK_STEPS ?= 150
SOAK_SECONDS ?= 30
SOAK_UPKEEP ?= 300
SOAK_PIPELINE_KILLS ?= 50
SOAK_VIEW_EXAMPLES ?= 100
SOAK_PIPELINE_EXAMPLES ?= 60
SOAK_OUTAGES ?= 50
SOAK_REBUILD_EXAMPLES ?= 60
SOAK_MOVING_EXAMPLES ?= 20

# The programs that tests start by the hundred would be compiled anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup java demo scaled test bench soak check format docs clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Lakebook needs Python 3.11 or newer; set PYTHON=/path/to/python3.11 and try again."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Lakebook and its dependencies into $(VENV) (once; PySpark is large)"
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[spark,dev]'
	@touch $(STAMP)

setup: $(STAMP) ## make the environment in .venv, with the command at .venv/bin/lakebook

java:
	@command -v java >/dev/null 2>&1 && java -version 2>&1 | \
		awk -F'"' '/version/ { split($$2, v, "."); exit !(v[1] + 0 >= 17) }' \
		|| { echo "Lakebook's pipelines run on Spark, which needs Java 17 or newer, and none was found."; \
		     echo "Install one, for example:  apt-get install openjdk-17-jre-headless   or   brew install openjdk@17"; \
		     echo "and put it on the PATH."; exit 1; }

$(CLASSES): $(STAMP) | java
	@echo "Gathering the classes of Spark for the tests (once)"
	@-SPARK_SUBMIT_OPTS='$(QUICK_JAVA) -XX:ArchiveClassesAtExit=$@' $(BIN)/python tests/spark/class_archive.py >$(VENV)/classes.log 2>&1

demo: setup java ## the life of a topic, of a table on Spark, of one that looks after itself; and the whole story with a picture
	@$(BIN)/python demo/topic_life.py
	@$(BIN)/python demo/stream_life.py
	@$(BIN)/python demo/table_life.py
	@$(BIN)/python demo/upkeep_life.py
	@$(BIN)/python demo/whole_life.py

scaled: setup java ## all of them once more, on PostgreSQL, a bucket and a Spark cluster of this machine
	@$(BIN)/python demo/scaled.py

test: setup java $(CLASSES) ## the whole test suite, with few kills
	@$(TEST_SPARK) $(if $(TEST_TMP),TMPDIR=$(TEST_TMP)) LAKEBOOK_TEST_KILLS=$(KILLS) LAKEBOOK_TEST_PIPELINE_KILLS=$(KILLS) \
		LAKEBOOK_TEST_UPKEEP_SECONDS=$(SECONDS) LAKEBOOK_TEST_STREAM_SECONDS=$(SECONDS) \
		$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25

soak: setup java $(CLASSES) ## the fault tests at length, and all of the acceptance tests; the last result is recorded in docs/soak.md
	@$(TEST_SPARK) LAKEBOOK_TEST_KILLS=$(SOAK_KILLS) LAKEBOOK_TEST_STEPS=$(SOAK_STEPS) \
		LAKEBOOK_TEST_SECONDS=$(SOAK_SECONDS) LAKEBOOK_TEST_UPKEEP_SECONDS=$(SOAK_UPKEEP) \
		LAKEBOOK_TEST_STREAM_SECONDS=$(SOAK_UPKEEP) LAKEBOOK_TEST_PIPELINE_KILLS=$(SOAK_PIPELINE_KILLS) \
		LAKEBOOK_TEST_VIEW_EXAMPLES=$(SOAK_VIEW_EXAMPLES) LAKEBOOK_TEST_PIPELINE_EXAMPLES=$(SOAK_PIPELINE_EXAMPLES) \
		LAKEBOOK_TEST_OUTAGES=$(SOAK_OUTAGES) LAKEBOOK_TEST_REBUILD_EXAMPLES=$(SOAK_REBUILD_EXAMPLES) \
		LAKEBOOK_TEST_MOVING_EXAMPLES=$(SOAK_MOVING_EXAMPLES) \
		LAKEBOOK_TEST_EVERYWHERE=yes \
		$(BIN)/python -m pytest tests/faults tests/spark/test_view_model.py tests/spark/test_pipeline_model.py \
		tests/registry/test_rebuild_histories.py tests/spark/test_bucket_access.py tests/spark/test_changes.py \
		tests/spark/test_connect.py tests/registry/test_copy.py tests/registry/test_backup.py tests/migrations \
		tests/registry/test_hostile_commits.py tests/registry/test_bad_input.py tests/registry/test_rebuild_failures.py \
		tests/registry/test_rebuild_outside.py tests/spark/test_mixed_spark.py tests/unit/test_bench.py \
		tests/acceptance \
		--timeout 3600 --record-soak docs/soak.md

bench: setup java ## measure against the bare driver and other engines; writes bench/results.json
	@$(BIN)/python -m bench

check: setup ## ruff, mypy --strict, the layering test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/unit/test_layering.py

format: setup ## put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup ## write docs/reference anew from docstrings, schema and command line
	@$(BIN)/python docs/build_reference.py

clean: ## remove what was built
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build

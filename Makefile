# Everything a developer runs. Each target does its own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KILLS ?= 8
# Tests wait for the disk more than for anything else, and none of them pulls the plug: in memory, where there is room.
TEST_TMP ?= $(shell test -w /dev/shm && test "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 8000000 && echo /dev/shm)
SOAK_KILLS ?= 200
SOAK_STEPS ?= 150
SOAK_SECONDS ?= 30
SOAK_UPKEEP ?= 300
SOAK_PIPELINE_KILLS ?= 50
SOAK_VIEW_EXAMPLES ?= 100
SOAK_PIPELINE_EXAMPLES ?= 60
SOAK_OUTAGES ?= 50

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

demo: setup java ## the life of a topic, of a table on Spark, of one that looks after itself; and the whole story with a picture
	@$(BIN)/python demo/topic_life.py
	@$(BIN)/python demo/stream_life.py
	@$(BIN)/python demo/table_life.py
	@$(BIN)/python demo/upkeep_life.py
	@$(BIN)/python demo/whole_life.py

scaled: setup java ## the whole story once more, on PostgreSQL, a bucket and a Spark cluster of this machine
	@$(BIN)/python demo/scaled.py

test: setup java ## the whole test suite, with few kills
	@$(if $(TEST_TMP),TMPDIR=$(TEST_TMP)) LAKEBOOK_TEST_KILLS=$(KILLS) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25

soak: setup java ## the fault tests at length; the last result is recorded in docs/soak.md
	@LAKEBOOK_TEST_KILLS=$(SOAK_KILLS) LAKEBOOK_TEST_STEPS=$(SOAK_STEPS) \
		LAKEBOOK_TEST_SECONDS=$(SOAK_SECONDS) LAKEBOOK_TEST_UPKEEP_SECONDS=$(SOAK_UPKEEP) \
		LAKEBOOK_TEST_STREAM_SECONDS=$(SOAK_UPKEEP) LAKEBOOK_TEST_PIPELINE_KILLS=$(SOAK_PIPELINE_KILLS) \
		LAKEBOOK_TEST_VIEW_EXAMPLES=$(SOAK_VIEW_EXAMPLES) LAKEBOOK_TEST_PIPELINE_EXAMPLES=$(SOAK_PIPELINE_EXAMPLES) \
		LAKEBOOK_TEST_OUTAGES=$(SOAK_OUTAGES) \
		$(BIN)/python -m pytest tests/faults tests/spark/test_view_model.py tests/spark/test_pipeline_model.py \
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

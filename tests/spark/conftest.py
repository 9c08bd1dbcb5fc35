"""One Spark session for all tests of a process, and a book that leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import lakebook
from lakebook import Book
from lakebook.spark.session import spark_session
from spark.rows import known_files, of_outside_engines, remains, warehouse_of
from spark.sessions import QUICK


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("lakebook-tests", master="local[2]", **QUICK)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def book(tmp_path: Path, empty_book: Path) -> Iterator[Book]:
    """A book of its own. In the end it is sound, and its warehouse has its tables' files and nothing else.

    Only what outside engines leave beside their files may lie there too. Nothing is published in the background.
    """
    shutil.copytree(empty_book, tmp_path / "book")
    opened = lakebook.open(tmp_path / "book", publish="off", checkpoint_interval=0)
    try:
        yield opened
        found = opened.verify()
        known, folder = known_files(opened), warehouse_of(opened)
    finally:
        opened.close()
    assert (found.findings, found.unfinished) == ((), ())
    left = remains(folder)
    assert {path for path in left if path in known or not of_outside_engines(path)} == known

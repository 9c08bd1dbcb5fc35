"""Lakebook's own Python for the executors of a cluster, where it need not be installed."""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PACKAGES = ("lakebook", "pyspark_lakebook")
_MARK = "lakebook-shipped.zip"


def ship(spark: SparkSession) -> None:
    """Send Lakebook's modules to the executors, unless they share this machine's. Libraries are not sent with it."""
    if getattr(spark, "_jvm", None) is None:
        return  # A client of Spark Connect: its server's executors are its operator's.
    context = spark.sparkContext
    master = context.master or ""
    if master.startswith("local[") or master == "local":
        return
    if any(str(name).endswith(_MARK) for name in context.listFiles):
        return
    # Executors may ask for it as long as the session lives.
    folder = Path(tempfile.mkdtemp(prefix="lakebook-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context.addPyFile(str(_packed(folder / _MARK)))
    # A data source that Spark finds by itself is run without what was sent; one that is registered, with it.
    spark.dataSource.register(importlib.import_module("pyspark_lakebook").DefaultSource)


def _packed(file: Path) -> Path:
    sources = Path(__file__).parents[2]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for package in _PACKAGES:
            for source in sorted((sources / package).rglob("*.py")):
                packed.write(source, source.relative_to(sources))
    return file

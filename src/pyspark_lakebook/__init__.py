"""The Spark data source `lakebook`: `spark.read.format("lakebook")`, batch and streaming.

Spark imports every package whose name begins with `pyspark_`, and finds `DefaultSource`; nothing is registered.
"""

from pyspark_lakebook.source import LakebookDataSource as DefaultSource

__all__ = ["DefaultSource"]

"""The seam for storage engines: one small handler per format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from lakebook.lake.attempts import Attempt
from lakebook.lake.footer_store import Footer
from lakebook.lake.json_format import JsonFormat
from lakebook.lake.lake import Lake, TableShape
from lakebook.lake.leasing import Lease
from lakebook.lake.parquet_format import ParquetFormat
from lakebook.lake.planning import Plan
from lakebook.lake.steps import Steps
from lakebook.registry.table_files import NewFile, PlannedFile
from lakebook.storage.objects import ObjectStore

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession


class Format(Protocol):
    """What a table's format has to know: how to write, measure and read its files."""

    name: str
    #: Its codecs; the first is the default.
    compressions: tuple[str, ...]
    #: Whether tables of it can have partitions and a sort order.
    structured: bool

    def check_schema(self, schema: Any) -> None:
        """Refuse a schema whose types the format cannot carry."""

    def write(self, lake: Lake, attempt: Attempt, shape: TableShape, frame: DataFrame, steps: Steps) -> list[NewFile]:
        """Write a frame of the table's columns into the attempt's folder, and measure the files."""

    def write_arrow(self, lake: Lake, attempt: Attempt, shape: TableShape, data: pa.Table) -> list[NewFile]:
        """Write rows into the attempt's folder without Spark, and measure the files."""

    def adopt(self, lake: Lake, shape: TableShape, paths: Sequence[str]) -> list[NewFile]:
        """Measure files that others wrote, and check that they fit the table."""

    def read(self, spark: SparkSession, plan: Plan, lease: Lease) -> DataFrame:
        """A frame over exactly the files of a plan."""

    def batches(self, plan: Plan, file: PlannedFile, wanted: Any, footer: Footer | None) -> Iterator[pa.RecordBatch]:
        """The rows of a file in the asked-for columns."""

    def count_rows(self, store: ObjectStore, path: str, size: int) -> tuple[int, bytes | None]:
        """How many rows a file has, by the file itself; and its footer, if its kind has one."""


_HANDLERS: tuple[Format, ...] = (ParquetFormat(), JsonFormat())
#: By their names.
FORMATS: dict[str, Format] = {handler.name: handler for handler in _HANDLERS}

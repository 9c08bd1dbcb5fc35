"""The data source as Spark knows it: what it reads and writes is decided by its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark_lakebook.options import Options

# What each use needs is imported by it: Spark loads this module whenever it looks for any data source.


class LakebookDataSource(DataSource):
    """Topics and tables of a book: `format("lakebook")` with the option `topic` or `table`."""

    @classmethod
    def name(cls) -> str:
        return "lakebook"

    def schema(self) -> StructType:
        """The columns of the topic or the table."""
        from pyspark_lakebook import options, tables, topics

        # A stream is asked for its columns too, and cannot be told from a batch here.
        given = options.options_of(
            self.options,
            lambda is_table: options.READ_TABLE if is_table else (*options.READ_TOPIC, *options.READ_STREAM),
        )
        return tables.columns_of(given) if given.table is not None else topics.columns_of(given)

    def reader(self, schema: StructType) -> DataSourceReader:
        """What reads a topic or a table once."""
        from pyspark_lakebook import options, tables, topics

        given = options.options_of(
            self.options, lambda is_table: options.READ_TABLE if is_table else options.READ_TOPIC
        )
        if given.table is not None:
            return tables.TableReader(given, schema)
        return topics.TopicReader(given, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """What follows a topic."""
        from pyspark_lakebook import options, streams

        given = options.options_of(self.options, lambda _: options.READ_STREAM)
        if given.table is not None:
            _refuse("a table cannot be followed", given.table, "Follow a topic, or read the table once")
        return streams.TopicStreamReader(given, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """What appends to a topic once."""
        from pyspark_lakebook import options, writing

        given = options.options_of(self.options, lambda _: options.WRITE_BATCH)
        return writing.TopicWriter(_appendable(given, overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """What appends the batches of a query to a topic, each exactly once."""
        from pyspark_lakebook import options, writing

        given = options.options_of(self.options, lambda _: options.WRITE_STREAM)
        return writing.TopicStreamWriter(_appendable(given, overwrite), schema)


def _appendable(given: Options, overwrite: bool) -> Options:
    if given.table is not None:
        _refuse("tables are not written by this format", given.table, "Use book.table(…).insert(frame)")
    if overwrite:
        _refuse("a topic can only be appended to", str(given.topic), 'Use mode("append")')
    return given


def _refuse(what: str, on: str, remedy: str) -> NoReturn:
    from lakebook.errors import InvalidInput

    raise InvalidInput(what, on=on, remedy=remedy)

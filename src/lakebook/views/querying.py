"""Queries over everything a book has: names are views, then tables, then topics, and time prunes by the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from lakebook.clock import to_datetime, to_ms
from lakebook.errors import InvalidPredicate, ReadFailed
from lakebook.iceberg.sql_names import Comparison, Query, parse_query
from lakebook.lake.lake import Lake
from lakebook.lake.table import Table
from lakebook.registry.ranges import Range
from lakebook.registry.tables import TableRecord
from lakebook.registry.views import GLOBAL, earliest_time, find_view
from lakebook.spark import queries
from lakebook.spark.session import check_spark, reason_of
from lakebook.streams.ranges import EARLIEST
from lakebook.streams.topics import Topics
from lakebook.views.reading import table_of
from lakebook.views.sources import TIMESTAMP, find_table, unknown_source
from lakebook.views.times import INTERVALS
from lakebook.views.view import View
from lakebook.views.views import Views

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

_ON = "SQL"
# Not floats: Spark compares them as doubles, of which a value may lie between two of them.
_NUMBERS = ("int", "long", "double")
_FROM = (">", ">=", "=")


class Queries:
    """Runs queries over the views, tables and topics of a book."""

    def __init__(self, lake: Lake, views: Views, topics: Topics) -> None:
        self._lake = lake
        self._views = views
        self._topics = topics

    def count(self, sql: str) -> int | None:
        """The answer of `SELECT count(*) FROM name` from the registry alone; none if it is another query."""
        query = parse_query(sql)
        if not query.is_count:
            return None
        (name,) = query.names
        view, table = self._view(name), self._table(name)
        if view is not None:
            table_of(self._lake, view.record, GLOBAL)
            return view.count()
        if table is not None:
            return Table(self._lake, table).count()
        if name in self._topics:
            return self._topics[name].describe().record_count
        raise unknown_source(name, _ON)

    def sql(self, spark: SparkSession, sql: str, *, materialize: bool = False) -> DataFrame:
        """The rows of a query; what it reads is pinned until the book is closed."""
        check_spark(spark, self._lake.store.warehouse)
        query = parse_query(sql)
        # In another zone, a time without one is another time.
        comparisons = query.comparisons if queries.is_utc(spark) else ()
        frames = {name: self._frame(spark, name, query, comparisons, materialize) for name in query.names}
        try:
            return queries.query_frame(spark, frames, query.over)
        except Exception as error:
            raise ReadFailed(
                f"Spark cannot run it ({reason_of(error)})", on=_ON, remedy="Look at the names of its columns"
            ) from error

    def _view(self, name: str) -> View | None:
        record = self._lake.registry.read_with(lambda reader: find_view(reader, name))
        return None if record is None else self._views.get(name)

    def _table(self, name: str) -> TableRecord | None:
        return self._lake.registry.read_with(lambda reader: find_table(reader, name))

    def _frame(
        self, spark: SparkSession, name: str, query: Query, comparisons: Sequence[Comparison], materialize: bool
    ) -> DataFrame:
        view = self._view(name)
        if view is not None:
            if materialize:
                self._materialize(spark, view, comparisons)
            return self._read(spark, Table(self._lake, table_of(self._lake, view.record, GLOBAL)), query, comparisons)
        table = self._table(name)
        if table is not None:
            return self._read(spark, Table(self._lake, table), query, comparisons)
        if name not in self._topics:
            raise unknown_source(name, _ON)
        # Not to an end: a record that came late may lie behind others of a later time.
        begin = max(_moments(comparisons, TIMESTAMP, _FROM), default=None)
        return self._topics[name].read(spark, start=EARLIEST if begin is None else begin)

    def _read(self, spark: SparkSession, table: Table, query: Query, comparisons: Sequence[Comparison]) -> DataFrame:
        """The rows of a table, without files that cannot have any that the query asks for."""
        where = [text for text in map(_condition(table, comparisons), query.comparisons) if text is not None]
        return table.read(spark, " AND ".join(where) or None)

    def _materialize(self, spark: SparkSession, view: View, comparisons: Sequence[Comparison]) -> None:
        """Build what is missing or stale of the time that a query asks for; without any, up to now."""
        definition = view.definition
        now = self._lake.clock.now_ms()
        begin = max(_moments(comparisons, definition.event_time, _FROM), default=None)
        ends = [to_ms(moment) for moment in _moments(comparisons, definition.event_time, ("<",))]
        ends += [to_ms(moment) + 1 for moment in _moments(comparisons, definition.event_time, ("<=", "="))]
        ranges = view.list_partitions()
        built = [item.begin for item in ranges]
        width = INTERVALS[definition.interval]
        first = begin or min([*built, to_datetime(now - round(definition.looks_back * 1000))])
        last = to_datetime(min([now + width, *(ends or [now])]))
        floor = self._floor(view, ranges)
        if floor is not None and max(first, floor) < last:
            view.materialize(spark, max(first, floor), last)

    def _floor(self, view: View, ranges: Sequence[Range]) -> datetime | None:
        """The time before which there is nothing to build, however early a query asks: no rows, and nothing to mend."""
        record = view.record
        earliest = self._lake.registry.read_with(lambda reader: earliest_time(reader, record))
        moments = [] if earliest is None else [to_datetime(earliest)]
        moments += [item.begin for item in ranges if item.stale_at or item.schema_hash != record.schema_hash]
        return min(moments, default=None)


def _moments(comparisons: Sequence[Comparison], column: str, operators: Sequence[str]) -> list[datetime]:
    """The times with which a query compares a column."""
    found = []
    for item in comparisons:
        if item.column.lower() == column.lower() and item.operator in operators and item.is_text:
            with suppress(ValueError):
                moment = datetime.fromisoformat(item.value)
                if item.cast == "date" and not _is_date(item.value):
                    continue  # Spark takes the day of it.
                found.append(moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment)
    return found


def _is_date(text: str) -> bool:
    """Whether a text is a day, and no time of it."""
    with suppress(ValueError):
        date.fromisoformat(text)
        return True
    return False


def _has_zone(text: str) -> bool:
    return datetime.fromisoformat(text).tzinfo is not None


def _condition(table: Table, comparisons: Sequence[Comparison]) -> Callable[[Comparison], str | None]:
    """What of a query a table's plan understands as the query means it."""
    fields: dict[str, Any] = {field.name: str(field.field_type) for field in table.schema.fields}

    def condition(item: Comparison) -> str | None:
        kind = fields.get(item.column)
        if kind in ("timestamp", "timestamptz"):
            moments = _moments([item], item.column, [item.operator]) if item in comparisons else []
            # What Spark makes of a zone where the column has none depends on its settings.
            if not moments or (kind == "timestamp" and _has_zone(item.value)):
                return None
            text = moments[0].astimezone(UTC).replace(tzinfo=None).isoformat()
            text += "+00:00" if kind == "timestamptz" else ""
            item = Comparison(item.column, item.operator, text, True)
        elif (
            item.cast is not None
            or kind is None
            or (kind in _NUMBERS) == item.is_text
            or kind not in (*_NUMBERS, "string")
        ):
            return None
        try:
            table.plan(item.text)
        except InvalidPredicate:
            return None
        return item.text

    return condition

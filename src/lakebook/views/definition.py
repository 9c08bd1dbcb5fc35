"""What a view is: a query, its event time, its interval, and how long what it builds is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

from lakebook.errors import InvalidInput, InvalidView
from lakebook.iceberg.sql_names import INSTANCE, Query, parse_query
from lakebook.names import check_name, check_text, shown
from lakebook.registry.views import GLOBAL, ViewRecord, table_name
from lakebook.views.times import INTERVALS, check_interval

_MOST_SECONDS = 10**10
_MOST_INSTANCES = 1000
_DAY = 86_400.0


@dataclass(frozen=True)
class Definition:
    """A view's definition."""

    sql: str
    #: The column that is the event time of tables; where a source has another, it is named in `event_times`.
    event_time: str
    interval: str
    #: Seconds for which ranges are kept after their end; none: for ever.
    retention: float | None = None
    instances: tuple[str, ...] = (GLOBAL,)
    sort_by: tuple[str, ...] = ()
    event_times: Mapping[str, str] = field(default_factory=dict)
    #: Seconds before now in which upkeep builds what is missing or stale.
    lookback: float | None = None

    @property
    def query(self) -> Query:
        """The query, read."""
        return parse_query(self.sql)

    @property
    def width(self) -> int:
        """Milliseconds of its interval."""
        return INTERVALS[self.interval]

    @property
    def looks_back(self) -> float:
        """Seconds before now in which upkeep looks for work."""
        given = self.lookback if self.lookback is not None else max(_DAY, 7 * self.width / 1000)
        return given if self.retention is None else min(given, self.retention)

    @property
    def schema_hash(self) -> str:
        """Tells apart what was built by different queries."""
        said = [self.sql, self.event_time, sorted(self.event_times.items())]
        return xxhash.xxh3_128_hexdigest(orjson.dumps(said))

    def as_json(self) -> dict[str, Any]:
        """As the registry keeps it."""
        return {
            "sql": self.sql,
            "event_time": self.event_time,
            "interval": self.interval,
            "retention": self.retention,
            "instances": list(self.instances),
            "sort_by": list(self.sort_by),
            "event_times": dict(self.event_times),
            "lookback": self.lookback,
        }


def definition_of(view: ViewRecord) -> Definition:
    """The definition of a view in the registry."""
    given = dict(view.definition)
    given["instances"], given["sort_by"] = tuple(given["instances"]), tuple(given["sort_by"])
    return Definition(**given)


def check_definition(name: str, wanted: Definition) -> Query:
    """Refuse what cannot be a view; its query, read."""
    on = f"view {name}"
    try:
        query = parse_query(wanted.sql)
    except InvalidInput as error:
        raise InvalidView(error.what, on=on, remedy=error.remedy) from None
    if query.parameters - {INSTANCE}:
        strange = min(query.parameters - {INSTANCE})
        raise InvalidView(f"there is no parameter {shown(strange)}", on=on, remedy=f"Use :{INSTANCE}")
    check_interval(wanted.interval)
    for what, seconds in (("retention", wanted.retention), ("lookback", wanted.lookback)):
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds < _MOST_SECONDS):
            raise InvalidView(f"{shown(seconds)} is no {what}", on=on, remedy="Give seconds, more than 0")
    _check_texts(on, "column", wanted.sort_by)
    _check_texts(on, "column", [wanted.event_time, *wanted.event_times.values()])
    unknown = [source for source in wanted.event_times if source not in query.names]
    if unknown:
        raise InvalidView(f"the query does not read {shown(unknown[0])}", on=on, remedy=f"It reads {query.names!r}")
    if not wanted.instances or len(set(wanted.instances)) != len(wanted.instances):
        raise InvalidView("its instances are none, or not distinct", on=on)
    if len(wanted.instances) > _MOST_INSTANCES:
        raise InvalidView(f"{len(wanted.instances)} instances are too many", on=on, remedy=f"Use {_MOST_INSTANCES}")
    for instance in wanted.instances:
        check_name("instance", instance)
        check_name("view", table_name(name, instance))
    return query


def _check_texts(on: str, kind: str, texts: Sequence[object]) -> None:
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidView(f"{shown(text)} is no {kind}", on=on)
        check_text(kind, text)

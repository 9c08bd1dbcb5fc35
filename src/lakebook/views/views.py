"""The views of a book: creating, finding, changing and dropping them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lakebook.lake.lake import Lake
from lakebook.names import check_name
from lakebook.pages import PAGE_SIZE, Page, check_limit, every, page_of
from lakebook.registry.views import (
    ACTIVE,
    GLOBAL,
    PAUSED,
    ViewRecord,
    alter_view,
    create_view,
    drop_view,
    find_view,
    get_view,
    list_views,
    set_view_state,
)
from lakebook.streams.metadata_store import MetadataStore
from lakebook.views.definition import Definition, check_definition, definition_of
from lakebook.views.sources import resolve
from lakebook.views.view import View

_KEEP: Any = object()


class Views:
    """The views of a book: `views["blocks"]`."""

    def __init__(self, lake: Lake, metadata: MetadataStore) -> None:
        self._lake = lake
        self._metadata = metadata

    def create(
        self,
        name: str,
        sql: str,
        *,
        event_time: str = "timestamp",
        interval: str = "hour",
        retention: float | None = None,
        instances: Sequence[str] = (GLOBAL,),
        sort_by: Sequence[str] = (),
        event_times: Mapping[str, str] | None = None,
        lookback: float | None = None,
    ) -> View:
        """Create a view: a SELECT over topics and tables, materialised minute by minute, hourly or daily.

        `event_time` is the column by which rows of tables belong to a range (of a topic it is `timestamp`);
        `event_times` names it for single sources. Ranges are kept for `retention` seconds. Upkeep builds what is
        missing or stale up to `lookback` seconds ago. Each instance has rows of its own; the query may use
        `:instance`. Groups of an aggregation have to lie within one interval.
        """
        check_name("view", name)
        wanted = Definition(
            sql, event_time, interval, retention, tuple(instances), tuple(sort_by), dict(event_times or {}), lookback
        )
        sources = resolve(self._lake, self._metadata, name, check_definition(name, wanted), wanted)
        record = self._lake.registry.write(
            lambda transaction: create_view(transaction, name, wanted.as_json(), wanted.schema_hash, sources)
        )
        return self._view(record)

    def _view(self, record: ViewRecord) -> View:
        return View(self._lake, self._metadata, record)

    def _record(self, name: str) -> ViewRecord:
        check_name("view", name)
        return self._lake.registry.read_with(lambda reader: get_view(reader, name))

    def get(self, name: str) -> View:
        """A view by its name."""
        return self._view(self._record(name))

    def __getitem__(self, name: str) -> View:
        return self.get(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        """The names of all views, in order."""
        return (record.name for record in every(lambda after: self.list(after=after)))

    def find(self, name: str) -> View | None:
        """A view by its name, if there is one."""
        record = self._lake.registry.read_with(lambda reader: find_view(reader, name))
        return None if record is None else self._view(record)

    def list(self, *, limit: int = PAGE_SIZE, after: str | None = None) -> Page[ViewRecord]:
        """The views, in the order of their names."""
        check_limit(limit)
        if after is not None:
            check_name("view", after)
        found = self._lake.registry.read_with(lambda reader: list_views(reader, after or "", limit + 1))
        return page_of(found, limit, lambda view: view.name)

    def alter(
        self,
        name: str,
        *,
        sql: str | None = None,
        event_time: str | None = None,
        interval: str | None = None,
        retention: float | None = _KEEP,
        instances: Sequence[str] | None = None,
        sort_by: Sequence[str] | None = None,
        event_times: Mapping[str, str] | None = None,
        lookback: float | None = _KEEP,
    ) -> View:
        """Change a view. What another query has built is read until it is built anew."""
        record = self._record(name)
        given: dict[str, Any] = {"sql": sql, "event_time": event_time, "interval": interval}
        given |= {"instances": None if instances is None else tuple(instances)}
        given |= {"sort_by": None if sort_by is None else tuple(sort_by)}
        given |= {"event_times": None if event_times is None else dict(event_times)}
        changes = {key: value for key, value in given.items() if value is not None}
        changes |= {
            key: value for key, value in (("retention", retention), ("lookback", lookback)) if value is not _KEEP
        }
        wanted = replace(definition_of(record), **changes)
        sources = resolve(self._lake, self._metadata, name, check_definition(name, wanted), wanted)
        return self._view(
            self._lake.registry.write(
                lambda transaction: alter_view(transaction, record, wanted.as_json(), wanted.schema_hash, sources)
            )
        )

    def drop(self, name: str) -> int:
        """Remove a view with all it has built; how many ranges. Their files go when nobody reads them any more."""
        record = self._record(name)
        return self._lake.registry.write(lambda transaction: drop_view(transaction, record))

    def pause(self, name: str) -> bool:
        """Let upkeep leave a view alone; whether that changes anything. By hand it can be built all the same."""
        record = self._record(name)
        return self._lake.registry.write(lambda transaction: set_view_state(transaction, record, PAUSED))

    def resume(self, name: str) -> bool:
        """Let upkeep go on with a view; whether that changes anything."""
        record = self._record(name)
        return self._lake.registry.write(lambda transaction: set_view_state(transaction, record, ACTIVE))

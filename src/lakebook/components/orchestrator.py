"""The orchestrator writes down which versions of which tables are owed to Iceberg.

It publishes nothing. What it has written down outlives every process, and says of each version whether it
waits, is being published, is published, or why it could not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lakebook.cdc.rows import TableRow
from lakebook.cdc.subscribers import Event, Refresh, Subscriber
from lakebook.components.component import Component
from lakebook.errors import InvalidInput
from lakebook.lake.lake import Lake
from lakebook.lake.measuring import PARQUET
from lakebook.names import shown
from lakebook.pages import PAGE_SIZE, Page, check_limit, page_of
from lakebook.registry.owed import (
    COMPLETED,
    OWED,
    STATES,
    MetadataUpdate,
    forget_dropped,
    list_named_updates,
    owe,
    owe_unpublished,
    owed_summary,
    resume_updates,
)

# Versions that one transaction of a refresh writes down at most.
_CHUNK = 2000


class Orchestrator(Component, Subscriber):
    """Owns the durable state of what is owed to Iceberg, per version."""

    name = "orchestrator"

    def on_event(self, event: Event[Any]) -> None:
        """Write down the versions that one change has made."""
        self.on_events([event])

    def on_events(self, events: Sequence[Event[Any]]) -> None:
        """Write down all versions that changes of a table have made, in one transaction."""
        # Properties have no version; they are published with the next look at the table.
        changes: list[Event[TableRow]] = [event for event in events if event.table == "tables"]
        if not changes:
            return
        newest = changes[-1].data
        if newest.format != PARQUET or self.paused(newest.id) is not None:
            return
        if changes[-1].operation == "delete" or newest.deleted_at is not None:
            self._forget(newest.object_id)
            return
        versions = [version for event in changes for version in _versions_of(event)]
        if versions:
            self.lake.registry.write(lambda transaction: owe(transaction, newest.id, versions))

    def on_refresh(self, refresh: Refresh) -> None:
        """Write down every version of a table that is not published; what somebody died over waits again."""
        table = refresh.table
        if refresh.kind != "table":
            return
        if table is None:
            self._forget(refresh.object_id)
            return
        if table.format != PARQUET or self.paused(table.id) is not None:
            return
        registry = self.lake.registry
        registry.write(lambda transaction: resume_updates(transaction, table.id))
        after: int | None = -1
        while after is not None:
            start = after
            after = registry.write(lambda transaction: owe_unpublished(transaction, table.id, start, _CHUNK))  # noqa: B023 - called at once

    def on_health(self) -> None:
        """Raise if the registry does not answer."""
        self.paused()

    def status(self) -> Mapping[str, Any]:
        """How many versions are owed, per state, and since when."""
        found = self.lake.registry.read_with(owed_summary)
        counts = {state: 0 for state in STATES if state != COMPLETED}
        for item in found:
            counts[item.state] += item.count
        oldest = min((item.oldest for item in found), default=None)
        return {
            **counts,
            "tables": len({item.table_id for item in found}),
            "oldest": None if oldest is None else oldest.isoformat(),
        }

    def _forget(self, object_id: int) -> None:
        self.lake.registry.write(lambda transaction: forget_dropped(transaction, object_id))


def _versions_of(event: Event[TableRow]) -> range:
    """The versions that a change of a table's row has made; it may have made several."""
    first = event.data.version if event.before is None else event.before.version + 1
    return range(first, event.data.version + 1)


def owed(
    lake: Lake,
    *,
    table_id: int | None = None,
    state: str | None = None,
    after: tuple[int, int] | None = None,
    limit: int = PAGE_SIZE,
) -> Page[MetadataUpdate]:
    """What is owed to Iceberg or was, by table and version: of one table, in one state, or both.

    The state `owed` is any of them but completed.
    """
    check_limit(limit)
    if state not in (None, OWED, *STATES):
        raise InvalidInput(
            f"{shown(state)} is not a state of an update", on="updates", remedy=f"Use {', '.join((OWED, *STATES))}"
        )
    found = lake.registry.read_with(lambda reader: list_named_updates(reader, table_id, state, after, limit + 1))
    return page_of(found, limit, lambda item: (item.table_id, item.version))

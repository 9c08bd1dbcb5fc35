"""Reading the log for several subscribers: each has a place of its own, and pages are read once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lakebook.cdc.subscribers import Event, Subscriber
from lakebook.registry.events import Cursor, EventLog

PAGE = 1000
# Subscribers that keep up are a few pages apart; one that lags reads for itself.
_PAGES = 16
_ALIASES = 64


class Router:
    """Tells who is to see a change: one look into a table that was made beforehand."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        routes: dict[str, tuple[str, ...]] = {}
        for subscriber in subscribers:
            for table in subscriber.subscribed_tables:
                routes[table] = (*routes.get(table, ()), subscriber.name)
        self._routes: Mapping[str, tuple[str, ...]] = routes

    def route(self, table: str) -> tuple[str, ...]:
        """The subscribers of a table."""
        return self._routes.get(table, ())


@dataclass(frozen=True)
class RoutedPage:
    """Some events, by subscriber, and the cursor behind them."""

    routed: Mapping[str, Sequence[Event[object]]]
    cursor: Cursor
    more: bool
    number: int
    #: How often commits had been announced before it was read.
    announced: int


class Capture:
    """The log, read in pages that subscribers at the same place share."""

    def __init__(self, log: EventLog, router: Router) -> None:
        self._log = log
        self._router = router
        self._lock = threading.Lock()
        self._announced = 0
        self._pages: OrderedDict[Cursor, RoutedPage] = OrderedDict()
        # Of a place where nothing new was found, and the place that was found to be the same.
        self._aliases: OrderedDict[Cursor, Cursor] = OrderedDict()

    def announce(self) -> None:
        """Say that there may be more than the pages that were read so far have."""
        with self._lock:
            self._announced += 1

    def read(self, cursor: Cursor) -> RoutedPage:
        """What was committed since the cursor, and who is to see it."""
        with self._lock:
            while cursor in self._aliases:
                cursor = self._aliases[cursor]
            page = self._pages.get(cursor)
            if page is None:
                return self._read(cursor)
            # Whoever was woken after it was read must not stop behind it.
            return page if page.announced == self._announced else replace(page, more=True)

    def _read(self, cursor: Cursor) -> RoutedPage:
        batch = self._log.read(cursor, PAGE)
        routed: dict[str, list[Event[object]]] = {}
        for captured in batch.events:
            names = self._router.route(captured.table)
            if names:
                event: Event[object] = Event(captured)
                for name in names:
                    routed.setdefault(name, []).append(event)
        page = RoutedPage(routed, batch.cursor, batch.more, len(batch.events), self._announced)
        if batch.events:
            self._pages[cursor] = page
            _forget_oldest(self._pages, _PAGES)
        elif batch.cursor != cursor:
            # So that subscribers that wait stay at one place, and go on sharing.
            self._aliases[cursor] = batch.cursor
            _forget_oldest(self._aliases, _ALIASES)
        return page


def _forget_oldest(kept: OrderedDict[Cursor, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)

"""A small stack of idle driver connections that never crosses a fork."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from lakebook import forks
from lakebook.errors import BookClosed
from lakebook.registry.databases import Database


class Connections:
    """Connections that are open and idle; taking one is cheaper than opening one."""

    def __init__(self, database: Database, keep: int) -> None:
        self._database = database
        self._idle: deque[Any] = deque()
        self._keep = keep
        self._closed = False
        # A database in memory lives as long as one connection to it does.
        self._anchor = database.connect() if getattr(database, "in_memory", False) else None
        forks.watch(self)

    def take(self) -> Any:
        """An idle connection, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            if self._closed:
                raise BookClosed("the book is closed", on=self._database.shown, remedy="Open it again") from None
            return self._database.connect()

    def give(self, connection: Any) -> None:
        """Put a connection back that is in no transaction."""
        if len(self._idle) >= self._keep:
            connection.close()
            return
        self._idle.append(connection)
        if self._closed:  # Asked afterwards: it may be closed at any moment.
            self.drop_idle()

    def drop(self, connection: Any) -> None:
        """Close a connection whose state is not known."""
        with suppress(self._database.errors):  # It may be lost already.
            connection.close()

    def drop_idle(self) -> None:
        """Close all idle ones, after one of them was found to be lost."""
        while self._idle:
            try:
                self.drop(self._idle.pop())
            except IndexError:
                return

    def close(self) -> None:
        """Close everything; what is still taken is closed when it is given back."""
        self._closed = True
        self.drop_idle()
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = None

    def after_fork_in_child(self) -> None:
        """Forget the parent's connections without closing them."""
        forks.inherited.extend(self._idle)
        forks.inherited.append(self._anchor)
        self._idle = deque()
        self._anchor = None

"""Stand-ins for Spark that fail: what is written down of it needs no Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lakebook.errors import SparkUnsuitable


class NoSpark:
    """Spark that cannot be had, and how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        raise SparkUnsuitable("there is no Java", on="Spark")


class StandIn:
    """A session that says whether its Spark lives; whatever else is asked of it fails.

    `dies` says whether its JVM is gone from then on. `before` is called first, each time.
    """

    def __init__(self, *, dies: bool = False, before: Callable[[], object] = lambda: None) -> None:
        self._dies = dies
        self._before = before
        self.is_gone = False
        self.is_stopped_there = False
        self.stops = 0
        #: Where PySpark's own session has the objects of its JVM.
        self._jvm = self._jsc = self.sparkContext = self

    def sc(self) -> StandIn:
        return self

    def isStopped(self) -> bool:  # noqa: N802 - as Spark has it
        if self.is_gone:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.is_stopped_there

    def stop(self) -> None:
        self.stops += 1
        if self.is_gone:
            raise ConnectionRefusedError(111, "Connection refused")
        self.is_stopped_there = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._before()
        if self._dies:
            self.is_gone = True
        if self.is_gone:
            raise ConnectionRefusedError(111, "Connection refused")
        raise ValueError(f"there is no column {name}")

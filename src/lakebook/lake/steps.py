"""How long the steps of a change take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lakebook import failpoints
from lakebook.clock import Clock


class Steps:
    """How long each step of a change takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure one step."""
        begun = self._clock.monotonic()
        try:
            yield
        finally:
            spent = self._clock.monotonic() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The step in which rows are written; what is staged for it is there before."""
        failpoints.reach("insert.staged")
        with self.step("insert_data"):
            yield
        failpoints.reach("insert.written")

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The step in which what was written is made durable and measured."""
        with self.step("measure"):
            yield
        failpoints.reach("insert.measured")

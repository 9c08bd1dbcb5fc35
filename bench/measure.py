"""Measuring two sides in alternating rounds, so that the machine's noise meets both alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")

#: A call for each of the values. The loop stands inside, so that no call of ours is timed.
Run = Callable[[Sequence[T]], object]


@dataclass(frozen=True)
class Comparison:
    """Seconds per call of each side, one number for each round."""

    ours: Sequence[float]
    peer: Sequence[float]

    @property
    def our_rate(self) -> float:
        return 1 / median(self.ours)

    @property
    def peer_rate(self) -> float:
        return 1 / median(self.peer)


@dataclass(frozen=True)
class Latency:
    """Single calls in milliseconds."""

    p50: float
    p99: float


def compare(ours: Run[T], peer: Run[T], rounds: Sequence[Sequence[T]], *, peer_share: int = 1) -> Comparison:
    """Run both sides on each round's values, the peer on the first `1 / peer_share` of them.

    The share is for a peer that is many times slower. The first round warms up and does not count.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    for number, values in enumerate([rounds[0], *rounds]):
        sides = [(seconds[0], ours, values), (seconds[1], peer, values[: max(1, len(values) // peer_share)])]
        # Who goes first changes: the second finds the operating system's cache warm.
        for kept, run, given in sides if number % 2 else reversed(sides):
            taken = timed(lambda run=run, given=given: run(given))  # type: ignore[misc]
            if number:
                kept.append(taken / len(given))
    return Comparison(*seconds)


def timed(work: Callable[[], object]) -> float:
    """How many seconds `work` takes."""
    begun = perf_counter()
    work()
    return perf_counter() - begun


def latencies(
    ours: Callable[[T], object], peer: Callable[[T], object], values: Sequence[T], *, turn: int = 100
) -> tuple[Latency, Latency]:
    """Time every single call, the sides taking turns after so many calls."""
    taken: tuple[list[float], list[float]] = ([], [])
    for call in (ours, peer):
        for value in values[:turn]:
            call(value)
    gc.collect()
    for start in range(0, len(values), turn):
        for kept, call in zip(taken, (ours, peer), strict=True):
            for value in values[start : start + turn]:
                begun = perf_counter()
                call(value)
                kept.append(perf_counter() - begun)
    return _latency(taken[0]), _latency(taken[1])


def _latency(seconds: list[float]) -> Latency:
    ordered = sorted(seconds)
    return Latency(median(ordered) * 1000, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000)

"""Measuring two sides in alternating rounds, so that the machine's noise meets both alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

# A call so slow that fewer rounds have to do, in seconds.
_SLOW = 0.02


@dataclass(frozen=True)
class Effort:
    """How long a measure may take: rounds that count, and seconds that a side gets in each."""

    rounds: int
    seconds: float
    #: Single calls that are timed for a percentile.
    singles: int


@dataclass(frozen=True)
class Side:
    """One of the two: `run` makes a call for each of the values that `draw` gives.

    The loop stands inside `run`, so that no call of ours is part of what is timed.
    """

    run: Callable[[Sequence[Any]], object]
    draw: Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class Comparison:
    """Seconds per call: the median of the rounds."""

    ours: float
    peer: float


@dataclass(frozen=True)
class Latency:
    """Single calls in milliseconds."""

    p50: float
    p99: float


def compare(ours: Side, peer: Side, effort: Effort) -> Comparison:
    """Run both sides round after round, each with as many calls as fit its time."""
    sides = (ours, peer)
    calls = [_calls_for(side, effort) for side in sides]
    slow = any(number <= effort.seconds / _SLOW for number in calls)
    taken: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    for number in range(min(effort.rounds, 5) if slow else effort.rounds):
        # Who goes first changes: the second finds the operating system's cache warm.
        for index in (0, 1) if number % 2 else (1, 0):
            taken[index].append(_seconds_per_call(sides[index], calls[index]))
    return Comparison(median(taken[0]), median(taken[1]))


def latencies(ours: Side, peer: Side, effort: Effort, *, turn: int = 100) -> tuple[Latency, Latency]:
    """Time every single call, the sides taking turns after so many calls."""
    slowest = min(_calls_for(side, effort) for side in (ours, peer)) * effort.rounds
    number = max(10, min(effort.singles, slowest))
    taken: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    for start in range(0, number, turn):
        for kept, side in zip(taken, (ours, peer), strict=True):
            for value in side.draw(min(turn, number - start)):
                only = (value,)
                begun = perf_counter()
                side.run(only)
                kept.append(perf_counter() - begun)
    return latency(taken[0]), latency(taken[1])


def latency(seconds: Sequence[float]) -> Latency:
    """The percentiles of single calls."""
    ordered = sorted(seconds)
    return Latency(median(ordered) * 1000, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """How many seconds `work` takes, and what it returns."""
    begun = perf_counter()
    result = work()
    return perf_counter() - begun, result


def _calls_for(side: Side, effort: Effort) -> int:
    """Warm up, and find out how many calls fit a round."""
    # PostgreSQL's driver prepares at the sixth call, and the server settles on a plan after five more.
    taken: list[float] = []
    while len(taken) < 12 and (len(taken) < 3 or sum(taken) < 1):
        taken.append(_seconds_per_call(side, 1))
    return max(2, min(20_000, int(effort.seconds / median(taken))))


def _seconds_per_call(side: Side, number: int) -> float:
    values = side.draw(number)
    return timed(lambda: side.run(values))[0] / number

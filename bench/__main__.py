"""`python -m bench`: fill real databases, measure, print a table and write the results."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import (
    commits,
    compaction,
    delivery,
    footers,
    inserts,
    moving,
    pipelines,
    planning,
    publishing,
    report,
    scale,
    streams,
    writers,
)
from bench.asked import Asked, Say
from bench.measure import Effort
from bench.places import Ground
from bench.plans import unindexed
from bench.registry import Workload, growth
from bench.report import Header, Result
from lakebook.registry.statements import POSTGRESQL, SQLITE

Part = Callable[[Ground, Asked, Say], Iterator[Result]]

_PARTS = (
    "registry",
    "delivery",
    "commits",
    "plans",
    "publishing",
    "footers",
    "inserts",
    "compaction",
    "streams",
    "pipelines",
    "scale",
    "writers",
    "moving",
)
_FULL = Effort(rounds=15, seconds=0.1, singles=5_000)
_QUICK = Effort(rounds=5, seconds=0.03, singles=1_000)
#: By option: what it is, and its values at full length and with --quick.
_SIZES = {
    "sizes": ("numbers of segments", "1000,100000,1000000", "1000,10000"),
    "insert-rows": ("rows inserted through Spark", "8000000", "200000"),
    "commit-files": ("files of the tables committed to", "100,1000,10000", "20,200"),
    "plan-files": ("files of the tables planned", "1000,1000000", "1000,20000"),
    "publish-inserts": ("inserts published as Iceberg", "1000", "100"),
    "publish-files": ("files of the tables published at once", "1000,1000000", "1000,20000"),
    "stream-records": ("records sent to topics and read from them", "250000", "50000"),
    "stream-segments": ("segments among which one record is found", "100000", "100000"),
    "scale-rows": ("files, segments and events of a book that has grown", "1000,1000000", "1000,20000"),
    "scale-tables": ("tables and topics of a book that has grown", "10,10000", "10,200"),
    "writer-seconds": ("seconds that each number of writers commits", "6", "1"),
    "moving-files": ("files of the books that are copied and rebuilt", "20000", "1000"),
}
_RESULTS = Path(__file__).parent / "results.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, measure, and report."""
    options = _options(arguments)
    asked = _asked(options)
    console = Console(width=None if Console().is_terminal else 150)
    begun = perf_counter()
    header = Header({}, asked.segments, options.quick)
    results: list[Result] = []
    # A short path: the server's socket lies in it, and a socket's path has a small limit.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lb-")))
        for kind in asked.kinds:
            ground = Ground(kind, folder)
            stack.callback(ground.close)
            header.databases[kind] = ground.shown
            for result in _measure(console, ground, asked):
                results.append(result)
                # Written as they come: a run that is cut short has not been in vain.
                header.seconds = round(perf_counter() - begun, 1)
                report.write(options.out, header, results)
    report.show(console, results)
    if options.record is not None:
        report.record(options.record, header, results)
    console.print(f"{header.seconds:.0f} s; written to {options.out}")


def _measure(console: Console, ground: Ground, asked: Asked) -> Iterator[Result]:
    """All that is asked for, on one kind of database."""
    parts: Mapping[str, Part] = {
        "registry": partial(_registry, console),
        "delivery": delivery.measure,
        "commits": commits.measure,
        "plans": planning.measure,
        "publishing": publishing.measure,
        "footers": footers.measure,
        "inserts": inserts.measure,
        "compaction": compaction.measure,
        "streams": streams.measure,
        "pipelines": pipelines.measure,
        "scale": scale.measure,
        "writers": writers.measure,
        "moving": moving.measure,
    }
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(ground.kind, total=None)

        def say(what: str, done: int = 0, total: int | None = None) -> None:
            progress.update(task, description=f"{ground.kind}, {what}", completed=done, total=total)

        for part in asked.parts:
            yield from parts[part](ground, asked, say)


def _registry(console: Console, ground: Ground, asked: Asked, say: Say) -> Iterator[Result]:
    """Each size by itself, then the sizes beside each other."""
    workloads: list[Workload] = []
    with ExitStack() as stack:
        for size in asked.segments:
            place = stack.enter_context(ground.new(size, "segments"))
            workloads.append(Workload(place, asked.effort, asked.quick))
            yield from _measure_one(workloads[-1], say)
        if len(workloads) > 1:
            yield from growth(workloads[0], workloads[-1])
        _show_plans(console, workloads[-1])


def _measure_one(workload: Workload, say: Say) -> Iterator[Result]:
    where = f"{workload.place.size:,} segments"

    def told(what: str, done: int = 0, total: int | None = None) -> None:
        say(f"{where}: {what}", done, total)

    yield from workload.fill(told)
    yield workload.explain()
    yield from workload.look_up(told)
    yield from workload.look_up_cached(told)
    yield from workload.write(told)


def _show_plans(console: Console, workload: Workload) -> None:
    wanting = unindexed(workload.plans)
    for name, plan in workload.plans.items():
        mark = "reads more than it needs" if name in wanting else "by index"
        console.print(f"{workload.place.kind}: {name} — {mark}", style="bold", highlight=False)
        console.print(plan, highlight=False, markup=False, soft_wrap=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Lakebook beside its peers.")
    parser.add_argument("--parts", default=",".join(_PARTS), help="default: %(default)s")
    parser.add_argument("--databases", default=f"{SQLITE},{POSTGRESQL}", help="default: %(default)s")
    for name, (what, usual, few) in _SIZES.items():
        parser.add_argument(f"--{name}", help=f"{what} (default {usual}; with --quick {few})")
    parser.add_argument("--quick", action="store_true", help="small and short: to see that it works")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: %(default)s")
    parser.add_argument("--record", type=Path, metavar="PAGE", help="put the table into this page too")
    return parser.parse_args(arguments)


def _asked(options: argparse.Namespace) -> Asked:
    def sizes(name: str) -> list[int]:
        text = getattr(options, name.replace("-", "_")) or _SIZES[name][2 if options.quick else 1]
        return sorted({int(size) for size in text.split(",")})

    parts = options.parts.split(",")
    if unknown := set(parts) - set(_PARTS):
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    return Asked(
        options.databases.split(","),
        parts,
        options.quick,
        _QUICK if options.quick else _FULL,
        sizes("sizes"),
        sizes("insert-rows")[-1],
        sizes("commit-files"),
        sizes("plan-files"),
        sizes("publish-inserts")[-1],
        sizes("publish-files"),
        sizes("stream-records")[-1],
        sizes("stream-segments")[-1],
        sizes("scale-rows"),
        sizes("scale-tables"),
        sizes("writer-seconds")[-1],
        sizes("moving-files"),
    )


if __name__ == "__main__":
    main()

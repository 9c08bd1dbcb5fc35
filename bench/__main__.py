"""`python -m bench`: fill real databases, measure, print a table and write the results."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.measure import Effort
from bench.places import Place, Postgres, PostgresPlace, SQLitePlace
from bench.plans import unindexed
from bench.registry import Workload, growth
from bench.report import Header, Result
from lakebook.registry.statements import POSTGRESQL, SQLITE

_SIZES = "1000,100000,1000000"
_QUICK_SIZES = "1000,10000"
_FULL = Effort(rounds=15, seconds=0.1, singles=5_000)
_QUICK = Effort(rounds=5, seconds=0.03, singles=1_000)
_RESULTS = Path(__file__).parent / "results.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, measure, and report."""
    options = _options(arguments)
    sizes = sorted({int(size) for size in (options.sizes or (_QUICK_SIZES if options.quick else _SIZES)).split(",")})
    kinds = options.databases.split(",")
    console = Console(width=None if Console().is_terminal else 150)
    begun = perf_counter()
    header = Header({}, sizes, options.quick)
    results: list[Result] = []
    # A short path: the server's socket lies in it, and a socket's path has a small limit.
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lb-")))
        for kind in kinds:
            for result in _measure(stack, console, header, kind, folder, sizes, options.quick):
                results.append(result)
                # Written as they come: a run that is cut short has not been in vain.
                header.seconds = round(perf_counter() - begun, 1)
                report.write(options.out, header, results)
    report.show(console, results)
    if options.record is not None:
        report.record(options.record, header, results)
    console.print(f"{header.seconds:.0f} s; written to {options.out}")


def _measure(
    stack: ExitStack, console: Console, header: Header, kind: str, folder: Path, sizes: Sequence[int], quick: bool
) -> Iterator[Result]:
    """All measures on one kind of database: each size by itself, then the sizes beside each other."""
    places: list[Place] = []
    if kind == POSTGRESQL:
        server = Postgres(folder)
        stack.callback(server.stop)
        places.extend(PostgresPlace(server, folder, size) for size in sizes)
    else:
        places.extend(SQLitePlace(folder, size) for size in sizes)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    workloads = []
    with Progress(*columns, console=console, transient=True) as progress:
        for place in places:
            stack.callback(place.close)
            workload = Workload(place, _QUICK if quick else _FULL, quick)
            workloads.append(workload)
            library = workload.book._registry.database.library()
            header.databases[kind] = f"{library['database']} {library['version']}"
            yield from _measure_one(workload, progress)
        if len(workloads) > 1:
            yield from growth(workloads[0], workloads[-1])
    _show_plans(console, workloads[-1])


def _measure_one(workload: Workload, progress: Progress) -> Iterator[Result]:
    place = workload.place
    where = f"{place.kind}, {place.size:,} segments"
    task = progress.add_task(where, total=None)

    def filled(what: str, done: int, total: int) -> None:
        progress.update(task, description=f"{where}: filling, {what}", completed=done, total=total)

    def measuring(what: str) -> None:
        progress.update(task, description=f"{where}: {what}", completed=0, total=None)

    yield from workload.fill(filled)
    yield workload.explain()
    yield from workload.look_up(measuring)
    yield from workload.look_up_cached(measuring)
    yield from workload.write(measuring)
    progress.remove_task(task)


def _show_plans(console: Console, workload: Workload) -> None:
    wanting = unindexed(workload.plans)
    for name, plan in workload.plans.items():
        mark = "reads more than it needs" if name in wanting else "by index"
        console.print(f"{workload.place.kind}: {name} — {mark}", style="bold", highlight=False)
        console.print(plan, highlight=False, markup=False, soft_wrap=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Lakebook beside the bare driver.")
    parser.add_argument("--sizes", help=f"numbers of segments (default {_SIZES}; with --quick {_QUICK_SIZES})")
    parser.add_argument("--databases", default=f"{SQLITE},{POSTGRESQL}", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small and short: to see that it works")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: %(default)s")
    parser.add_argument("--record", type=Path, metavar="PAGE", help="put the table into this page too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

"""The results: one row per measure, a table for people and a file for machines."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"
_LIBRARIES = ("pysqlite3", "psycopg", "sqlalchemy", "orjson", "pyarrow", "pyiceberg", "pyspark", "duckdb")


@dataclass(frozen=True)
class Result:
    """One measure. `ratio` is always ours divided by peer; without a target it is only reported."""

    name: str
    database: str
    size: int
    ours: float | None
    peer: float | None
    unit: str
    #: The ratio has to be at least, or at most, this.
    at_least: float | None = None
    at_most: float | None = None
    #: Our own number has to be below this.
    below: float | None = None
    #: Where nothing is measured but something has to hold.
    holds: bool | None = None
    #: What the specification promises as an absolute number; the ratio decides.
    promised: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.ours is not None and self.peer else None

    @property
    def target(self) -> str | None:
        if self.at_least is not None:
            return f"ratio ≥ {self.at_least:g}"
        if self.at_most is not None:
            return f"ratio ≤ {self.at_most:g}"
        if self.below is not None:
            return f"ours < {self.below:g} {self.unit}"
        return "holds" if self.holds is not None else None

    @property
    def passed(self) -> bool | None:
        if self.at_least is not None:
            return self.ratio is not None and self.ratio >= self.at_least
        if self.at_most is not None:
            return self.ratio is not None and self.ratio <= self.at_most
        if self.below is not None:
            return self.ours is not None and self.ours < self.below
        return self.holds

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "database": self.database,
            "size": self.size,
            "ours": _rounded(self.ours),
            "peer": _rounded(self.peer),
            "ratio": _rounded(self.ratio),
            "unit": self.unit,
            "target": self.target,
            "pass": self.passed,
            "promised": self.promised,
        }


@dataclass
class Header:
    """On what the numbers were taken."""

    databases: dict[str, str]
    sizes: Sequence[int]
    quick: bool
    seconds: float = 0.0
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    cores: int | None = field(default_factory=os.cpu_count)
    machine: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    python: str = field(default_factory=platform.python_version)
    libraries: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in _LIBRARIES})


def write(path: Path, header: Header, results: Sequence[Result]) -> None:
    """Write the results' file."""
    content = {"header": asdict(header), "results": [result.as_json() for result in results]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def show(console: Console, results: Sequence[Result]) -> None:
    """Print the table."""
    table = Table("measure", "database")
    for heading in ("size", "ours", "peer", "ratio"):
        table.add_column(heading, justify="right")
    for heading in ("unit", "target", ""):
        table.add_column(heading)
    for result in results:
        passed = result.passed
        table.add_row(
            result.name,
            result.database,
            f"{result.size:,}",
            shown(result.ours),
            shown(result.peer),
            "" if result.ratio is None else f"{result.ratio:.2f}",
            result.unit,
            result.target or "",
            "" if passed is None else "[green]met[/]" if passed else "[red]missed[/]",
        )
    console.print(table)


def record(path: Path, header: Header, results: Sequence[Result]) -> None:
    """Put the table into a page, between its two marks."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{path} has no place for the table: it stands between {_BEGIN} and {_END}")
    path.write_text(f"{before}{begin}\n{_markdown(header, results)}{end}{after}", encoding="utf-8")


def _markdown(header: Header, results: Sequence[Result]) -> str:
    databases = ", ".join(header.databases.values())
    libraries = ", ".join(f"{name} {number}" for name, number in header.libraries.items())
    lines = [
        f"{header.at[:10]}, {header.cores} cores, {header.machine}, Python {header.python}, {databases}, {libraries};"
        f" the run took {header.seconds / 60:.0f} minutes.",
    ]
    for kind in header.databases:
        lines += ["", f"### {header.databases[kind]}", ""]
        lines += ["| measure | size | ours | peer | ratio | unit | target | |", "|---|--:|--:|--:|--:|---|---|---|"]
        for result in results:
            if result.database == kind:
                ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
                passed = {True: "met", False: "**missed**", None: ""}[result.passed]
                cells = (result.name, f"{result.size:,}", shown(result.ours), shown(result.peer), ratio, result.unit)
                lines.append(f"| {' | '.join(cells)} | {result.target or ''} | {passed} |")
    return "\n".join(lines) + "\n"


def shown(number: float | None) -> str:
    """A number with as many digits as mean something."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")

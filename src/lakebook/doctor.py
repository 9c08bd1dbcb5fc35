"""Checks of everything a book depends on, each with what to do where it is not well."""

from __future__ import annotations

import enum
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lakebook.book import Book, may_exist, open_with, warehouse_of
from lakebook.clock import Clock, SystemClock, to_datetime, to_ms
from lakebook.components.names import OWED, warnings_of
from lakebook.config import Settings, load_settings, redact
from lakebook.errors import LakebookError, WarehouseNotWritable
from lakebook.metrics import Metrics
from lakebook.registry.databases import Database, SQLite, database_for
from lakebook.registry.migrate import check_revision, revision_of
from lakebook.registry.pipelines import standing_of_all
from lakebook.registry.registry import Registry
from lakebook.registry.schedulers import active_scheduler
from lakebook.registry.topics import DELETED_TOPICS

# The oldest Java that Spark 4 runs on, and the Spark that Lakebook is tested with.
JAVA_VERSION = 17
SPARK_VERSION = "4.1"
# A clock that is set by the network is off by milliseconds.
MAX_SKEW_MS = 1000

_JAVA_SECONDS = 30
# As many of the newest events as are looked at for a time that has not come yet.
_NEWEST_EVENTS = 1000
_MOST_NAMED = 1000


class Status(enum.StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"  # it works, but not as it should, or not all of it
    FAIL = "fail"  # the book cannot be used like this


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(
    target: str | os.PathLike[str] | None = None, *, clock: Clock | None = None, named: bool = False, **settings: Any
) -> tuple[Check, ...]:
    """Look at a book and at what it needs. Nothing is created, and nothing that is wrong raises.

    With `named`, the target counts before what the environment says about registry and warehouse.
    """
    about_book = _examine_book(lambda: load_settings(target, settings, named=named), clock or SystemClock())
    return (*about_book, check_java(java_banner()), check_spark(spark_version()))


def _examine_book(load: Callable[[], Settings], clock: Clock) -> list[Check]:
    try:
        settings = loaded = load()
        database = database_for(settings)
    except LakebookError as error:
        return [_failed("settings", error)]
    registry = _guarded("registry", lambda: _check_registry(database))
    path = database.path if isinstance(database, SQLite) else None
    if registry.status is Status.FAIL and path is not None and not settings.warehouse:
        # The book cannot say where its warehouse is; then it is looked for at its usual place.
        settings = replace(settings, warehouse=str(path.parent / "warehouse"))
    warehouse = _guarded("warehouse", lambda: _check_warehouse(settings, database))
    if registry.status is Status.FAIL:
        # A server that does not answer is not asked for its version.
        library = [_check_library(database)] if isinstance(database, SQLite) else []
        return [registry, *library, warehouse]
    checks = [registry, _guarded("database", lambda: _check_library(database)), warehouse]
    try:
        with open_with(loaded, clock=clock, create=False) as book:
            checks += _examine_state(book, clock)
    except LakebookError as error:
        checks.append(_failed("book", error))
    return checks


def _examine_state(book: Book, clock: Clock) -> list[Check]:
    # A registry of its own: the checks ask for more than a book offers.
    registry = Registry(database_for(book.settings), book.settings, clock, Metrics(clock))
    try:
        gauges = book.measure().values()
        return [
            _guarded("clock", lambda: _check_clock(book, registry)),
            _check_temporary_files(gauges),
            _check_commits(gauges),
            _guarded("deletions", lambda: _check_deletions(registry)),
            _guarded("upkeep", lambda: _check_upkeep(book, registry, gauges)),
        ]
    finally:
        registry.close()


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except LakebookError as error:
        return _failed(name, error)


def _failed(name: str, error: LakebookError) -> Check:
    return Check(name, Status.FAIL, f"{error.on}: {error.what}" if error.on else error.what, error.remedy)


# --- the registry and the warehouse ----------------------------------------------


def _check_registry(database: Database) -> Check:
    revision = revision_of(database) if may_exist(database) else None
    if revision is None:
        return Check(
            "registry", Status.FAIL, f"{database.shown}: there is no book here", "Create one with `lakebook init`"
        )
    check_revision(database, revision)
    return Check("registry", Status.OK, f"{database.shown} answers, schema {revision}")


def _check_library(database: Database) -> Check:
    try:
        library = database.library()
    except database.errors as error:
        return _failed("database", database.unreachable(error))
    detail = f"{library['database']} {library['version']} ({library['driver']})"
    if library["safe"]:
        return Check("database", Status.OK, detail)
    if isinstance(database, SQLite):
        # It is not used in WAL mode, or the registry would not have been opened.
        return Check("database", Status.WARN, f"{detail} can corrupt a book in WAL mode", library["remedy"])
    return Check("database", Status.FAIL, f"{detail} is too old", library["remedy"])


def _check_warehouse(settings: Settings, database: Database) -> Check:
    warehouse = warehouse_of(settings, database)
    if warehouse.folder is not None and not warehouse.folder.is_dir():
        # The probe would make the folder, perhaps where a disk is not mounted.
        raise WarehouseNotWritable(
            "there is no such folder", on=str(warehouse.folder), remedy="Mount it, or create it with `lakebook init`"
        )
    warehouse.check_writable()
    return Check("warehouse", Status.OK, f"{redact(warehouse.root)} can be written")


# --- the state of the book ---------------------------------------------------------


def _check_clock(book: Book, registry: Registry) -> Check:
    # Asked once before: the first time takes as long as a connection does.
    if registry.database_now_ms() is None:
        return _check_newest_event(book, registry.clock.now_ms())
    before = registry.clock.now_ms()
    theirs = registry.database_now_ms()
    assert theirs is not None
    # The server read its clock somewhere between the two readings of ours.
    skew = theirs - (before + registry.clock.now_ms()) // 2
    detail = f"the server's clock differs by {abs(skew) / 1000:.3f} s"
    if abs(skew) <= MAX_SKEW_MS:
        return Check("clock", Status.OK, detail)
    return Check("clock", Status.WARN, detail, "Set both clocks by the network (NTP)")


def _check_newest_event(book: Book, now_ms: int) -> Check:
    end = book.events.now()
    batch = book.events.read(replace(end, after=max(0, end.after - _NEWEST_EVENTS)), _NEWEST_EVENTS)
    newest = max((to_ms(event.occurred_at) for event in batch.events), default=0)
    if newest <= now_ms + MAX_SKEW_MS:
        return Check("clock", Status.OK, "no event lies in the future")
    return Check(
        "clock",
        Status.WARN,
        f"the newest event is of {to_datetime(newest).isoformat()}, which is in the future",
        "Check this machine's clock, and that of whoever wrote last",
    )


def _check_temporary_files(gauges: dict[str, float]) -> Check:
    waiting, expired = int(gauges["lakebook_temporary_files"]), int(gauges["lakebook_temporary_files_expired"])
    if expired == 0:
        return Check("temporary files", Status.OK, f"{waiting} wait for their removal, none for too long")
    return Check(
        "temporary files",
        Status.WARN,
        f"the grace of {expired} of {waiting} files has passed, and they are still there",
        "Run `lakebook admin delete-expired-temp`",
    )


def _check_commits(gauges: dict[str, float]) -> Check:
    # Not a warning: a writer at work has one, and the next one settles what a dead one left.
    return Check("open commits", Status.OK, f"{int(gauges['lakebook_open_commits'])} are open")


def _check_upkeep(book: Book, registry: Registry, gauges: dict[str, float]) -> Check:
    lease_ms = round(2 * book.settings.astha_lease * 1000)
    now = registry.clock.now_ms()
    found = registry.read_with(lambda reader: active_scheduler(reader, now, lease_ms))
    # It loads Arrow, which a book that cannot be opened need not wait for.
    from lakebook.components.backlog import backlog, count_backlog, pipeline_warnings

    owed = backlog({name: int(gauges[f"lakebook_{name}"]) for name in OWED}, count_backlog(book.lake))
    warnings = warnings_of(owed, active=found is not None)
    warnings += pipeline_warnings(registry.read_with(standing_of_all), active=found is not None)
    if warnings:
        return Check("upkeep", Status.WARN, "; ".join(warnings), "See `lakebook maintenance status`")
    who = f"{found.holder} looks after the tables" if found is not None else "nobody does it, and nothing piles up"
    return Check("upkeep", Status.OK, who)


def _check_deletions(registry: Registry) -> Check:
    names = [name for _, name in registry.all(DELETED_TOPICS, _MOST_NAMED)]
    if not names:
        return Check("deletions", Status.OK, "none is unfinished")
    return Check(
        "deletions",
        Status.WARN,
        f"{len(names)} deleted topic(s) are not emptied yet: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}",
        "If no deletion is under way, finish them with `lakebook admin purge-topics`",
    )


# --- Java and Spark ----------------------------------------------------------------


def java_banner() -> str | None:
    """What `java -version` says, of the Java that Spark would take; none if there is none."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - the user's own Java, without a shell
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=_JAVA_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stderr + done.stdout


def check_java(banner: str | None) -> Check:
    """Judge what `java -version` said."""
    remedy = f"Install Java {JAVA_VERSION} or newer; only inserts and reads on Spark need it"
    if banner is None:
        return Check("java", Status.WARN, "no Java was found", remedy)
    # "1.8.0_292" until Java 8, "17.0.15" or "21" since.
    match = re.search(r'version "(?:1\.)?(\d+)[^"]*"', banner)
    if match is None:
        return Check("java", Status.WARN, "Java does not say its version", remedy)
    version = int(match[1])
    if version < JAVA_VERSION:
        return Check("java", Status.WARN, f"Java {version} is too old for Spark {SPARK_VERSION}", remedy)
    return Check("java", Status.OK, f"Java {version}")


def spark_version() -> str | None:
    """The version of PySpark that is installed; none if it is not."""
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_spark(version: str | None) -> Check:
    """Judge the version of PySpark."""
    remedy = "pip install lakebook[spark]"
    if version is None:
        return Check("spark", Status.WARN, "PySpark is not installed; only inserts and reads on Spark need it", remedy)
    if version != SPARK_VERSION and not version.startswith(f"{SPARK_VERSION}."):
        return Check("spark", Status.WARN, f"PySpark {version} is not {SPARK_VERSION}", remedy)
    return Check("spark", Status.OK, f"PySpark {version}")

"""Spark for the commands that need it: started late, quiet, and stopped when the command ends."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from lakebook.book import Book
from lakebook.cli.output import working
from lakebook.errors import SparkUnsuitable

_STDOUT, _STDERR = 1, 2
_MOST_LOG = 256 * 1024
_COMPLAINT = re.compile(r"exception|error|no such file|is not set", re.IGNORECASE)


@contextmanager
def spark_started(book: Book, *, show_log: bool) -> Iterator[Any]:
    """A Spark session for one command on a book; one that is active already is used, and left as it is."""
    session = _active()
    if session is not None:
        yield session
        return
    with _messages(shown=show_log):
        session = _start(book, show_log=show_log)
        try:
            yield session
        finally:
            session.stop()


@contextmanager
def _messages(*, shown: bool) -> Iterator[None]:
    """Keep what PySpark's Python side logs off stderr."""
    before = logging.root.manager.disable
    if not shown:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _active() -> Any:
    # Only who has loaded PySpark can have a session.
    loaded = sys.modules.get("pyspark.sql")
    return None if loaded is None else loaded.SparkSession.getActiveSession()


def _start(book: Book, *, show_log: bool) -> Any:
    from lakebook.spark.session import reason_of

    handler = signal.getsignal(signal.SIGINT)
    with tempfile.TemporaryFile() as log:
        try:
            with _output_of_java(None if show_log else log):
                session = book.spark()
            if threading.current_thread() is threading.main_thread():
                # PySpark's own handler talks to Java from inside an interrupted talk, which fails.
                signal.signal(signal.SIGINT, handler)
            return session
        except ModuleNotFoundError:
            raise SparkUnsuitable(
                "PySpark is not installed", on="Spark", remedy="Install it with `pip install 'lakebook[spark]'`"
            ) from None
        except Exception as error:
            reasons = filter(None, (reason_of(error).rstrip("."), _complaint(log)))
            raise SparkUnsuitable(
                f"it cannot be started ({': '.join(reasons)})",
                on="Spark",
                remedy="Run `lakebook doctor`, or look at all it says with --spark-log",
            ) from error


@contextmanager
def _output_of_java(log: IO[bytes] | None) -> Iterator[None]:
    """Let a Java that is started meanwhile write to a log, or to stderr: stdout is for results.

    It keeps what it is born with, so that the two streams are this process's own again afterwards.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ours = os.dup(_STDOUT), os.dup(_STDERR)
    try:
        with open(ours[1], "w", encoding="utf-8", closefd=False) as terminal, working("starting Spark", terminal):
            os.dup2(_STDERR if log is None else log.fileno(), _STDOUT)
            if log is not None:
                os.dup2(log.fileno(), _STDERR)
            yield
    finally:
        os.dup2(ours[0], _STDOUT)
        os.dup2(ours[1], _STDERR)
        for copy in ours:
            os.close(copy)


def _complaint(log: IO[bytes]) -> str:
    """The line of a log that says what went wrong: the first that looks like it, or else the last."""
    log.seek(0)
    lines = [line.strip()[:300] for line in log.read(_MOST_LOG).decode("utf-8", "replace").splitlines() if line.strip()]
    return next(filter(_COMPLAINT.search, lines), lines[-1] if lines else "")

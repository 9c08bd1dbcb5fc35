"""The session that a book starts for its upkeep: another one comes where its Spark has died."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pyspark import SparkContext

import lakebook
from failing_spark import StandIn
from lakebook import Book
from lakebook.errors import SparkUnsuitable
from lakebook.spark.session import is_alive


class Starts:
    """Stands for `Book.spark`: gives sessions one after the other."""

    def __init__(self, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[Any] = []
        # Whatever other tests of this process have left running.
        monkeypatch.setattr(SparkContext, "_active_spark_context", None)
        monkeypatch.setattr(book, "spark", self._start)

    def _start(self, master: str) -> Any:
        assert master == "local[1]"
        self.given.append(StandIn())
        return self.given[-1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Any:
    with lakebook.open(":memory:") as book:
        yield book, Starts(book, monkeypatch)


def test_a_session_is_started_once_and_another_one_when_its_spark_has_died(starts: tuple[Book, Starts]) -> None:
    book, made = starts
    with book._session_for("local[1]") as session:
        assert session is not None
        first: Any = session()
        assert [first, session()] == made.given[:1] * 2
        # The master has gone away, say: the JVM lives, and the context in it does not.
        first.is_stopped_there = True
        second: Any = session()
        assert [second, session()] == made.given[1:] * 2
        second.is_gone = True
        assert session() is made.given[2]
    # PySpark would give a dead session again: it is let go of, too.
    assert [item.stops for item in made.given] == [1, 1, 1]


def test_a_session_that_has_died_by_the_end_fails_nobody(starts: tuple[Book, Starts]) -> None:
    book, made = starts
    with book._session_for("local[1]") as session:
        assert session is not None
        session()
        made.given[0].is_gone = True
    assert made.given[0].stops == 1


def test_somebodys_session_is_neither_stopped_nor_started_anew_while_it_is_that(
    starts: tuple[Book, Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    book, made = starts
    with book._session_for("local[1]") as session:
        assert session is not None
        with monkeypatch.context() as running:
            running.setattr(SparkContext, "_active_spark_context", object())
            first: Any = session()
            first.is_gone = True
            # It would be given again, dead as it is.
            running.setattr(book, "spark", lambda master: first)
            with pytest.raises(SparkUnsuitable):
                session()
        # By now its owner has let go of it.
        assert session() is made.given[1]
    assert [item.stops for item in made.given] == [0, 1]


def test_many_who_ask_at_once_get_one_session(starts: tuple[Book, Starts]) -> None:
    book, made = starts
    with book._session_for("local[1]") as session:
        assert session is not None
        threads = [threading.Thread(target=session) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made.given) == 1


def test_only_a_session_that_answers_is_alive() -> None:
    session = StandIn()
    assert is_alive(session)
    session.is_gone = True
    assert not is_alive(session)
    assert not is_alive(None)
    assert not is_alive(object())

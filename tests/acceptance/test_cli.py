"""The command line: every command, its JSON, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import lakebook
from books import describe
from buckets import KEY, SECRET, Buckets
from lake import run_sql
from lakebook import Book, Cursor
from lakebook.book import may_exist
from lakebook.cli.main import cli
from lakebook.clock import ManualClock
from lakebook.config import load_settings
from lakebook.pages import PAGE_SIZE
from lakebook.registry.databases import database_for
from lakebook.registry.migrate import HEAD, REVISIONS, migrate_to, revision_of
from shapes import Shape, embedded

MORNING = datetime(2026, 1, 31, 8, tzinfo=UTC)


def fill(folder: Path) -> None:
    """Two topics, segments of 100 records an hour apart, and a group that has read some."""
    with lakebook.open(folder) as book:
        book.metadata.create_topic("orders", 2, retention_ms=1000, config={"user.team": "sales"})
        book.metadata.create_topic("returns")
        for number in range(3):
            time = MORNING + timedelta(hours=number)
            book.metadata.add_segment(describe("orders", 0, number * 100, min_timestamp=time, max_timestamp=time))
        book.metadata.commit_offset("billing", "orders", 0, 120)


@pytest.fixture
def folder(request: pytest.FixtureRequest, shape: Shape, tmp_path: Path) -> Iterator[Path]:
    """A home, with a book in it for those who want one."""
    place = tmp_path / "book"
    with shape.filled(fill, place) if "book" in request.fixturenames else shape.empty(place) as home:
        yield home


@pytest.fixture
def book(folder: Path) -> Iterator[Book]:
    with lakebook.open(folder) as opened:
        yield opened


class Shell:
    """Runs commands on one book."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: object, clock: ManualClock | None = None) -> Result:
        return CliRunner().invoke(cli, ["--book", str(self.folder), *map(str, words)], obj=clock)

    def text(self, *words: object, clock: ManualClock | None = None) -> str:
        result = self.run(*words, clock=clock)
        assert (result.exit_code, result.exception) == (0, None), result.output
        return result.stdout

    def json(self, *words: object) -> Any:
        return json.loads(self.text(*words, "--json"))

    def lines(self, *words: object, clock: ManualClock | None = None) -> list[Any]:
        return [json.loads(line) for line in self.text(*words, "--json", clock=clock).splitlines()]


@pytest.fixture
def shell(folder: Path) -> Shell:
    return Shell(folder)


def rows_of(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()]


# --- init --------------------------------------------------------------------------


@embedded
def test_init_creates_a_book_and_says_where(shell: Shell, folder: Path) -> None:
    assert "created a book" in (said := shell.text("init"))
    assert str(folder / "warehouse") in said
    assert (folder / "registry.db").is_file()


def test_init_of_an_existing_book_says_so_and_changes_nothing(shell: Shell, book: Book) -> None:
    assert "the book exists" in shell.text("init")
    assert shell.json("init")["book_id"] == book.identity.book_id
    assert shell.json("init")["created"] is False


@embedded
def test_init_takes_its_place_from_the_argument_before_the_option(shell: Shell, folder: Path, tmp_path: Path) -> None:
    assert shell.json("init", tmp_path / "other")["created"] is True
    assert (tmp_path / "other" / "registry.db").is_file()
    assert not folder.exists()


def test_init_takes_a_registry_url_and_a_warehouse(tmp_path: Path) -> None:
    url, warehouse = f"sqlite:///{tmp_path}/r.db", str(tmp_path / "w")
    result = CliRunner().invoke(cli, ["--warehouse", warehouse, "init", url, "--json"])
    assert json.loads(result.stdout)["warehouse"] == warehouse
    result = CliRunner().invoke(cli, ["-b", url, "--warehouse", warehouse, "topics", "list"])
    assert result.exit_code == 0


def test_init_refuses_a_book_in_memory(shell: Shell) -> None:
    assert shell.run("init", ":memory:").exit_code == 2


def test_the_book_can_come_from_the_environment(book: Book, folder: Path) -> None:
    result = CliRunner().invoke(cli, ["topics", "list", "--json"], env={"LAKEBOOK_BOOK": str(folder)})
    assert [topic["name"] for topic in json.loads(result.stdout)] == ["orders", "returns"]


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "list"],
        ["topics", "create", "orders"],
        ["groups", "list"],
        ["segments", "list", "orders", 0],
        ["events", "tail"],
        ["verify"],
        ["metrics"],
        ["migrate"],
        ["doctor"],
    ],
)
def test_no_command_but_init_creates_a_book(shell: Shell, folder: Path, words: list[object]) -> None:
    result = shell.run(*words)
    assert result.exit_code == 1
    assert "there is no book here" in result.output
    database = database_for(load_settings(folder, {}))
    assert not may_exist(database) or revision_of(database) is None
    assert not (folder / "registry.db").exists()


def test_the_version_is_printed() -> None:
    assert lakebook.__version__ in CliRunner().invoke(cli, ["--version"]).stdout


# --- topics ------------------------------------------------------------------------


def test_a_created_topic_is_in_the_list(shell: Shell, book: Book) -> None:
    said = shell.text("topics", "create", "new", "--partitions", 3, "--config", "user.a=b=c", "--retention-ms", 5)
    assert said == "created topic new with 3 partition(s)\n"
    topic = book.metadata.get_topic("new")
    assert topic is not None
    assert (topic.partition_count, topic.retention_ms, topic.config) == (3, 5, {"user.a": "b=c"})
    assert "new" in [row[0] for row in rows_of(shell.text("topics", "list"))]


def test_a_created_topic_is_printed_as_json(shell: Shell, book: Book) -> None:
    topic = shell.json("topics", "create", "new")
    assert (topic["name"], topic["partition_count"], topic["retention_ms"], topic["config"]) == ("new", 1, None, {})
    assert datetime.fromisoformat(topic["created_at"]).tzinfo is not None


def test_topics_are_listed_by_prefix_and_up_to_a_limit(shell: Shell, book: Book) -> None:
    assert [topic["name"] for topic in shell.json("topics", "list")] == ["orders", "returns"]
    assert [topic["name"] for topic in shell.json("topics", "list", "--prefix", "r")] == ["returns"]
    assert [topic["name"] for topic in shell.json("topics", "list", "--limit", 1)] == ["orders"]
    assert shell.json("topics", "list", "--prefix", "x") == []
    assert shell.run("topics", "list", "--limit", 0).exit_code == 2


def test_a_list_longer_than_a_page_is_printed_whole(shell: Shell, book: Book) -> None:
    number = PAGE_SIZE + 1
    book.metadata.add_segments([describe("returns", 0, base, 1) for base in range(number)])
    bases = [segment["base_offset"] for segment in shell.json("segments", "list", "returns", 0)]
    assert bases == list(range(number))
    assert len(shell.json("segments", "list", "returns", 0, "--limit", PAGE_SIZE)) == PAGE_SIZE


def test_a_topic_is_shown_with_its_partitions(shell: Shell, book: Book) -> None:
    book.metadata.delete_segments_before("orders", 0, 100)
    topic = shell.json("topics", "show", "orders")
    assert topic["config"] == {"user.team": "sales"}
    numbers = ("partition_id", "log_start", "high_watermark", "records", "segments", "size_bytes")
    assert [tuple(partition[name] for name in numbers) for partition in topic["partitions"]] == [
        (0, 100, 300, 200, 2, 2000),
        (1, 0, 0, 0, 0, 0),
    ]
    text = rows_of(shell.text("topics", "show", "orders"))
    assert ["user.team:", "sales"] in text
    assert ["0", "100", "300", "200", "2", "2000"] in [row[:6] for row in text]


def test_a_topic_is_shown_with_its_rates_and_its_groups(shell: Shell, book: Book) -> None:
    topic = shell.json("topics", "show", "orders")
    rates = ("records_per_second_minute", "bytes_per_second_minute", "records_per_second_hour", "bytes_per_second_hour")
    assert [topic["partitions"][0][name] for name in rates] == [5.0, 50.0, 0.083, 0.833]
    assert datetime.fromisoformat(topic["partitions"][0]["last_append_at"]).tzinfo is not None
    (group,) = topic["groups"]
    assert (group["group_id"], group["state"], group["members"], group["lag"]) == ("billing", "lagging", 0, 180)
    assert ["billing", "lagging", "0", "0", "180"] in [
        row[:5] for row in rows_of(shell.text("topics", "show", "orders"))
    ]


def test_the_configuration_is_printed_changed_and_removed(shell: Shell, book: Book) -> None:
    assert ["user.team:", "sales"] in rows_of(shell.text("topics", "config", "orders"))
    change = ["--set", "segment.ms=5", "--set", "user.a=1", "--unset", "user.team", "--keep-forever"]
    topic = shell.json("topics", "config", "orders", *change)
    assert topic["config"] == {"segment.ms": "5", "user.a": "1"}
    assert topic["retention_ms"] is None
    assert shell.json("topics", "config", "orders", "--retention-ms", 7)["retention_ms"] == 7
    assert shell.json("topics", "config", "orders")["config"] == {"segment.ms": "5", "user.a": "1"}


def test_a_topic_grows_through_its_configuration(shell: Shell, book: Book) -> None:
    assert shell.json("topics", "config", "orders", "--partitions", 4, "--set", "user.a=1")["partition_count"] == 4
    assert len(shell.json("topics", "show", "orders")["partitions"]) == 4


def test_retention_cannot_be_set_and_removed_at_once(shell: Shell, book: Book) -> None:
    result = shell.run("topics", "config", "orders", "--retention-ms", 5, "--keep-forever")
    assert result.exit_code == 2


def test_a_refused_configuration_does_not_let_the_topic_grow(shell: Shell, book: Book) -> None:
    for wrong in (["--set", "unknown=1"], ["--retention-ms", "0"]):
        assert shell.run("topics", "config", "orders", "--partitions", 9, *wrong).exit_code == 1
    assert len(book.metadata.list_partitions("orders")) == 2


def test_a_deleted_topic_is_gone_from_the_list(shell: Shell, book: Book) -> None:
    assert shell.text("topics", "delete", "orders", "--yes") == "deleted topic orders\n"
    assert [topic["name"] for topic in shell.json("topics", "list")] == ["returns"]
    assert shell.json("topics", "delete", "returns", "--yes") == {"deleted": "returns"}
    assert shell.json("topics", "list") == []


@pytest.mark.parametrize("noun", [["topics", "delete", "orders"], ["groups", "delete", "billing"]])
def test_without_a_terminal_nothing_is_deleted_unasked(shell: Shell, book: Book, noun: list[str]) -> None:
    result = shell.run(*noun)
    assert result.exit_code == 1
    assert "--yes" in result.stderr
    assert book.metadata.get_topic("orders") is not None
    assert book.metadata.get_committed_offset("billing", "orders", 0) == 120


# --- groups ------------------------------------------------------------------------


def test_groups_are_listed_with_their_lag(shell: Shell, book: Book) -> None:
    book.metadata.ensure_consumer_group("audit")
    found = shell.json("groups", "list")
    assert [(group["group_id"], group["state"], group["lag"]) for group in found] == [
        ("audit", "empty", 0),
        ("billing", "lagging", 180),
    ]
    assert found[0]["last_commit_at"] is None
    assert [group["group_id"] for group in shell.json("groups", "list", "--limit", 1)] == ["audit"]
    assert ["billing", "lagging", "0", "1", "1", "180"] in [row[:6] for row in rows_of(shell.text("groups", "list"))]


def test_a_group_is_shown_with_the_lag_of_each_partition(shell: Shell, book: Book) -> None:
    group = shell.json("groups", "show", "billing")
    assert group["lag"] == 180
    assert [(p["partition_id"], p["committed_offset"], p["lag"]) for p in group["partitions"]] == [
        (0, 120, 180),
        (1, None, 0),
    ]
    assert ["orders", "0", "120", "0", "300", "180", "lagging"] in rows_of(shell.text("groups", "show", "billing"))
    assert [p["topic"] for p in shell.json("groups", "show", "billing", "--topic", "returns")["partitions"]] == [
        "returns"
    ]


@pytest.mark.parametrize(
    ("target", "offset"),
    [
        ("earliest", 0),
        ("latest", 300),
        ("42", 42),
        ("2026-01-31T08:30:00+00:00", 100),
        ("2026-01-31T08:30:00", 100),
        ("2026-01-31T10:30:00+01:00", 200),
        ("2026-02-28", 300),
    ],
)
def test_a_group_is_reset_to_an_end_an_offset_or_a_time(shell: Shell, book: Book, target: str, offset: int) -> None:
    words = ["groups", "reset", "billing", "--topic", "orders", "--partition", 0, "--to", target, "--reason", "a test"]
    (reset,) = shell.json(*words)
    assert (reset["from_offset"], reset["to_offset"], reset["reason"]) == (120, offset, "a test")
    assert book.metadata.get_committed_offset("billing", "orders", 0) == offset


def test_a_group_is_reset_on_every_partition(shell: Shell, book: Book) -> None:
    said = rows_of(shell.text("groups", "reset", "billing", "--topic", "orders", "--to", "latest"))
    assert said[1:] == [["orders", "0", "120", "300"], ["orders", "1", "-", "0"]]


def test_a_deleted_group_is_gone_from_the_list(shell: Shell, book: Book) -> None:
    book.metadata.ensure_consumer_group("audit")
    assert shell.text("groups", "delete", "billing", "--yes") == "deleted group billing\n"
    assert shell.json("groups", "delete", "audit", "--yes") == {"deleted": "audit"}
    assert shell.json("groups", "list") == []


# --- segments ----------------------------------------------------------------------


def test_segments_are_listed_from_the_one_that_holds_an_offset(shell: Shell, book: Book) -> None:
    words = ["segments", "list", "orders", 0]
    assert [s["base_offset"] for s in shell.json(*words)] == [0, 100, 200]
    assert [s["base_offset"] for s in shell.json(*words, "--from-offset", 150)] == [100, 200]
    assert [s["base_offset"] for s in shell.json(*words, "--limit", 1)] == [0]
    assert shell.json("segments", "list", "orders", 1) == []
    assert [row[:4] for row in rows_of(shell.text(*words))[1:]] == [
        ["0", "99", "100", "1000"],
        ["100", "199", "100", "1000"],
        ["200", "299", "100", "1000"],
    ]


def test_a_segment_is_found_by_offset_and_by_time(shell: Shell, book: Book) -> None:
    words = ["segments", "find", "orders", 0]
    assert shell.json(*words, "--offset", 150)["base_offset"] == 100
    assert shell.json(*words, "--time", "2026-01-31T09:30:00Z")["base_offset"] == 200
    assert ["base", "offset:", "100"] in rows_of(shell.text(*words, "--offset", 199))


def test_a_segment_is_found_by_exactly_one_of_offset_and_time(shell: Shell, book: Book) -> None:
    assert shell.run("segments", "find", "orders", 0).exit_code == 2
    assert shell.run("segments", "find", "orders", 0, "--offset", 1, "--time", "2026-01-31").exit_code == 2


# --- events ------------------------------------------------------------------------


def test_the_events_are_printed_from_the_beginning_with_their_cursor(shell: Shell, book: Book) -> None:
    *events, last = shell.lines("events", "tail")
    assert events[0]["table"] == "topics"
    assert events[0]["row_after"]["name"] == "orders"
    assert datetime.fromisoformat(events[0]["occurred_at"]).tzinfo is not None
    assert book.events.read(Cursor.parse(last["cursor"])).events == ()
    result = shell.run("events", "tail")
    assert len(result.stdout.splitlines()) == len(events)
    assert result.stderr == f"cursor: {last['cursor']}\n"


def test_events_are_read_on_from_a_cursor(shell: Shell, book: Book) -> None:
    *first, position = shell.lines("events", "tail", "--limit", 2)
    *rest, end = shell.lines("events", "tail", "--since", position["cursor"])
    assert [event["id"] for event in first + rest] == list(range(1, len(first + rest) + 1))
    assert len(first) == 2
    assert shell.lines("events", "tail", "--since", end["cursor"]) == [end]


def test_events_of_one_table_are_limited_without_leaving_any_out(shell: Shell, book: Book) -> None:
    *everything, _ = shell.lines("events", "tail", "--table", "segments")
    *first, position = shell.lines("events", "tail", "--table", "segments", "--limit", 2)
    *rest, _ = shell.lines("events", "tail", "--table", "segments", "--since", position["cursor"])
    assert {event["table"] for event in everything} == {"segments"}
    assert first + rest == everything
    assert (len(first), len(rest)) == (2, 1)
    assert shell.run("events", "tail", "--table", "elsewhere").exit_code == 2


class Visitor(ManualClock):
    """A clock on which something happens while others sleep, and then somebody presses Ctrl-C."""

    def __init__(self, book: Book, names: list[str]) -> None:
        super().__init__()
        self._book, self._names = book, names
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if not self._names:
            raise KeyboardInterrupt
        self._book.metadata.create_topic(self._names.pop(0))


def test_following_prints_what_comes_until_it_is_interrupted(shell: Shell, book: Book) -> None:
    clock = Visitor(book, ["third", "fourth"])
    words = ["events", "tail", "--follow", "--interval", 5, "--table", "topics"]
    *events, last = shell.lines(*words, clock=clock)
    assert [event["row_after"]["name"] for event in events] == ["orders", "returns", "third", "fourth"]
    assert book.events.read(Cursor.parse(last["cursor"])).events == ()
    assert clock.slept == [5, 5, 5]


def test_following_ends_at_its_limit(shell: Shell, book: Book) -> None:
    words = ["events", "tail", "--follow", "--table", "topics", "--limit", 3]
    *events, _ = shell.lines(*words, clock=Visitor(book, ["third", "fourth"]))
    assert [event["row_after"]["name"] for event in events] == ["orders", "returns", "third"]


def test_an_event_line_says_what_changed(shell: Shell, book: Book) -> None:
    book.metadata.update_topic_config("returns", retention_ms=5)
    assert "retention_ms=null → 5" in shell.text("events", "tail").splitlines()[-1]


# --- verify, metrics, migrate ------------------------------------------------------


def test_verify_says_what_was_checked(shell: Shell, book: Book) -> None:
    said = rows_of(shell.text("verify"))
    assert ["segments", "3"] in said
    assert said[-1] == ["nothing", "is", "wrong"]
    checked = shell.json("verify")
    assert (checked["ok"], checked["findings"], checked["checked"]["topics"]) == (True, [], 2)


def test_verify_prints_findings_and_fails(shell: Shell, book: Book) -> None:
    run_sql(book, "UPDATE partitions SET high_watermark = 250 WHERE high_watermark = 300")
    result = shell.run("verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
    assert [f["check"] for f in json.loads(result.stdout)["findings"]] == ["segments", "events"]
    result = shell.run("verify")
    assert result.exit_code == 1
    assert "finding: [segments] orders/0 (topic 1): the high watermark is 250 instead of 300" in result.stdout


def test_metrics_are_printed_in_three_forms(shell: Shell, book: Book) -> None:
    assert shell.json("metrics")["lakebook_segments"] == 3
    assert ["lakebook_segments", "3"] in rows_of(shell.text("metrics"))
    assert "\nlakebook_segments 3.0\n" in shell.text("metrics", "--prometheus")
    assert shell.run("metrics", "--prometheus", "--json").exit_code == 2


def test_migrate_applies_what_is_missing_and_names_it(shell: Shell, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    database = database_for(load_settings(folder, {}))
    migrate_to(database, "0001")
    with database.engine() as engine, engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO book VALUES (1, 'book', 'epoch', 'warehouse', 1, 1)")
    outdated = shell.run("topics", "list")
    assert outdated.exit_code == 1
    assert "lakebook migrate" in outdated.stderr
    result = shell.run("migrate", "--json")
    assert json.loads(result.stdout) == {"before": "0001", "after": HEAD, "applied": list(REVISIONS[1:])}
    assert result.stderr == "".join(f"applied revision {revision}\n" for revision in REVISIONS[1:])
    assert revision_of(database) == HEAD
    assert shell.text("migrate") == f"the schema is up to date at {HEAD}\n"


# --- errors ------------------------------------------------------------------------

RESET = ["groups", "reset", "billing", "--topic", "orders", "--to"]
ERRORS = [
    ("topic_not_found", ["topics", "show", "nowhere"]),
    ("topic_not_found", ["topics", "config", "nowhere"]),
    ("topic_not_found", ["topics", "config", "nowhere", "--partitions", 5]),
    ("topic_not_found", ["topics", "delete", "nowhere", "--yes"]),
    ("topic_not_found", ["segments", "list", "nowhere", 0]),
    ("topic_not_found", ["segments", "find", "nowhere", 0, "--offset", 0]),
    ("topic_not_found", ["groups", "show", "billing", "--topic", "nowhere"]),
    ("topic_not_found", ["groups", "reset", "billing", "--topic", "nowhere", "--to", "earliest"]),
    ("topic_already_exists", ["topics", "create", "orders"]),
    ("invalid_name", ["topics", "create", "no spaces"]),
    ("invalid_name", ["topics", "create", "two\nlines"]),
    ("invalid_name", ["topics", "create", ".."]),
    ("invalid_name", ["topics", "list", "--prefix", "ö"]),
    ("invalid_name", ["groups", "show", "a/b"]),
    ("invalid_partition_count", ["topics", "create", "new", "--partitions", 0]),
    ("invalid_partition_count", ["topics", "create", "new", "--partitions", 10**9]),
    ("invalid_partition_count", ["topics", "config", "orders", "--partitions", 1]),
    ("invalid_config", ["topics", "create", "new", "--retention-ms", 0]),
    ("invalid_config", ["topics", "create", "new", "--config", "novalue"]),
    ("invalid_config", ["topics", "create", "new", "--config", "=value"]),
    ("invalid_config", ["topics", "create", "new", "--config", "unknown.key=1"]),
    ("invalid_config", ["topics", "create", "new", "--config", "segment.bytes=many"]),
    ("invalid_config", ["topics", "create", "new", "--config", "user.a=1", "--config", "user.a=2"]),
    ("invalid_config", ["topics", "config", "orders", "--set", "user.team"]),
    ("invalid_config", ["topics", "config", "orders", "--set", "user.team=a", "--unset", "user.team"]),
    ("invalid_config", ["topics", "config", "orders", "--unset", "unknown.key"]),
    ("partition_not_found", ["segments", "list", "orders", 2]),
    ("partition_not_found", ["segments", "list", "orders", 10**12]),
    ("partition_not_found", ["segments", "find", "orders", 2, "--offset", 0]),
    ("partition_not_found", [*RESET, "earliest", "--partition", 2]),
    ("group_not_found", ["groups", "show", "nobody"]),
    ("group_not_found", ["groups", "delete", "nobody", "--yes"]),
    ("group_not_found", ["groups", "reset", "nobody", "--topic", "orders", "--to", "earliest"]),
    ("negative_offset", ["segments", "find", "orders", 0, "--offset", -1]),
    ("negative_offset", ["segments", "list", "orders", 0, "--from-offset", -1]),
    ("negative_offset", [*RESET, -1]),
    ("offset_overflow", ["segments", "find", "orders", 0, "--offset", 2**63]),
    ("offset_overflow", ["segments", "list", "orders", 0, "--from-offset", 2**63]),
    ("offset_overflow", [*RESET, 2**63]),
    ("offset_beyond_watermark", [*RESET, 301, "--partition", 0]),
    ("offset_beyond_watermark", [*RESET, 100]),
    ("invalid_offset", [*RESET, "tomorrow"]),
    ("invalid_input", [*RESET, "earliest", "--reason", "x" * 5000]),
    ("invalid_input", ["segments", "find", "orders", 0, "--time", "noon"]),
    ("invalid_input", ["topics", "delete", "orders"]),
    ("not_found", ["segments", "find", "orders", 0, "--offset", 300]),
    ("not_found", ["segments", "find", "orders", 0, "--time", "2027-01-01"]),
    ("invalid_cursor", ["events", "tail", "--since", "here"]),
]


def test_a_cursor_of_another_epoch_is_refused(shell: Shell, book: Book) -> None:
    foreign = str(book.events.now()).replace(book.identity.epoch, "0" * 32)
    result = shell.run("events", "tail", "--since", foreign, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["error"] == "cursor_expired"


@pytest.fixture(scope="module")
def home(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of `untouched`."""
    with shape.filled(fill, tmp_path_factory.mktemp("untouched") / "book") as home:
        yield home


@pytest.fixture(scope="module")
def untouched(home: Path) -> Iterator[Book]:
    """A book that nobody changes: each test makes sure of that."""
    with lakebook.open(home) as opened:
        yield opened


@pytest.mark.parametrize(("code", "words"), ERRORS)
def test_bad_input_is_one_line_and_changes_nothing(home: Path, untouched: Book, code: str, words: list[object]) -> None:
    shell, book = Shell(home), untouched
    before = book.events.now()
    result = shell.run(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    result = shell.run(*words, "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert json.loads(result.stderr)["error"] == code
    assert book.events.read(before).events == ()
    assert book.metadata.get_committed_offset("billing", "orders", 0) == 120


@pytest.mark.parametrize(
    "words", [["topics", "create"], ["topics", "create", "a", "--partitions", "two"], ["groups", "reset", "billing"]]
)
def test_wrong_usage_is_told_apart_by_its_exit_code(shell: Shell, book: Book, words: list[str]) -> None:
    assert shell.run(*words).exit_code == 2


def test_a_secret_in_an_address_is_never_printed() -> None:
    url = "postgresql://me:hunter2@127.0.0.1:1/db?password=hunter3"
    for words in (["topics", "list"], ["init"], ["doctor"], ["verify", "--json"]):
        result = CliRunner().invoke(cli, ["-b", url, "--warehouse", "gs://me:hunter2@bucket/x", *words])
        assert result.exit_code == 1
        result_on_disk = CliRunner().invoke(cli, ["-b", url, "--warehouse", "warehouse", *words])
        assert result_on_disk.exit_code == 1
        assert "hunter" not in result.output + result_on_disk.output


def test_secrets_of_a_bucket_are_never_printed(
    buckets: Buckets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (buckets.settings | {"s3_session_token": "t0ken"}).items():
        monkeypatch.setenv(f"LAKEBOOK_{name.upper()}", value)
    there, gone = f"s3://{buckets.new_bucket()}/lake", "s3://no-such-bucket/lake"
    for warehouse, words, code in (
        (there, ["init"], 0),
        (there, ["doctor", "--json"], 0),
        (there, ["verify", "--json"], 0),
        (gone, ["init"], 1),
        (gone, ["doctor", "--json"], 1),
        (f"{there}?token=t0ken", ["init"], 1),
    ):
        place = tmp_path / ("there" if warehouse == there else "gone")
        result = CliRunner().invoke(cli, ["-b", str(place), "--warehouse", warehouse, *words])
        assert result.exit_code == code, result.output
        for secret in (KEY, SECRET, "t0ken"):
            assert secret not in result.output


# --- help and tables ---------------------------------------------------------------


def every_command(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(every_command(cli)), ids=lambda value: str(value))
def test_every_command_and_option_is_explained(path: tuple[str, ...], command: click.Command) -> None:
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
    if not isinstance(command, click.Group):
        assert "as_json" in [parameter.name for parameter in command.params]
    assert CliRunner().invoke(cli, [*path, "--help"]).exit_code == 0


def test_a_table_in_a_pipe_is_as_wide_as_its_values(shell: Shell, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = "/".join(["a" * 100] * 5)
    book.metadata.add_segment(describe("orders", 0, 300, s3_key=path))
    lines = shell.text("segments", "list", "orders", 0).splitlines()
    assert len(lines) == 5
    assert lines[-1].endswith(path)


def test_values_are_printed_as_they_are_and_stay_on_their_line(shell: Shell, book: Book) -> None:
    book.metadata.create_topic("odd", config={"user.a": "[red]x[/red] :smile:"})
    assert "[red]x[/red] :smile:" in shell.text("topics", "show", "odd")
    book.metadata.commit_offset("billing", "orders", 0, 121, metadata="a\x1b[2Jb\nc")
    last = shell.text("events", "tail").splitlines()[-1]
    assert "\x1b" not in last
    assert "[2Jb" in last

"""Records through the command line: produced from files and pipes, consumed alone and in groups."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import lakebook
from lakebook import Book
from lakebook.cli.main import cli
from shapes import Shape

COMMAND = [sys.executable, "-m", "lakebook.cli.main"]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def fill(folder: Path) -> None:
    with lakebook.open(folder) as book:
        book.metadata.create_topic("orders", 2)
        book.metadata.create_topic("copies")


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    with shape.filled(fill, tmp_path / "book") as home:
        yield home


@pytest.fixture
def book(folder: Path) -> Iterator[Book]:
    with lakebook.open(folder) as opened:
        yield opened


class Shell:
    """Runs commands on one book."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: object, given: bytes | str = b"") -> Result:
        return CliRunner().invoke(cli, ["--book", str(self.folder), *map(str, words)], input=given)

    def text(self, *words: object, given: bytes | str = b"") -> str:
        result = self.run(*words, given=given)
        assert (result.exit_code, result.exception) == (0, None), result.output
        return result.stdout

    def json(self, *words: object, given: bytes | str = b"") -> Any:
        return json.loads(self.text(*words, "--json", given=given))

    def records(self, *words: object) -> list[Any]:
        return [json.loads(line) for line in self.text("consume", *words, "--json").splitlines()]

    def values(self, *words: object) -> list[Any]:
        return [record["value"] for record in self.records(*words)]

    def error(self, *words: object, given: bytes | str = b"") -> Any:
        result = self.run(*words, "--json", given=given)
        assert result.exit_code == 1
        return json.loads(result.stderr)


@pytest.fixture
def shell(folder: Path, book: Book) -> Shell:
    return Shell(folder)


def parts(records: list[Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(record[name] for name in names) for record in records]


# --- produce -----------------------------------------------------------------------


def test_lines_become_values_and_where_they_are_is_told(shell: Shell) -> None:
    done = shell.json("produce", "copies", given="one\r\ntwo\n\nlast")
    stored = {"partition_id": 0, "records": 4, "first_offset": 0, "last_offset": 3}
    assert (done["records"], done["bytes"], done["skipped"], done["interrupted"]) == (4, 10, 0, False)
    assert done["partitions"] == [stored]
    assert shell.values("copies") == ["one", "two", "", "last"]
    said = shell.text("produce", "copies", given="five\n").splitlines()
    assert said[0] == "stored 1 record(s) of 4 bytes in copies"
    assert said[-1].split() == ["0", "1", "4", "4"]


def test_nothing_to_send_is_no_mistake(shell: Shell) -> None:
    assert shell.json("produce", "copies")["records"] == 0


def test_a_line_can_have_a_key_and_any_bytes(shell: Shell) -> None:
    shell.text("produce", "orders", "--key-separator", "::", "--header", "from=shop", given=b"k::a::b\n\xff::\xfe\n")
    found = {record.get("key"): record for record in shell.records("orders")}
    assert found["k"]["value"] == "a::b"
    assert found["k"]["headers"] == [{"key": "from", "value": "shop"}]
    assert (found[None]["key_base64"], found[None]["value_base64"]) == ("/w==", "/g==")


def test_what_consume_prints_is_what_produce_takes(shell: Shell, book: Book) -> None:
    with book.producer("orders") as producer:
        producer.send(b"\xff\x00", "key", headers=[("h", None), ("h", b"\xfe"), ("t", "text")], timestamp=NOON)
        producer.send(None, b"\xff", timestamp=NOON)
        producer.send('{"a": 1}', partition=1, timestamp=NOON)
    lines = shell.text("consume", "orders", "--format", "json")
    shell.text("produce", "copies", "--format", "json", "--partition", 0, given=lines)
    with book.consumer("orders") as given, book.consumer("copies") as copied:
        wanted = [(record.key, record.value, record.headers, record.timestamp) for record in given.until_end()]
        found = [(record.key, record.value, record.headers, record.timestamp) for record in copied.until_end()]
    assert sorted(found, key=repr) == sorted(wanted, key=repr)
    assert len(found) == 3


def test_objects_of_ones_own_are_sent_whole_or_by_their_fields(shell: Shell) -> None:
    lines = '{"id": 7, "at": "2026-01-31T12:00:00Z", "note": "Łask"}\n\n{"id": 8, "at": 1769860800000, "note": null}\n'
    shell.text("produce", "copies", "--format", "json", "--key-field", "id", "--timestamp-field", "at", given=lines)
    found = shell.records("copies")
    assert parts(found, "key", "timestamp") == [("7", NOON.isoformat()), ("8", NOON.isoformat())]
    assert json.loads(found[0]["value"]) == {"id": 7, "at": "2026-01-31T12:00:00Z", "note": "Łask"}
    shell.text("produce", "copies", "--format", "json", "--value-field", "note", given=lines)
    assert shell.values("copies", "--from", 2) == ["Łask", None]


def test_rows_of_csv_become_objects_or_cells(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.write_bytes(b'\xef\xbb\xbfid,item\n1,"a pen,\nblue"\n2,ink\n')
    shell.text("produce", "copies", file, "--key-field", "id")
    found = shell.records("copies")
    assert parts(found, "key") == [("1",), ("2",)]
    assert json.loads(found[0]["value"]) == {"id": "1", "item": "a pen,\nblue"}
    shell.text("produce", "copies", file, "--value-field", "item")
    assert shell.values("copies", "--from", 2) == ["a pen,\nblue", "ink"]


def test_rows_of_parquet_are_sent_as_arrow(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.parquet"
    names = pa.array(["a", "b", None])
    times = pa.array([NOON] * 3, pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"id": names, "value": pa.array([b"1", b"2", b"3"]), "timestamp": times}), file)
    done = shell.json("produce", "orders", file, "--key-field", "id", "--partition", 1, "--header", "a=b")
    assert (done["records"], done["bytes"]) == (3, 5)
    assert done["partitions"] == [{"partition_id": 1, "records": 3, "first_offset": 0, "last_offset": 2}]
    found = shell.records("orders")
    assert parts(found, "key", "value", "timestamp") == [
        ("a", "1", NOON.isoformat()),
        ("b", "2", NOON.isoformat()),
        (None, "3", NOON.isoformat()),
    ]
    assert found[0]["headers"] == [{"key": "a", "value": "b"}]
    shell.text("produce", "copies", "--format", "parquet", "--value-field", "id", given=file.read_bytes())
    assert shell.values("copies") == ["a", "b", None]


def test_times_of_parquet_may_be_milliseconds(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.parquet"
    pq.write_table(pa.table({"value": ["x"], "at": [int(NOON.timestamp() * 1000)]}), file)
    shell.text("produce", "copies", file, "--timestamp-field", "at")
    assert parts(shell.records("copies"), "timestamp") == [(NOON.isoformat(),)]


BAD = [
    ("lines", ["--key-separator", ":"], "a:1\nno key\nb:2\n", "line 2", 1),
    ("json", [], '{"value": "1"}\n{"value"\n', "line 2", 1),
    ("json", [], '{"value": "1"}\n\n[1]\n', "line 3", 1),
    ("json", [], '{"value": "1"}\n{"id": 1}\n', "line 2", 1),
    ("json", [], '{"value_base64": "?"}\n', "line 1", 0),
    ("json", [], '{"headers": 1}\n', "line 1", 0),
    ("json", [], '{"partition": "1"}\n', "line 1", 0),
    ("json", [], '{"value": "1", "partition": 9}\n', "line 1", 0),
    ("json", [], '{"timestamp": "noon"}\n', "line 1", 0),
    ("json", [], '{"timestamp": 99999999999999999}\n', "line 1", 0),
    ("json", ["--key-field", "id"], '{"id": 1}\n{"no": 1}\n', "line 2", 1),
    ("csv", [], "a,b\n1,2\n1,2,3\n", "line 3", 1),
    ("csv", [], b"a,b\n1,2\n1,\xff\n", "line 3", 1),
]


@pytest.mark.parametrize(("form", "options", "given", "where", "before"), BAD)
def test_a_bad_line_is_named_and_what_came_before_it_is_stored(
    shell: Shell, form: str, options: list[str], given: str | bytes, where: str, before: int
) -> None:
    words = ["produce", "copies", "--format", form, *options, "--json"]
    result = shell.run(*words, given=given)
    assert result.exit_code == 1
    assert json.loads(result.stderr)["on"] == where
    assert (json.loads(result.stdout)["records"] if before else result.stdout) == (before or "")
    assert len(shell.records("copies")) == before


def test_bad_lines_can_be_skipped_and_are_counted(shell: Shell) -> None:
    words = ["produce", "copies", "--key-separator", ":", "--skip-bad"]
    result = shell.run(*words, "--json", given="a:1\nbad\nworse\nb:2\n")
    assert result.exit_code == 0
    assert (json.loads(result.stdout)["records"], json.loads(result.stdout)["skipped"]) == (2, 2)
    assert "line 2" in result.stderr
    assert "skipped 1 line(s)" in shell.run(*words, given="bad\n").stderr


def test_a_record_that_is_too_large_is_a_bad_line(shell: Shell, book: Book) -> None:
    book.metadata.update_topic_config("copies", {"max.message.bytes": "5"})
    assert shell.error("produce", "copies", given="small\nfar too large\n")["on"] == "line 2"
    assert shell.values("copies") == ["small"]


ERRORS = [
    ("topic_not_found", ["produce", "nowhere"]),
    ("topic_not_found", ["consume", "nowhere"]),
    ("invalid_input", ["produce", "copies", "no-such-file"]),
    ("invalid_input", ["produce", "copies", "--format", "parquet"]),
    ("invalid_input", ["produce", "copies", "--header", "novalue"]),
    ("invalid_input", ["produce", "copies", "--format", "csv", "--key-field", "x"]),
    ("invalid_name", ["produce", "copies", "--producer-id", "ö"]),
    ("partition_not_found", ["consume", "copies", "--partition", 1]),
    ("invalid_input", ["consume", "copies", "--from", "noon"]),
    ("invalid_input", ["consume", "copies", "--until", "noon"]),
    ("offset_overflow", ["consume", "copies", "--from", 2**63]),
    ("offset_beyond_watermark", ["consume", "copies", "--from", 1]),
    ("invalid_name", ["consume", "copies", "--group", "a b"]),
    ("invalid_input", ["consume", "copies", "--group", "new", "--from", "committed"]),
    ("group_not_found", ["groups", "members", "nobody"]),
]


@pytest.mark.parametrize(("code", "words"), ERRORS)
def test_what_cannot_be_done_is_one_line_on_stderr(shell: Shell, code: str, words: list[object]) -> None:
    assert shell.error(*words)["error"] == code
    result = shell.run(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["produce", "copies", "--key-field", "id"],
        ["produce", "copies", "--format", "csv", "--key-separator", ":"],
        ["produce", "copies", "--key-separator", ""],
        ["produce", "copies", "--partition", "-1"],
        ["consume", "copies", "--follow", "--until", "end"],
        ["consume", "copies", "--from", "committed"],
        ["consume", "copies", "--max", "0"],
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(shell: Shell, words: list[str]) -> None:
    assert shell.run(*words).exit_code == 2


def test_a_producers_id_fences_whoever_had_it(shell: Shell, book: Book) -> None:
    shell.text("produce", "copies", "--producer-id", "till-7", given="one\n")
    (segment,) = book.metadata.get_segments("copies", 0)
    assert (segment.producer_id, segment.producer_epoch, segment.first_sequence) == ("till-7", 0, 0)
    assert book.metadata.register_producer("till-7") == 1


def test_the_compression_can_be_chosen(shell: Shell, book: Book) -> None:
    shell.text("produce", "copies", "--compression", "none", given="one\n")
    (segment,) = book.metadata.get_segments("copies", 0)
    stored = pq.read_metadata(io.BytesIO(book.lake.store.read(segment.s3_key)))
    assert stored.row_group(0).column(0).compression == "UNCOMPRESSED"


# --- consume -----------------------------------------------------------------------


@pytest.fixture
def filled(book: Book) -> Book:
    """Ten records an hour apart, in one partition."""
    with book.producer("copies") as producer:
        for number in range(10):
            producer.send(f"v{number}", f"k{number}", timestamp=NOON.replace(hour=number))
    return book


@pytest.mark.parametrize(
    ("options", "first", "end"),
    [
        ([], 0, 10),
        (["--from", "earliest", "--max", 3], 0, 3),
        (["--from", "latest"], 10, 10),
        (["--from", 4, "--until", 6], 4, 6),
        (["--from", 4, "--until", 99], 4, 10),
        (["--until", 0], 0, 0),
        (["--from", "2026-01-31T03:30:00Z"], 4, 10),
        (["--from", "2026-01-31T03:00:00", "--until", "2026-01-31T05:00:00"], 3, 5),
        (["--until", "end", "--partition", 0], 0, 10),
        (["--follow", "--until", 7], 0, 7),
        (["--follow", "--until", "2026-01-31T08:00:00"], 0, 8),
        (["--follow", "--max", 2], 0, 2),
    ],
)
def test_records_are_printed_from_and_until(
    shell: Shell, filled: Book, options: list[object], first: int, end: int
) -> None:
    assert shell.values("copies", *options) == [f"v{number}" for number in range(first, end)]


def test_a_record_is_printed_in_four_forms(shell: Shell, book: Book) -> None:
    with book.producer("copies") as producer:
        producer.send("a\nb\x1b[2J", "k\t", headers={"h": "v"}, timestamp=NOON)
        producer.send(None, b"\xff", timestamp=NOON)
    moment = "2026-01-31T12:00:00.000+00:00"
    assert shell.text("consume", "copies").splitlines() == [
        f"0/0\t{moment}\tk\\t\ta\\nb\\x1b[2J\th=v",
        f"0/1\t{moment}\t\\xff\t-",
    ]
    assert shell.run("consume", "copies", "--format", "value").stdout_bytes == b"a\nb\x1b[2J\n\n"
    assert shell.text("consume", "copies", "--format", "hex").splitlines() == [
        "0/0\t6b09\t610a621b5b324a",
        "0/1\tff\t-",
    ]
    assert [record["offset"] for record in shell.records("copies", "--format", "json")] == [0, 1]
    assert shell.run("consume", "copies").stderr == "2 record(s)\n"


def test_a_group_goes_on_behind_what_was_printed(shell: Shell, filled: Book) -> None:
    assert shell.values("copies", "--group", "g", "--max", 3) == ["v0", "v1", "v2"]
    assert filled.metadata.get_committed_offset("g", "copies", 0) == 3
    assert shell.values("copies", "--group", "g", "--until", 5) == ["v3", "v4"]
    assert shell.values("copies", "--group", "g", "--from", "committed", "--max", 1, "--no-commit") == ["v5"]
    assert shell.values("copies", "--group", "g", "--from", "latest", "--partition", 0) == [
        f"v{number}" for number in range(5, 10)
    ]
    assert filled.metadata.get_committed_offset("g", "copies", 0) == 10
    assert filled.metadata.group_members("g") == []


def test_the_members_of_a_group_are_shown_with_what_they_read(shell: Shell, book: Book) -> None:
    with book.producer("orders") as producer:
        producer.send("one", partition=1)
    with book.consumer("orders", group="g") as consumer:
        assert [record.value for record in consumer.poll(30)] == [b"one"]
        (member,) = shell.json("groups", "members", "g")
        assert member["partitions"] == [["orders", 0], ["orders", 1]]
        assert shell.json("groups", "show", "g")["members"] == [member]
        assert shell.json("topics", "show", "orders")["groups"][0]["members"] == 1
        row = [member["member_id"], "orders/0", "orders/1"]
        for words in (["groups", "members", "g"], ["groups", "show", "g"]):
            assert row in [line.split()[:3] for line in shell.text(*words).splitlines()]
    assert shell.json("groups", "members", "g") == []
    assert shell.json("groups", "show", "g")["members"] == []


def test_records_that_are_gone_are_an_error_or_skipped(shell: Shell, filled: Book) -> None:
    with filled.producer("copies") as producer:
        producer.send("v10")
    filled.metadata.delete_segments_before("copies", 0, 10)
    assert shell.error("consume", "copies", "--from", 4)["error"] == "offset_below_log_start"
    result = shell.run("consume", "copies", "--from", 4, "--reset", "earliest", "--json")
    assert [json.loads(line)["value"] for line in result.stdout.splitlines()] == ["v10"]


# --- as processes ------------------------------------------------------------------


def started(folder: Path, *words: object, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "-b", str(folder), *map(str, words)],
        stdin=more.get("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=more.get("stderr", subprocess.PIPE),
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_producer_stores_what_it_has_read(shell: Shell, book: Book, number: signal.Signals) -> None:
    process = started(shell.folder, "produce", "copies", "--json", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("one\ntwo\nhalf a li")
    process.stdin.flush()
    with book.consumer("copies") as consumer:
        # What was read is stored while the command waits for more.
        found = [next(records) for records in [iter(consumer)] for _ in range(2)]
    assert [record.value for record in found] == [b"one", b"two"]
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
    assert (json.loads(said)["records"], json.loads(said)["interrupted"]) == (2, True)
    assert shell.values("copies") == ["one", "two"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_member_leaves_and_has_committed_what_it_printed(
    shell: Shell, book: Book, number: signal.Signals
) -> None:
    process = started(shell.folder, "consume", "copies", "--group", "g", "--follow", "--json")
    assert process.stdout is not None
    with book.producer("copies") as producer:
        for value in ("one", "two"):
            producer.send(value).result(60)
            assert json.loads(process.stdout.readline())["value"] == value
    assert len(book.metadata.group_members("g")) == 1
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "", "")
    assert book.metadata.group_members("g") == []
    assert book.metadata.get_committed_offset("g", "copies", 0) == 2


def test_a_reader_that_leaves_early_ends_the_consumer_quietly(shell: Shell, book: Book) -> None:
    with book.producer("copies") as producer:
        # Far more than a pipe holds.
        producer.send_table(pa.table({"value": ["x" * 1000] * 5000}))
    process = started(shell.folder, "consume", "copies", "--group", "g", "--format", "value")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=60)
    assert book.metadata.group_members("g") == []
    committed = book.metadata.get_committed_offset("g", "copies", 0)
    assert committed is not None
    assert committed < 5000


def test_on_a_terminal_a_bar_shows_how_far_it_is(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("line\n" * 3000, encoding="utf-8")
    ours, theirs = pty.openpty()
    process = started(shell.folder, "produce", "copies", file, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # The other end is closed: how Linux says that a terminal is gone.
    os.close(ours)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said.splitlines()[0]) == (0, "stored 3000 record(s) of 12000 bytes in copies")
    assert b"records" in shown

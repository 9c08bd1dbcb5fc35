"""The command line as a process of its own: exit codes, pipes, terminals and signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lakebook
from shapes import Shape

COMMAND = [sys.executable, "-m", "lakebook.cli.main"]


def lakebook_command(*words: object, book: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        env={**os.environ, "LAKEBOOK_BOOK": str(book), **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def fill(folder: Path) -> None:
    with lakebook.open(folder) as book:
        book.metadata.create_topic("orders")


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    with shape.filled(fill, tmp_path / "book") as home:
        yield home


def test_a_book_lives_from_init_to_verify(shape: Shape, tmp_path: Path) -> None:
    with shape.empty(tmp_path / "new") as book:
        for words in (["init"], ["topics", "create", "orders"], ["topics", "list"], ["verify"], ["migrate"]):
            done = lakebook_command(*words, book=book)
            assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(lakebook_command("topics", "list", "--json", book=book).stdout)[0]["name"] == "orders"


def test_the_book_is_the_current_folder_unless_it_is_named(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBOOK_")}
    done = subprocess.run([*COMMAND, "topics", "list"], cwd=folder, env=environment, capture_output=True, check=True)
    assert b"orders" in done.stdout


def test_an_error_is_one_line_on_stderr_without_a_traceback(folder: Path) -> None:
    done = lakebook_command("topics", "show", "nowhere", book=folder)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == ("error: topic: there is no topic 'nowhere'. `lakebook topics list` shows which there are\n")
    assert lakebook_command("topics", "show", book=folder).returncode == 2


def test_names_that_the_encoding_lacks_do_not_stop_the_output(folder: Path) -> None:
    with lakebook.open(folder) as book:
        book.metadata.update_topic_config("orders", {"user.city": "Łask"})
    done = lakebook_command("topics", "show", "orders", book=folder, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert "\\u0141ask" in done.stdout


def test_a_reader_that_leaves_early_is_no_error_to_speak_of(folder: Path) -> None:
    with lakebook.open(folder) as book:
        # Far more than a pipe holds.
        book.metadata.create_topic("wide", 2000)
    for words in (["topics", "show", "wide"], ["topics", "show", "wide", "--json"], ["events", "tail", "--json"]):
        process = subprocess.Popen(
            [*COMMAND, "-b", str(folder), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        process.wait(timeout=60)


def test_following_ends_cleanly_on_an_interrupt(folder: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "-b", str(folder), "events", "tail", "--follow", "--interval", "0.01", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["table"] == "topics"
    assert json.loads(process.stdout.readline())["table"] == "partitions"
    with lakebook.open(folder) as book:
        book.metadata.create_topic("later")
    last = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert last[0]["row_after"]["name"] == "later"
    assert last[1]["table"] == "partitions"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    with lakebook.open(folder) as book:
        left = book.events.read(lakebook.Cursor.parse(json.loads(rest)["cursor"])).events
    # Nothing is skipped; what it had just told may come again if it was interrupted before it noted that.
    assert [event.id for event in left] in ([], [event["id"] for event in last])


@pytest.mark.parametrize(("answer", "gone"), [("n", False), ("y", True)])
def test_a_terminal_is_asked_before_a_topic_is_deleted(folder: Path, answer: str, gone: bool) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "-b", str(folder), "topics", "delete", "orders"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(ours, f"{answer}\n".encode())
    _, errors = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert "Delete topic orders with its 1 partition(s)?" in errors
    assert process.returncode == (0 if gone else 1)
    with lakebook.open(folder) as book:
        assert (book.metadata.get_topic("orders") is None) is gone

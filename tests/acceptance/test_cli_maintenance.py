"""Looking after tables from the command line: `run`, `maintenance`, and dead letters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lakebook
from lake import insert, numbers
from lakebook.cli.main import cli
from lakebook.components.names import COMPONENTS
from lakebook.lake.compaction import claimed
from lakebook.registry.commits import owner
from lakebook.registry.deliveries import park
from lakebook.registry.maintenance import list_requests, note_work
from lakebook.registry.owed import begin_updates, fail_updates
from lakebook.registry.pipelines import STOPPED, set_state
from shapes import Shape
from streaming import produce

PATIENCE = 60.0


def fill(folder: Path) -> None:
    """Two tables of which nothing is published."""
    with lakebook.open(folder, publish="off") as book:
        orders = numbers(book, "orders", [1, 2])
        insert(orders, {"id": 3})
        numbers(book, "visits", [4])


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    with shape.filled(fill, tmp_path / "book") as home:
        yield home


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["--book", str(folder), *words])


def printed(folder: Path, *words: str, code: int = 0) -> str:
    result = run(folder, *words)
    assert result.exit_code == code, result.output
    return result.stdout


def parsed(folder: Path, *words: str, code: int = 0) -> Any:
    return json.loads(printed(folder, *words, "--json", code=code))


@pytest.fixture
def daemon(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, spark: bool = False) -> subprocess.Popen[str]:
        given = options if spark else ("--no-spark", *options)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "lakebook.cli.main", "--book", str(folder), "run", *given],
                env={**os.environ, "LAKEBOOK_ASTHA_LEASE": "1", "LAKEBOOK_PUBLISH_LAG": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def until(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None, process.stderr and process.stderr.read()


def published(folder: Path, name: str) -> bool:
    described = parsed(folder, "tables", "describe", name)
    return bool(described["published_version"] == described["version"])


# --- the daemon ------------------------------------------------------------------


def test_a_daemon_publishes_what_others_write_and_ends_cleanly(
    folder: Path, daemon: Callable[..., subprocess.Popen[str]]
) -> None:
    process = daemon()
    until(lambda: published(folder, "orders") and published(folder, "visits"), process)
    with lakebook.open(folder, publish="off") as book:
        insert(book.table("orders"), {"id": 9})
    until(lambda: published(folder, "orders"), process)
    status = parsed(folder, "maintenance", "status")
    assert status["active"]
    assert {item["name"]: item["behind"] for item in status["subscribers"]}.keys() >= {"iceberg_updater", "compactor"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert process.stderr is not None
    assert "stopped" in process.stderr.read()
    after = parsed(folder, "maintenance", "status")
    assert (after["active"], after["holder"]) == (False, None)
    history = parsed(folder, "maintenance", "history", "--component", "iceberg_updater")
    assert {(item["action"], item["outcome"]) for item in history} == {("publish", "done")}


def test_a_second_daemon_waits_and_takes_over_when_the_first_is_killed(
    folder: Path, daemon: Callable[..., subprocess.Popen[str]]
) -> None:
    first = daemon()
    until(lambda: parsed(folder, "maintenance", "status")["active"], first)
    holder = parsed(folder, "maintenance", "status")["holder"]
    second = daemon()
    first.kill()
    first.wait(PATIENCE)
    until(lambda: parsed(folder, "maintenance", "status")["holder"] not in (holder, None), second)
    with lakebook.open(folder, publish="off") as book:
        insert(book.table("visits"), {"id": 9})
    until(lambda: published(folder, "visits"), second)
    second.send_signal(signal.SIGINT)
    assert second.wait(PATIENCE) == 0


def test_one_component_alone_can_be_run(folder: Path, daemon: Callable[..., subprocess.Popen[str]]) -> None:
    process = daemon("--only", "orchestrator")
    until(lambda: parsed(folder, "maintenance", "status", code=0)["owed"]["owed_updates"] > 0, process)
    assert not published(folder, "orders")


@pytest.mark.parametrize(("spark", "working"), [(True, ["compactor"]), (False, [])])
def test_a_daemon_that_waits_says_what_it_does_meanwhile(
    folder: Path, daemon: Callable[..., subprocess.Popen[str]], spark: bool, working: list[str]
) -> None:
    with lakebook.open(folder) as book, book.running(spark=None, components=("orchestrator",)) as upkeep:
        assert upkeep.wait_active(PATIENCE)
        # There is nothing that is worth a compaction: Spark is not started.
        process = daemon("--json", "--only", "compactor", "--only", "orchestrator", spark=spark)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"state": "waiting", "components": working}
    assert json.loads(process.stdout.readline()) == {"state": "active", "components": ["compactor", "orchestrator"]}
    process.send_signal(signal.SIGTERM)
    assert [json.loads(line) for line in process.stdout] == [{"state": "stopping"}, {"state": "stopped"}]
    assert process.wait(PATIENCE) == 0


def test_a_worker_works_beside_whoever_has_the_turn(folder: Path, daemon: Callable[..., subprocess.Popen[str]]) -> None:
    # There is nothing that is worth a compaction: Spark is not started.
    process = daemon("--json", "--worker", spark=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {
        "state": "working",
        "components": ["pipelines", "compactor", "views"],
    }
    assert parsed(folder, "maintenance", "status")["holder"] is None
    process.send_signal(signal.SIGTERM)
    assert [json.loads(line) for line in process.stdout] == [{"state": "stopping"}, {"state": "stopped"}]
    assert process.wait(PATIENCE) == 0
    assert "would do nothing" in run(folder, "run", "--worker", "--no-spark").stderr


# --- status and rounds -----------------------------------------------------------


def test_status_says_what_stands_and_what_waits(folder: Path) -> None:
    status = parsed(folder, "maintenance", "status")
    assert (status["active"], status["warnings"]) == (False, [])
    assert status["owed"]["unpublished_versions"] == 5
    text = printed(folder, "maintenance", "status")
    assert "running:           no" in text
    assert "unpublished versions: 5" in text
    assert "iceberg_updater" in text


def test_status_says_who_compacts_what(folder: Path) -> None:
    with lakebook.open(folder) as book, claimed(book.lake, book.table("orders").record):
        (shown,) = parsed(folder, "maintenance", "status")["compactions"]
        assert (shown["table"], shown["holder"], shown["alive"]) == ("default.orders", owner(), True)
        text = printed(folder, "maintenance", "status")
        assert re.search(rf"default\.orders +{re.escape(owner())} .* yes", text)
        assert "compacted now" in text
    assert parsed(folder, "maintenance", "status")["compactions"] == []
    assert "compacted now" not in printed(folder, "maintenance", "status")


def test_status_and_doctor_warn_when_work_piles_up_and_no_daemon_runs(folder: Path) -> None:
    with lakebook.open(folder, publish="off") as book:
        for number in range(100):
            insert(book.table("orders"), {"id": number})
    result = run(folder, "maintenance", "status")
    assert result.exit_code == 1
    piled = "105 versions are not published, 102 small files are worth a compaction"
    assert f"nobody looks after the tables, and {piled}: start `lakebook run`" in result.stderr
    checks = {check["name"]: check for check in json.loads(run(folder, "doctor", "--json").stdout)["checks"]}
    assert checks["upkeep"]["status"] == "warn"
    assert piled in checks["upkeep"]["detail"]


def test_status_and_doctor_warn_of_a_pipeline_that_has_stopped(folder: Path) -> None:
    with lakebook.open(folder, publish="off") as book:
        book.topics.create("clicks")
        produce(book, "clicks", 0, 1, 2)
        pipeline = book.pipelines.create("p", into="orders", topics="clicks", decoder="json")
        stopped = "a record does not fit"
        book._registry.write(lambda transaction: set_state(transaction, pipeline.listed.id, "p", STOPPED, stopped))
    result = run(folder, "maintenance", "status", "--json")
    status = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (status["owed"]["stopped_pipelines"], status["owed"]["pipeline_lag"]) == (1, 2)
    (warning,) = status["warnings"]
    assert warning.startswith(f"pipeline p has stopped, and 2 records wait: {stopped}")
    checks = {check["name"]: check for check in json.loads(run(folder, "doctor", "--json").stdout)["checks"]}
    assert (checks["upkeep"]["status"], checks["upkeep"]["detail"]) == ("warn", warning)


def test_what_is_owed_is_printed_with_the_reason_why_it_could_not_be_published(folder: Path) -> None:
    printed(folder, "maintenance", "run", "orchestrator")
    assert [(item["table"], item["version"]) for item in parsed(folder, "maintenance", "owed", "visits")] == [
        ("default.visits", 0),
        ("default.visits", 1),
    ]
    with lakebook.open(folder, publish="off") as book:
        visits = book.table("visits").id
        book._registry.write(lambda transaction: begin_updates(transaction, visits, 1))
        book._registry.write(lambda transaction: fail_updates(transaction, visits, 1, "the disk is full"))
    text = printed(folder, "maintenance", "owed", "--state", "failed")
    assert "default.visits" in text
    assert "the disk is full" in text
    assert "default.orders" not in text
    printed(folder, "tables", "publish", "--all")
    assert parsed(folder, "maintenance", "owed") == []
    assert len(parsed(folder, "maintenance", "owed", "--state", "all")) == 5
    assert run(folder, "maintenance", "owed", "--namespace", "default").exit_code == 2


def test_history_and_dead_letters_name_their_tables(folder: Path, letter: int) -> None:
    with lakebook.open(folder, publish="off") as book:
        orders = book.table("orders").id
        book._registry.write(
            lambda transaction: note_work(transaction, "compactor", orders, "compact", "why", "done", {}, 1)
        )
    assert "default.orders" in printed(folder, "maintenance", "history")
    assert parsed(folder, "maintenance", "history")[0]["table"] == "default.orders"
    assert "table default.orders" in printed(folder, "events", "dead-letters", "list")
    assert "table default.orders" in printed(folder, "events", "dead-letters", "show", str(letter))
    assert printed(folder, "events", "dead-letters", "redrive", str(letter)) == (
        "compactor will take table default.orders anew\n"
    )
    assert "asked of" in printed(folder, "maintenance", "status", code=1)


def test_a_round_by_hand_publishes_and_says_so(folder: Path) -> None:
    done = parsed(folder, "maintenance", "run", "--no-spark")
    assert done.keys() == set(COMPONENTS)
    assert sorted(done["iceberg_updater"]["published"]) == ["default.orders", "default.visits"]
    assert published(folder, "orders")


def test_a_round_can_be_of_one_component_and_one_table(folder: Path) -> None:
    done = parsed(folder, "maintenance", "run", "iceberg_updater", "--table", "orders")
    assert done == {"iceberg_updater": {"published": ["default.orders"], "failed": []}}
    assert not published(folder, "visits")


def test_an_unknown_component_or_table_is_refused(folder: Path) -> None:
    assert run(folder, "maintenance", "run", "gardener").exit_code == 2
    assert run(folder, "maintenance", "pause", "gardener").exit_code == 2
    result = run(folder, "maintenance", "pause", "compactor", "--table", "nowhere")
    assert result.exit_code == 1
    assert "nowhere" in result.stderr


# --- pauses ----------------------------------------------------------------------


def test_a_paused_component_is_named_with_its_reason_until_it_is_resumed(folder: Path) -> None:
    printed(folder, "maintenance", "pause", "compactor", "--table", "orders", "--reason", "a backfill")
    status = parsed(folder, "maintenance", "status", code=1)
    (pause,) = status["pauses"]
    assert (pause["component"], pause["reason"]) == ("compactor", "a backfill")
    assert any("compactor is paused on table" in warning for warning in status["warnings"])
    assert parsed(folder, "maintenance", "resume", "compactor", "--table", "orders") == {"resumed": True}
    assert parsed(folder, "maintenance", "resume", "compactor", "--table", "orders") == {"resumed": False}
    assert parsed(folder, "maintenance", "status", code=1)["pauses"] == []  # Its refresh waits for a daemon.


def test_what_was_paused_is_not_published_until_it_goes_on(
    folder: Path, daemon: Callable[..., subprocess.Popen[str]]
) -> None:
    printed(folder, "maintenance", "pause", "iceberg_updater", "--table", "orders")
    process = daemon()
    until(lambda: published(folder, "visits"), process)
    assert not published(folder, "orders")
    printed(folder, "maintenance", "resume", "iceberg_updater", "--table", "orders")
    until(lambda: published(folder, "orders"), process)


# --- dead letters ----------------------------------------------------------------


@pytest.fixture
def letter(folder: Path) -> int:
    with lakebook.open(folder, publish="off") as book:
        event = book.events.read(book.events.beginning(), 1).events[0]
        book._registry.write(lambda transaction: park(transaction, "compactor", event, 30, "ValueError: no\nway"))
        return book.dead_letters().items[0].id


def test_dead_letters_are_listed_and_shown(folder: Path, letter: int) -> None:
    (listed,) = parsed(folder, "events", "dead-letters", "list")
    assert (listed["id"], listed["subscriber"], listed["attempts"]) == (letter, "compactor", 30)
    text = printed(folder, "events", "dead-letters", "list")
    assert "ValueError: no\\nway" in text  # On one line, whatever the error has in it.
    shown = parsed(folder, "events", "dead-letters", "show", str(letter))
    assert shown["event"]["table"] == listed["event"]["table"]
    assert "compactor" in printed(folder, "events", "dead-letters", "show", str(letter))


def test_a_redrive_asks_for_a_refresh_of_the_object(folder: Path, letter: int) -> None:
    done = parsed(folder, "events", "dead-letters", "redrive", str(letter))
    assert done["redriven_at"] is not None
    with lakebook.open(folder) as book:
        (request,) = book._registry.read_with(list_requests)
        assert (request.kind, request.component, request.object_id) == (
            "refresh",
            "compactor",
            done["event"]["object_id"],
        )
    assert parsed(folder, "maintenance", "status", code=1)["owed"]["dead_letters"] == 0


def test_a_dead_letter_that_is_not_there_is_an_error(folder: Path) -> None:
    result = run(folder, "events", "dead-letters", "show", "7", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"] == "dead_letter_not_found"

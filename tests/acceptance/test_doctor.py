"""What the doctor finds, and that it never falls ill itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lakebook
from books import Postgres, describe
from lake import run_sql
from lakebook import failpoints
from lakebook.cli.main import cli
from lakebook.clock import ManualClock
from lakebook.config import load_settings
from lakebook.doctor import Check, Status, check_java, check_spark, examine, java_banner, spark_version
from lakebook.registry.databases import database_for
from lakebook.registry.migrate import HEAD, migrate_to
from shapes import EMBEDDED, SCALED, Shape, embedded

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
DAY_MS = 86_400_000


def fill(folder: Path) -> None:
    with lakebook.open(folder) as book:
        book.metadata.create_topic("orders")


@pytest.fixture
def folder(shape: Shape, tmp_path: Path) -> Iterator[Path]:
    with shape.filled(fill, tmp_path / "book") as home:
        yield home


def found(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_book_is_well_in_everything_that_is_ours(shape: Shape, folder: Path) -> None:
    checks = found(examine(folder))
    ours = ["registry", "database", "warehouse", "clock", "temporary files", "open commits", "deletions", "upkeep"]
    assert list(checks) == [*ours, "java", "spark"]
    assert {checks[name].status for name in ours} == {OK}
    assert HEAD in checks["registry"].detail
    assert {EMBEDDED: "SQLite 3.", SCALED: "PostgreSQL 1"}[shape.name] in checks["database"].detail


def test_the_exit_code_tells_whether_a_check_failed(folder: Path, tmp_path: Path) -> None:
    well = CliRunner().invoke(cli, ["-b", str(folder), "doctor", "--json"])
    assert well.exit_code == 0
    assert json.loads(well.stdout)["ok"] is True
    ill = CliRunner().invoke(cli, ["-b", str(tmp_path / "nowhere"), "doctor", "--json"])
    assert ill.exit_code == 1
    assert json.loads(ill.stdout)["checks"][0]["status"] == "fail"
    table = CliRunner().invoke(cli, ["-b", str(folder), "doctor"]).stdout.splitlines()
    assert table[0].split() == ["check", "status", "detail", "remedy"]
    assert table[1].split()[:2] == ["registry", "ok"]


def test_a_missing_book_is_found_and_not_created(tmp_path: Path) -> None:
    checks = found(examine(tmp_path / "nowhere"))
    assert checks["registry"].status is FAIL
    assert "lakebook init" in checks["registry"].remedy
    assert checks["warehouse"].status is FAIL
    assert not (tmp_path / "nowhere").exists()


def test_a_registry_that_does_not_answer_is_found() -> None:
    checks = found(examine("postgresql://me:hunter2@127.0.0.1:1/db", warehouse="/sys"))
    assert checks["registry"].status is FAIL
    assert "cannot be reached" in checks["registry"].detail
    assert "hunter2" not in str(checks)
    assert "clock" not in checks


@embedded
def test_a_damaged_registry_is_found(folder: Path) -> None:
    (folder / "registry.db").write_bytes(b"no database" * 1000)
    checks = found(examine(folder))
    assert checks["registry"].status is FAIL
    assert checks["warehouse"].status is OK


def test_an_outdated_registry_is_found_with_its_remedy(tmp_path: Path) -> None:
    migrate_to(database_for(load_settings(tmp_path, {})), "0001")
    check = found(examine(tmp_path))["registry"]
    assert check.status is FAIL
    assert "0001" in check.detail
    assert "lakebook migrate" in check.remedy


def test_a_registry_of_a_newer_version_is_found(folder: Path) -> None:
    with lakebook.open(folder) as book:
        run_sql(book, "UPDATE schema_version SET version_num = '9999'")
    check = found(examine(folder))["registry"]
    assert check.status is FAIL
    assert "newer" in check.detail


def test_a_registry_without_a_book_in_it_is_found(tmp_path: Path) -> None:
    database = database_for(load_settings(tmp_path, {}))
    database.connect().close()
    assert found(examine(tmp_path))["registry"].status is FAIL
    migrate_to(database, HEAD)
    assert found(examine(tmp_path))["book"].status is FAIL


def test_wrong_settings_are_found(tmp_path: Path) -> None:
    (tmp_path / "lakebook.toml").write_text("connections = 'many'")
    checks = examine(tmp_path)
    assert [check.name for check in checks] == ["settings", "java", "spark"]
    assert checks[0].status is FAIL
    assert found(examine(tmp_path / "x", warehouse="gs://bucket"))["warehouse"].status is FAIL


@pytest.mark.parametrize(
    ("check", "given"),
    [
        ("warehouse", {"s3_endpoint": "http://[::1"}),
        ("warehouse", {"s3_endpoint": "http://host:99999999"}),
        ("warehouse", {"s3_access_key_id": "k\n", "s3_secret_access_key": "hunter2"}),
        ("warehouse", {"warehouse": "s3://[bucket/lake"}),
        ("warehouse", {"warehouse": "S3://bucket/lake"}),
        ("warehouse", {"warehouse": "s3://b cket/lake", "s3_access_key_id": "k", "s3_secret_access_key": "hunter2"}),
        ("settings", {"s3_request_seconds": 1e300}),
        ("settings", {"s3_retry_seconds": 1e300}),
    ],
)
def test_wrong_settings_of_a_bucket_are_found(tmp_path: Path, check: str, given: dict[str, Any]) -> None:
    checks = found(examine(tmp_path / "book", **{"warehouse": "s3://bucket/lake", **given}))
    assert checks[check].status is FAIL
    assert "hunter2" not in str(checks)
    assert found(examine("foo://[x", **given))["settings"].status is FAIL


@embedded
def test_a_warehouse_that_is_gone_is_found_and_not_made_anew(folder: Path) -> None:
    (folder / "warehouse").rmdir()
    assert found(examine(folder))["warehouse"].status is FAIL
    assert not (folder / "warehouse").exists()


@embedded
def test_a_warehouse_that_cannot_be_written_is_found(folder: Path) -> None:
    # Nobody, not even root, makes files in /sys.
    checks = found(examine(folder, warehouse="/sys"))
    assert checks["warehouse"].status is FAIL
    assert checks["registry"].status is OK
    assert "this book's warehouse is" in checks["book"].detail


def test_an_event_of_the_future_is_warned_of(tmp_path: Path) -> None:
    tomorrow = ManualClock(time.time_ns() // 1_000_000 + DAY_MS)
    with lakebook.open(tmp_path, clock=tomorrow) as book:
        book.metadata.create_topic("orders")
    assert found(examine(tmp_path))["clock"].status is WARN
    assert found(examine(tmp_path, clock=tomorrow))["clock"].status is OK


def test_files_whose_grace_has_passed_are_warned_of(folder: Path) -> None:
    with lakebook.open(folder, temporary_file_grace=0) as book:
        book.metadata.add_segments([describe("orders"), describe("orders", base=100)])
        book.metadata.delete_topic("orders")
    check = found(examine(folder))["temporary files"]
    assert check.status is WARN
    assert "2 of 2" in check.detail


def test_a_deletion_that_stopped_half_way_is_warned_of(folder: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with lakebook.open(folder) as book:
        with failpoints.armed("topic.hidden", stop), pytest.raises(KeyboardInterrupt):
            book.metadata.delete_topic("orders")
        check = found(examine(folder))["deletions"]
        assert check.status is WARN
        assert "orders" in check.detail
        book.metadata.purge_deleted_topics()
    assert found(examine(folder))["deletions"].status is OK


def test_the_clock_of_a_server_is_compared_with_ours(postgres: Postgres, postgres_url: str) -> None:
    checks = found(examine(postgres_url, warehouse=postgres.warehouse))
    assert (checks["registry"].status, checks["database"].status, checks["clock"].status) == (OK, OK, OK)
    assert "PostgreSQL" in checks["database"].detail
    slow = ManualClock(time.time_ns() // 1_000_000 - DAY_MS)
    check = found(examine(postgres_url, warehouse=postgres.warehouse, clock=slow))["clock"]
    assert check.status is WARN
    assert "86400" in check.detail


def test_an_empty_database_on_a_server_is_no_book(postgres: Postgres) -> None:
    url = postgres.new_database(with_book=False)
    check = found(examine(url, warehouse=postgres.warehouse))["registry"]
    assert check.status is FAIL
    assert "there is no book here" in check.detail
    postgres.drop(url)


@pytest.mark.parametrize(
    ("banner", "status", "detail"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', OK, "Java 17"),
        ('openjdk version "21" 2023-09-19', OK, "Java 21"),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\njava version "25-ea" 2025-09-16', OK, "Java 25"),
        ('java version "1.8.0_292"', WARN, "Java 8 is too old"),
        ('openjdk version "11.0.2" 2019-01-15', WARN, "Java 11 is too old"),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", WARN, "does not say"),
        (None, WARN, "no Java"),
    ],
)
def test_java_is_judged_by_what_it_says(banner: str | None, status: Status, detail: str) -> None:
    check = check_java(banner)
    assert check.status is status
    assert detail in check.detail


def test_java_is_asked_where_spark_would_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'openjdk version \"99\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert check_java(java_banner()).detail == "Java 99"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert java_banner() is None
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java_banner() is None


@pytest.mark.parametrize(
    ("version", "status"), [("4.1.4", OK), ("4.1.0.dev1", OK), ("4.10.0", WARN), ("3.5.1", WARN), (None, WARN)]
)
def test_spark_is_judged_by_its_version(version: str | None, status: Status) -> None:
    check = check_spark(version)
    assert check.status is status
    assert (check.remedy == "pip install lakebook[spark]") is (status is WARN)


def test_the_installed_spark_is_found() -> None:
    assert check_spark(spark_version()).status is OK

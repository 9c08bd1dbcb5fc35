"""Settings come from keywords, the environment and a file, and never show a secret."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import lakebook
from lakebook.config import Settings, load_settings, redact
from lakebook.errors import InvalidSetting, RegistryUnavailable
from lakebook.registry.databases import PostgreSQL


def test_a_folder_is_a_book_with_its_own_warehouse(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {}, {})
    assert settings.registry == f"sqlite:///{tmp_path}/registry.db"
    assert settings.warehouse == ""
    with lakebook.open(tmp_path) as book:
        assert book.settings.warehouse == str(tmp_path / "warehouse")


def test_keywords_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "lakebook.toml").write_text("cache_staleness = 1.5\nappend_turn = 7\nconnections = 3\n")
    environment = {"LAKEBOOK_APPEND_TURN": "8", "LAKEBOOK_CONNECTIONS": "4", "OTHER": "x"}
    settings = load_settings(tmp_path, {"connections": 5}, environment)
    assert (settings.cache_staleness, settings.append_turn, settings.connections) == (1.5, 8.0, 5)


def test_a_file_can_name_registry_and_warehouse(tmp_path: Path) -> None:
    (tmp_path / "lakebook.toml").write_text('registry = "postgresql://db/lake"\nwarehouse = "data"\n')
    settings = load_settings(tmp_path, {}, {})
    assert settings.registry == "postgresql://db/lake"
    assert settings.warehouse == str(tmp_path / "data")


@pytest.mark.parametrize("target", ["book", None])
def test_the_driver_may_be_named_wherever_an_address_stands(target: str | None) -> None:
    given = {"registry": "postgresql+psycopg://db/lake", "listen_registry": "postgresql+psycopg://direct/lake"}
    settings = load_settings(target, given, {})
    assert (settings.registry, settings.listen_registry) == ("postgresql://db/lake", "postgresql://direct/lake")


def test_without_a_target_the_registry_may_be_a_folder() -> None:
    settings = load_settings(None, {"registry": "book"}, {})
    assert settings.registry == load_settings("book", {}, {}).registry


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("cache_segments = 0\n")
    assert load_settings(":memory:", {}, {"LAKEBOOK_CONFIG": str(file)}).cache_segments == 0
    with pytest.raises(InvalidSetting):
        load_settings(":memory:", {}, {"LAKEBOOK_CONFIG": str(tmp_path / "none.toml")})


def test_without_a_target_the_environment_names_the_book() -> None:
    environment = {"LAKEBOOK_REGISTRY": "postgresql://db/lake", "LAKEBOOK_WAREHOUSE": "s3://bucket/lake"}
    settings = load_settings(None, {}, environment)
    assert (settings.registry, settings.warehouse) == ("postgresql://db/lake", "s3://bucket/lake")
    with pytest.raises(InvalidSetting, match="no book was given"):
        load_settings(None, {}, {})


def test_a_place_that_is_named_is_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # What is said here is about a book of this folder, and of the file that the environment names about its own.
    (tmp_path / "lakebook.toml").write_text('warehouse = "here"\nconnections = 3\n')
    (tmp_path / "other.toml").write_text('registry = "postgresql://db/other"\nwarehouse = "other"\nconnections = 4\n')
    environment = {
        "LAKEBOOK_REGISTRY": "postgresql://db/lake",
        "LAKEBOOK_LISTEN_REGISTRY": "postgresql://direct/lake",
        "LAKEBOOK_WAREHOUSE": "s3://bucket/lake",
        "LAKEBOOK_S3_REGION": "eu-north-1",
    }
    for more, connections in ({}, 3), ({"LAKEBOOK_CONFIG": "other.toml"}, 4):
        url = load_settings("postgresql://db/named", {}, {**environment, **more}, named=True)
        assert (url.registry, url.warehouse, url.listen_registry) == ("postgresql://db/named", "", "")
        assert (url.s3_region, url.connections) == ("eu-north-1", connections)
        folder = load_settings("named", {"warehouse": "bytes"}, {**environment, **more}, named=True)
        assert (folder.registry, folder.warehouse) == ("sqlite:///named/registry.db", "bytes")


def test_the_file_in_its_folder_says_where_a_named_place_is(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('registry = "postgresql://db/other"\n')
    (tmp_path / "lakebook.toml").write_text('registry = "postgresql://db/own"\nwarehouse = "data"\n')
    environment = {"LAKEBOOK_REGISTRY": "postgresql://db/lake", "LAKEBOOK_WAREHOUSE": "s3://bucket/lake"}
    for more in {}, {"LAKEBOOK_CONFIG": str(tmp_path / "other.toml")}:
        settings = load_settings(tmp_path, {}, {**environment, **more}, named=True)
        assert (settings.registry, settings.warehouse) == ("postgresql://db/own", str(tmp_path / "data"))


def test_a_folder_of_a_program_is_outgrown_by_settings_alone() -> None:
    environment = {"LAKEBOOK_REGISTRY": "postgresql://db/lake", "LAKEBOOK_WAREHOUSE": "s3://bucket/lake"}
    settings = load_settings("my-book", {}, environment)
    assert (settings.registry, settings.warehouse) == ("postgresql://db/lake", "s3://bucket/lake")


@pytest.mark.parametrize(
    ("exported", "warehouse", "listening"),
    [
        ({}, "s3://bucket/lake", "postgresql://direct/lake"),
        (
            {"LAKEBOOK_REGISTRY": "postgresql+psycopg://me:s3cret@db/lake"},
            "s3://bucket/lake",
            "postgresql://direct/lake",
        ),
        ({"LAKEBOOK_REGISTRY": "postgresql://db/other"}, "", ""),
        ({"LAKEBOOK_REGISTRY": "my-book"}, "", ""),
    ],
)
def test_what_is_exported_for_one_registry_does_not_count_for_the_address_of_another(
    exported: dict[str, str], warehouse: str, listening: str
) -> None:
    environment = {"LAKEBOOK_WAREHOUSE": "s3://bucket/lake", "LAKEBOOK_LISTEN_REGISTRY": "postgresql://direct/lake"}
    settings = load_settings("postgresql://db/lake", {}, {**environment, **exported})
    assert settings.registry == "postgresql://db/lake"
    assert (settings.warehouse, settings.listen_registry) == (warehouse, listening)
    given = load_settings("postgresql://db/lake", {"warehouse": "data"}, {**environment, **exported})
    assert given.warehouse == "data"


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("book", {"no_such_setting": 1}),
        ("book", {"cache_staleness": -1}),
        ("book", {"cache_staleness": float("nan")}),
        ("book", {"cache_staleness": float("inf")}),
        ("book", {"cache_staleness": "soon"}),
        ("book", {"cache_segments": 1.5j}),
        ("book", {"connections": 0}),
        ("book", {"connections": True}),
        ("book", {"registry": 7}),
        ("", {}),
        ("a\0b", {}),
        ("mysql://host/db", {}),
        ("sqlite://", {}),
        ("sqlite:///:memory:", {}),
        ("book", {"registry": "mysql://host/db"}),
        ("book", {"registry": "some/folder"}),
        ("book", {"registry": "sqlite://"}),
        ("book", {"listen_registry": "mysql://host/db"}),
        ("foo://[x", {}),
        ("foo://me:s3cret@[x", {}),
        ("sqlite:///a\0b", {}),
        ("book", {"registry": "postgresql://me:s3cret@host/a\0b"}),
        ("book", {"s3_request_seconds": 1e300}),
        ("book", {"s3_request_seconds": 86_401}),
        ("book", {"s3_retry_seconds": 1e300}),
    ],
    ids=repr,
)
def test_settings_that_cannot_be_are_refused(target: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load_settings(target, given, {})
    assert "s3cret" not in str(caught.value)


def test_a_setting_may_be_as_large_as_its_range() -> None:
    settings = load_settings("book", {"s3_request_seconds": 86_400, "s3_retry_seconds": "86400"}, {})
    assert (settings.s3_request_seconds, settings.s3_retry_seconds) == (86_400, 86_400)
    with pytest.raises(InvalidSetting, match=r"At least 0\.1 and at most 86400"):
        load_settings("book", {"s3_request_seconds": 1e6}, {})


def test_a_folder_may_be_called_as_no_address_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings("//[x", {}, {}).registry == "sqlite://///[x/registry.db"


@pytest.mark.parametrize("warehouse", ["S3://bucket/lake", " s3://bucket/lake", "s3://[bucket/lake"])
def test_a_warehouse_that_no_later_use_would_find_makes_no_book(tmp_path: Path, warehouse: str) -> None:
    with pytest.raises(InvalidSetting, match="s3://"):
        lakebook.open(tmp_path / "book", warehouse=warehouse)
    assert not (tmp_path / "book").exists()


@pytest.mark.parametrize("content", ["x", "cache_staleness = 'soon'", "unknown = 1", "[registry]\nurl = 'x'"])
def test_a_file_that_is_wrong_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "lakebook.toml").write_text(content)
    with pytest.raises(InvalidSetting, match=r"lakebook\.toml"):
        load_settings(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:s3cret@host:5432/db?sslmode=require", "postgresql://user:***@host:5432/db"),
        ("postgresql://user:p@ss:w@host/db", "postgresql://user:***@host/db"),
        ("postgresql://host/db?password=s3cret", "postgresql://host/db"),
        ("s3://bucket/lake", "s3://bucket/lake"),
        ("/plain/folder", "/plain/folder"),
        ("postgresql://user:p/ss?word@host/db", "postgresql://user:***@host/db"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("no (https://me:s3cret@a/b), nor https://me:s3cret@c", "no (https://me:***@a/b), nor https://me:***@c"),
        ("host=db password=s3cret", "host=db password=***"),
        ("host=db PASSWORD = s3cret", "host=db PASSWORD = ***"),
        ("sqlite:///host=db password='s3 cret'/x", "sqlite:///host=db password=***/x"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_settings_show_no_secret() -> None:
    settings = Settings(registry="postgresql://user:s3cret@host/db", warehouse="x")
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in str(settings)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:s3cret@127.0.0.1:1/db?connect_timeout=1",
        "postgresql://user:s3cret@127.0.0.1:1/db?nonsense=s3cret",
        "postgresql://user:s3cret@[::1/db",
        # Signs that nobody has quoted: what follows them is taken for a host, a port or a name.
        "postgresql://user:half@s3cret@127.0.0.1:1/db",
        "postgresql://user:s3cret/half@127.0.0.1:1/db",
        "postgresql://user:s3cret?half@127.0.0.1:1/db?connect_timeout=1",
    ],
)
def test_a_registry_out_of_reach_is_said_without_the_password(url: str, tmp_path: Path) -> None:
    with pytest.raises((RegistryUnavailable, InvalidSetting)) as caught:
        lakebook.open(url, warehouse=str(tmp_path))
    told = "".join(str(part) for part in (caught.value, caught.value.as_dict(), repr(caught.value)))
    assert "s3cret" not in told
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://user:s3cret@/db?host=/one&host=/two", "`host` more than once"),
        ("postgresql://user:s3cret@/db?host=/one,/two&port=1,2,3", "not as many"),
        ("postgresql://user:s3cret@one,two/db?hostaddr=127.0.0.1", "not as many"),
        ("postgresql://user:s3cret@one,two/db?target_session_attrs=standby", "takes no writes"),
        ("postgresql://user:s3cret@one/db?target_session_attrs=read-only", "takes no writes"),
        ("postgresql://user:s3cret@one,two/db?target_session_attrs=anything", "takes no writes"),
    ],
)
def test_an_address_of_several_servers_that_means_something_else_is_refused(
    address: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=said) as caught:
        lakebook.open(address, warehouse=str(tmp_path))
    assert "s3cret" not in str(caught.value)
    with pytest.raises(InvalidSetting, match=said):
        PostgreSQL(Settings(registry="postgresql://db", warehouse="x", listen_registry=address)).connect_to_listen()

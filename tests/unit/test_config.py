"""Settings come from keywords, the environment and a file, and never show a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lakebook
from lakebook.config import Settings, load_settings, redact
from lakebook.errors import InvalidSetting, RegistryUnavailable


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
    ],
    ids=repr,
)
def test_settings_that_cannot_be_are_refused(target: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        load_settings(target, given, {})


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
        ("host=db password=s3cret", "host=db password=***"),
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
    ],
)
def test_a_registry_out_of_reach_is_said_without_the_password(url: str, tmp_path: Path) -> None:
    with pytest.raises((RegistryUnavailable, InvalidSetting)) as caught:
        lakebook.open(url, warehouse=str(tmp_path))
    told = "".join(str(part) for part in (caught.value, caught.value.as_dict(), repr(caught.value)))
    assert "s3cret" not in told

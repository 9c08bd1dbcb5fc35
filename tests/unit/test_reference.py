"""The reference says what the code is: nothing public is missing, nothing is out of date."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import click
import pytest

import lakebook
from lakebook import errors, failpoints
from lakebook.cli.main import cli
from lakebook.config import Settings
from lakebook.registry import schema
from lakebook.registry.events import EventLog

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_reference", ROOT / "docs" / "build_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def test_the_reference_is_up_to_date(builder: ModuleType) -> None:
    for name, text in builder.pages().items():
        assert page(name) == text, f"docs/reference/{name} is out of date: run `make docs`"


def test_every_public_name_and_method_is_in_the_reference() -> None:
    text = page("api.md")
    for name in lakebook.__all__:
        assert f"`{name}`" in text or f"`lakebook.{name}`" in text, name
    for owner in (lakebook.Book, lakebook.MetadataStore, EventLog):
        for name, _ in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_"):
                assert f"`{owner.__name__}.{name}`" in text, name


def test_every_error_setting_and_table_is_in_the_reference() -> None:
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.LakebookError):
            assert f"`{name}`" in page("errors.md")
    for name in Settings.__dataclass_fields__:
        assert f"`{name}`" in page("settings.md")
    for name, table in schema.metadata.tables.items():
        assert f"## `{name}`" in page("schema.md")
        assert table.comment


def commands(command: click.Command, path: str) -> list[str]:
    if not isinstance(command, click.Group):
        return [path]
    return [found for name, child in command.commands.items() for found in commands(child, f"{path} {name}")]


def test_every_command_is_in_the_reference_and_every_option_has_a_help_text() -> None:
    text = page("commands.md")
    found = commands(cli, "lakebook")
    assert len(found) > 15
    for path in found:
        assert f"`{path}`" in text, path

    def check(command: click.Command) -> None:
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (command.name, parameter.name)
        if isinstance(command, click.Group):
            for child in command.commands.values():
                check(child)

    check(cli)


def test_every_failpoint_stands_in_the_code_once() -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    for point in failpoints.POINTS:
        assert source.count(f'reach("{point}")') == 1, point
    assert source.count("failpoints.reach(") == len(failpoints.POINTS)

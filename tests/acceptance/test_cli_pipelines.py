"""`lakebook pipelines`, without Spark where it is not needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lakebook
from lakebook.cli.main import cli
from shapes import Shape
from streaming import produce


def fill(folder: Path) -> None:
    with lakebook.open(folder, publish="off") as book:
        book.topics.create("clicks")
        produce(book, "clicks", 0, *[json.dumps({"id": number}) for number in range(5)])
        book.tables.create("t", "id BIGINT NOT NULL")


@pytest.fixture
def target(shape: Shape, tmp_path: Path) -> Iterator[str]:
    with shape.filled(fill, tmp_path / "book") as home:
        yield str(home)


def run(target: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--book", target, "pipelines", *arguments], catch_exceptions=False)


def read(target: str, *arguments: str) -> Any:
    done = run(target, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


CREATE = ("create", "p", "--from", "clicks", "--into", "t", "--decoder", "json", "--no-check")


def test_a_pipeline_is_made_listed_shown_paused_and_deleted(target: str) -> None:
    assert "5 record(s) behind" in run(target, *CREATE).stdout
    (listed,) = read(target, "list")
    assert (listed["name"], listed["state"], listed["lag"]) == ("p", "active", 5)
    assert "clicks" in run(target, "list").stdout
    shown = read(target, "show", "p")
    assert shown["sources"][0]["next"] == 0 and shown["last_batches"] == []
    assert "transformation" in run(target, "show", "p").stdout
    assert read(target, "pause", "p")["state"] == "paused"
    assert read(target, "show", "p")["state"] == "paused"
    assert read(target, "resume", "p")["state"] == "active"
    assert run(target, "delete", "p").exit_code == 1
    assert read(target, "delete", "p", "--yes") == {"deleted": "p"}
    assert read(target, "list") == []


def test_what_is_wrong_is_one_line_and_exit_code_one(target: str) -> None:
    for arguments in (("show", "none"), ("create", "p", "--from", "none", "--into", "t", "--no-check")):
        done = run(target, *arguments)
        assert done.exit_code == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    run(target, *CREATE)
    assert "pipeline_already_exists" in run(target, *CREATE, "--json").stderr


def test_pipelines_are_declared_in_the_configuration_file(target: str) -> None:
    file = Path(target) / "lakebook.toml"
    place = file.read_text()
    file.write_text(place + '[pipelines.declared]\nfrom = "clicks"\ninto = "t"\ndecoder = "json"\ninterval = 5.0\n')
    assert read(target, "apply", "--no-check") == {"created": ["declared"], "unchanged": []}
    assert read(target, "apply", "--no-check") == {"created": [], "unchanged": ["declared"]}
    assert read(target, "show", "declared")["definition"]["interval"] == 5.0
    file.write_text(place + '[pipelines.wrong]\nfrom = "clicks"\ninto = "t"\ndecodr = "json"\n')
    assert "decodr" in run(target, "apply", "--no-check").stderr
    file.write_text(place + "pipelines = 3\n")
    assert "[pipelines.NAME]" in run(target, "apply", "--no-check").stderr


AVRO = '{"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}'


def test_schemas_by_their_ids_come_from_files_and_from_the_configuration_file(target: str, tmp_path: Path) -> None:
    schema = tmp_path / "r.avsc"
    schema.write_text(AVRO)
    create = ("create", "p", "--from", "clicks", "--into", "t", "--no-check", "--decoder", "avro")
    read(target, *create, "--header", "confluent", "--schema-of", f"3={schema}", "--schema-of", f"12={schema}")
    definition = read(target, "show", "p")["definition"]
    assert (definition["header"], definition["schemas"]) == ("confluent", {"3": AVRO, "12": AVRO})
    assert "avro, confluent header" in run(target, "show", "p").stdout
    for wrong in ("3", f"3={tmp_path}/none"):
        assert run(target, *create, "--header", "confluent", "--schema-of", wrong).exit_code == 2
    assert "header" in run(target, *create, "--schema-of", f"3={schema}").stderr
    declared = f"""[pipelines.declared]
from = "clicks"
into = "t"
decoder = "avro"
header = "confluent"

[pipelines.declared.schemas]
7 = '''{AVRO}'''
"""
    with (Path(target) / "lakebook.toml").open("a") as file:
        file.write(declared)
    assert read(target, "apply", "--no-check")["created"] == ["declared"]
    assert read(target, "show", "declared")["definition"]["schema"] == AVRO


def test_a_pipeline_is_altered(target: str) -> None:
    run(target, *CREATE)
    changed = read(target, "alter", "p", "--no-check", "--interval", "2", "--bad-records", "dead_letter", "--evolve")
    assert (changed["definition"]["interval"], changed["definition"]["evolve"]) == (2.0, True)
    assert changed["dead_letters"] == "default.t_dead_letters"
    changed = read(target, "alter", "p", "--no-check", "--no-interval", "--sql", "SELECT id FROM source", "--no-evolve")
    assert (changed["definition"]["interval"], changed["definition"]["sql"]) == (None, "SELECT id FROM source")
    assert read(target, "alter", "p", "--no-check", "--function", "m:f")["definition"]["sql"] is None
    assert (
        "altered pipeline p, which is active" in run(target, "alter", "p", "--no-check", "--batch-records", "5").stdout
    )
    assert run(target, "alter", "p", "--no-check").exit_code == 2
    assert "error: " in run(target, "alter", "none", "--no-check", "--interval", "1").stderr

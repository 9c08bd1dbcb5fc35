"""The same program in a folder, and on PostgreSQL, a bucket and a cluster: the settings alone differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from books import Postgres
from buckets import Buckets
from extent import EVERYWHERE
from secret_search import Secret, Text, objects_of, places_of, rows_of
from shapes import CLUSTER

HERE = Path(__file__).parent
PROGRAM = HERE / "whole_book.py"


def without_lakebook(folder: Path) -> Path:
    """A Python for executors that has the libraries, and not Lakebook."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "paths = os.environ.get('PYTHONPATH', '').split(os.pathsep)\n"
        "kept = [path for path in paths if path and not os.path.isdir(os.path.join(path, 'lakebook'))]\n"
        f"os.environ['PYTHONPATH'] = os.pathsep.join([*kept, {sysconfig.get_path('purelib')!r}])\n"
        # Without the files by which an environment is made longer: one of them leads to the sources.
        "os.execv(sys.executable, [sys.executable, '-S', *sys.argv[1:]])\n"
    )
    program.chmod(0o755)
    assert subprocess.run([program, "-c", "import lakebook"], capture_output=True, check=False).returncode == 1
    return program


def run(folder: Path, python: Path | str, **settings: str) -> tuple[dict[str, Any], str]:
    """What the program tells, and all that it and its Spark wrote."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBOOK_", "AWS_"))}
    paths = [str(HERE.parent), str(HERE.parents[1] / "demo"), environment.get("PYTHONPATH", "")]
    environment |= {f"LAKEBOOK_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), "all" if EVERYWHERE else "much"],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYSPARK_PYTHON": str(python)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    written = done.stdout + done.stderr
    assert done.returncode == 0, written[-6000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), written


def seen(folder: Path, written: str, url: str, buckets: Buckets, bucket: str) -> Iterator[Text]:
    """All that a secret could be in, wherever the program has had anything to do with it."""
    yield "output", written
    for file in (folder / "seen").rglob("*"):
        if file.is_file():
            name = str(file.relative_to(folder / "seen"))
            yield name.partition("/")[0], file.read_bytes()
    yield from rows_of(url)
    yield from objects_of(buckets, bucket)


#: Where the word is that was planted, each by how the name of the place begins and ends.
PLANTED_IN = [
    ("log", ""),
    ("settings of Spark", ""),
    ("page environment", ""),
    ("page -environment", ""),
    ("page -sql", ""),
    ("events", ""),
    ("backup", ""),
    ("rows of events", ""),
    ("rows of table_metadata", ""),
    ("rows of file_column_stats", ""),
    ("object lake/data/", ".parquet"),
    ("object lake/iceberg/", ".metadata.json"),
    ("object lake/iceberg/", "-m0.avro"),
    ("object lake/topics/", ".parquet"),
    ("object lake/checkpoints/", ""),
]


@pytest.mark.timeout(900)
def test_a_book_that_outgrew_its_machine_does_all_that_the_embedded_one_does(
    tmp_path: Path, postgres: Postgres, buckets: Buckets
) -> None:
    for name in ("embedded", "scaled"):
        (tmp_path / name).mkdir()
    embedded, _ = run(
        tmp_path / "embedded", sys.executable, book=str(tmp_path / "embedded" / "book"), spark_master="local[2]"
    )
    key, secret, token, planted = Secret.new(), Secret.new("/+"), Secret.new("//+="), Secret.new("")
    password = Secret.new("/@ :%é")
    url, bucket = postgres.new_database(with_book=False), buckets.new_bucket()
    url = postgres.with_password(url, password.text)
    access = {
        "s3_access_key_id": key.text,
        "s3_secret_access_key": secret.text,
        "s3_session_token": token.text,
        "test_planted": planted.text,
    }
    scaled, written = run(
        tmp_path / "scaled",
        without_lakebook(tmp_path),
        registry=url.replace("postgresql://", "postgresql+psycopg://", 1),
        book=url,
        warehouse=f"s3://{bucket}/lake",
        spark_master=CLUSTER,
        **{**buckets.settings, **access},
    )
    assert scaled == embedded
    assert scaled["commands_on_spark: ran"] == [51, 50, 1]
    assert scaled["commands_on_spark: small files"] == [1, [0, 1, 2]]
    assert scaled.get("daemon: failed", []) == []
    assert scaled["others: ours"] == scaled["others: duckdb"] == scaled["others: pyiceberg"] == scaled["others: sql"]
    # Nobody was told a secret; a word that is none is found wherever they were looked for. Nothing is left on its way.
    texts = list(seen(tmp_path / "scaled", written, url, buckets, bucket))
    assert places_of([key, secret, token, password], texts) == []
    found = places_of([planted], texts)
    assert [place for place in PLANTED_IN if not any(fits(name, place) for name in found)] == []
    assert {"errors", "objects", "command doctor"} <= {name for name, content in texts if content}
    assert buckets.uploads(bucket) == []


def fits(name: str, place: tuple[str, str]) -> bool:
    return name.startswith(place[0]) and name.endswith(place[1])

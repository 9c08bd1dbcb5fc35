"""The same program in a folder, and on PostgreSQL, a bucket and a cluster: the settings alone differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from books import Postgres
from buckets import KEY, SECRET, Buckets

HERE = Path(__file__).parent
PROGRAM = HERE / "whole_book.py"
CLUSTER = "local-cluster[2,1,1024]"


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
        [sys.executable, str(PROGRAM), str(folder)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYSPARK_PYTHON": str(python)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    written = done.stdout + done.stderr
    assert done.returncode == 0, written[-6000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), written


@pytest.mark.timeout(600)
def test_a_book_that_outgrew_its_machine_does_all_that_the_embedded_one_does(
    tmp_path: Path, postgres: Postgres, buckets: Buckets
) -> None:
    for name in ("embedded", "scaled"):
        (tmp_path / name).mkdir()
    embedded, _ = run(
        tmp_path / "embedded", sys.executable, book=str(tmp_path / "embedded" / "book"), spark_master="local[2]"
    )
    url, bucket = postgres.new_database(with_book=False), buckets.new_bucket()
    scaled, written = run(
        tmp_path / "scaled",
        without_lakebook(tmp_path),
        registry=url.replace("postgresql://", "postgresql+psycopg://", 1),
        book=url,
        warehouse=f"s3://{bucket}/lake",
        spark_master=CLUSTER,
        **buckets.settings,
    )
    assert scaled == embedded
    assert scaled["secrets: shown"] == []
    assert scaled["others: ours"] == scaled["others: duckdb"] == scaled["others: pyiceberg"] == scaled["others: sql"]
    # Nobody was told the secret, and nothing is left on its way.
    assert SECRET not in written
    assert KEY not in written
    assert buckets.uploads(bucket) == []

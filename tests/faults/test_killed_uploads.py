"""Whoever uploads a large object to a bucket is killed before its end: it is not there, and a sweep ends the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lakebook
from buckets import Buckets
from recovery_points import UPLOAD

PROGRAM = """
import sys
import lakebook
from lakebook.storage.s3 import PART

with lakebook.open(sys.argv[1]) as book, book.lake.store.create(sys.argv[2]) as file:
    file.write(b"x" * (PART + 1))
"""


def upload(folder: Path, place: dict[str, Any], path: str) -> None:
    """Upload a large object as somebody who is killed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"sqlite:///{folder}/registry.db", path],
        env={
            **os.environ,
            "LAKEBOOK_FAILPOINTS": f"{UPLOAD}=kill",
            **{f"LAKEBOOK_{name.upper()}": value for name, value in place.items()},
        },
        check=False,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_an_upload_whose_writer_was_killed_is_no_object_and_ends_with_its_folder(
    buckets: Buckets, tmp_path: Path
) -> None:
    bucket = buckets.new_bucket()
    place = {"warehouse": f"s3://{bucket}/lake", **buckets.settings}
    with lakebook.open(f"sqlite:///{tmp_path}/registry.db", **place) as book:
        upload(tmp_path, place, "data/1/a/file")
        assert buckets.uploads(bucket) == ["lake/data/1/a/file"]
        assert book.lake.store.size("data/1/a/file") is None
        assert book.lake.store.delete_folder("data/1/a") == 0
        assert buckets.uploads(bucket) == []


def test_an_upload_of_a_reader_that_was_killed_ends_when_the_book_is_swept(buckets: Buckets, tmp_path: Path) -> None:
    bucket = buckets.new_bucket()
    place = {"warehouse": f"s3://{bucket}/lake", **buckets.settings}
    with lakebook.open(f"sqlite:///{tmp_path}/registry.db", **place) as book:
        upload(tmp_path, place, "reads/a/b/manifest.avro")
        assert book.cleaner.sweep(dry_run=True).objects == 0
        assert buckets.uploads(bucket) == ["lake/reads/a/b/manifest.avro"]
        # This store says of every upload that it was begun years ago.
        assert book.cleaner.sweep().objects == 1
        assert buckets.uploads(bucket) == []

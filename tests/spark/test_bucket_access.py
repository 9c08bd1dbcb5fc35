"""Spark asks a bucket with the credentials that AWS's own tools would find, and by the address that is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buckets import Buckets
from extent import EVERYWHERE, long

HERE = Path(__file__).parent
EXPORTED = {
    "AWS_ACCESS_KEY_ID": "EXPORTED",
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_SESSION_TOKEN": "exported-token",
    "AWS_REGION": "eu-west-2",
}


def profile(folder: Path) -> dict[str, str]:
    (folder / "own").write_text(
        "[lake]\naws_access_key_id = PROFILE\naws_secret_access_key = s\naws_session_token = profile-token\n"
    )
    (folder / "config").write_text("[profile lake]\nregion = eu-north-1\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(folder / "own"), "AWS_CONFIG_FILE": str(folder / "config")}
    return {**files, "AWS_PROFILE": "lake"}


def run(folder: Path, buckets: Buckets, *names: str, late: dict[str, str], **more: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBOOK_", "AWS_"))}
    environment |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(folder), **more}
    paths = [str(HERE.parent), str(HERE.parent / "faults"), environment.get("PYTHONPATH", "")]
    # Where Spark's libraries lie is said by the home that is not to be looked at.
    ivy = f" -Duser.home={Path.home()}"
    done = subprocess.run(
        [sys.executable, str(HERE / "bucket_access.py"), str(folder), buckets.endpoint, *names, json.dumps(late)],
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SPARK_SUBMIT_OPTS": environment.get("SPARK_SUBMIT_OPTS", "") + ivy,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("how", ["profile", "environment"] if EVERYWHERE else ["profile"])
def test_spark_finds_credentials_as_python_does_and_puts_the_bucket_where_it_is_asked_to(
    tmp_path: Path, buckets: Buckets, how: str
) -> None:
    first, second = buckets.new_bucket(), buckets.new_bucket()
    said = profile(tmp_path) if how == "profile" else EXPORTED
    found = run(tmp_path, buckets, first, second, late={}, **said)
    signer = ["PROFILE", "eu-north-1", "profile-token"]
    if how == "environment":
        signer = ["EXPORTED", "eu-west-2", "exported-token"]
    assert found["rows"] == [3, 3]
    assert {speaker: rest for speaker, *rest in found["signers"]} == dict.fromkeys(
        ("aws-sdk-cpp", "botocore", "object_store", "spark"), signer
    )
    assert found["hosted"] == 3
    assert found["hosts"] == [[speaker, f"{second}.store.test"] for speaker in ("botocore", "object_store", "spark")]


@long()
def test_credentials_that_spark_cannot_find_are_told_of(tmp_path: Path, buckets: Buckets) -> None:
    found = run(tmp_path, buckets, buckets.new_bucket(), buckets.new_bucket(), late=EXPORTED)
    assert found["failed"][0] == "InsertFailed"
    assert "redentials" in found["failed"][1]

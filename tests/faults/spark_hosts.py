"""A Spark that several processes of a test share: to start one takes longer than all that they do with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import table_writers

TESTS = str(Path(__file__).parents[1])


@contextmanager
def hosted_spark() -> Iterator[tuple[int, str]]:
    """How to reach a Spark that outlives those who are killed while they use it."""
    host = subprocess.Popen(
        [sys.executable, table_writers.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])},
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert host.stdout is not None
    port, secret = json.loads(host.stdout.readline())
    try:
        yield port, secret
    finally:
        host.communicate()

"""No secret is in what is said where something fails, nor in what the daemon says; `whole_book.py` has the rest."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lakebook
from books import Postgres
from buckets import Buckets
from fault_proxy import ENDLESS, REFUSED, FaultProxy
from lakebook.cli.main import cli
from lakebook.errors import LakebookError
from lakebook.storage.objects import ObjectStore
from secret_search import Secret, places_of, told_by

#: The header of a request that has a token, as boto3 logs it.
SIGNED = "x-amz-security-token"


@pytest.fixture
def secret() -> Secret:
    return Secret.new("/+")


@pytest.fixture
def token() -> Secret:
    return Secret.new("//+=")


@pytest.fixture
def password() -> Secret:
    return Secret.new("/@ :%é")


@pytest.fixture
def url(postgres: Postgres, password: Secret) -> Iterator[str]:
    url = postgres.new_database(with_book=False)
    yield postgres.with_password(url, password.text)
    postgres.drop(url)


@pytest.fixture
def bucket(buckets: Buckets, secret: Secret, token: Secret) -> dict[str, Any]:
    """Settings that reach a bucket."""
    own = {"s3_secret_access_key": secret.text, "s3_session_token": token.text}
    return {**buckets.settings, **own, "warehouse": f"s3://{buckets.new_bucket()}/lake"}


def use(url: str, settings: dict[str, Any], act: Callable[[ObjectStore], object]) -> None:
    with lakebook.open(url, **settings) as book:
        act(book.lake.store)


def test_what_is_said_of_a_failure_has_no_secret_in_it(
    url: str,
    bucket: dict[str, Any],
    secret: Secret,
    token: Secret,
    password: Secret,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = Secret.new("/@ :%é")
    with closing(FaultProxy(bucket["s3_endpoint"])) as proxy, lakebook.open(url, **bucket) as book:
        book.tables.create("t", "id BIGINT")
        refused = {**bucket, "s3_endpoint": proxy.endpoint, "s3_retry_seconds": 0.0}
        away = {**refused, "s3_endpoint": "http://127.0.0.1:1"}
        strange = {**bucket, "registry": url.replace(password.words[0], wrong.words[0]).replace(password.words[1], "")}
        nobody = url.replace("host=", "host=/nowhere", 1)
        acts: dict[str, Callable[[], object]] = {
            "wrong password": lambda: lakebook.open(strange["registry"], **bucket),
            "no server": lambda: lakebook.open(nobody, **bucket),
            "no such parameter": lambda: lakebook.open(f"{url}&nonsense=1", **bucket),
            "refused": lambda: use(url, refused, lambda store: store.put_new("x", b"")),
            "listing refused": lambda: use(url, refused, lambda store: list(store.list())),
            "away": lambda: use(url, away, lambda store: store.read("x")),
            "of another kind": lambda: lakebook.open(url, **{**bucket, "s3_endpoint": f"http://k:{secret.text}@h"}),
            "in the warehouse": lambda: lakebook.open(url, warehouse=f"s3://k:{secret.text}@bucket/lake"),
        }
        said: list[tuple[str, str]] = []
        with proxy.faulty(REFUSED, times=ENDLESS):
            for name, act in acts.items():
                with pytest.raises(LakebookError) as caught:
                    act()
                said += [(name, text) for text in told_by(caught.value)]
        for name, settings, target in (
            ("as it is", bucket, url),
            ("wrong password", bucket, strange["registry"]),
            ("away", away, url),
        ):
            for setting, value in settings.items():
                monkeypatch.setenv(f"LAKEBOOK_{setting.upper()}", str(value))
            for words in (["doctor"], ["doctor", "--json"], ["verify"], ["tables", "list", "--json"]):
                said.append((f"{name}: {words}", CliRunner().invoke(cli, ["--book", target, *words]).output))
    said.append(("log", caplog.text))
    assert len(caplog.text) > 10_000
    assert places_of([secret, token, password, wrong], said) == []


def test_the_daemon_says_no_secret_however_talkative_it_is(
    url: str, buckets: Buckets, bucket: dict[str, Any], secret: Secret, token: Secret, password: Secret, tmp_path: Path
) -> None:
    name = bucket["warehouse"].split("/")[2]
    with lakebook.open(url, **bucket) as book:
        book.tables.create("t", "id BIGINT")
    settings = {**bucket, "registry": url, "checkpoint_interval": 0.1, "maintenance_interval": 0.1}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LAKEBOOK_", "AWS_"))}
    environment |= {f"LAKEBOOK_{key.upper()}": str(value) for key, value in settings.items()}
    words = ["run", "--log-level", "debug", "--spark-log", "--no-spark", "--json"]
    with (tmp_path / "said").open("wb") as file:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "lakebook.cli.main", *words],
            env=environment,
            cwd=tmp_path,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            # Until it has worked, and has told of its requests.
            while not (buckets.keys(name, "lake/checkpoints/") and SIGNED in (tmp_path / "said").read_text()):
                assert daemon.poll() is None, (tmp_path / "said").read_text()[-3000:]
                time.sleep(0.1)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(60) == 0
        finally:
            daemon.kill()
            daemon.wait()
    said = (tmp_path / "said").read_text()
    assert '"stopped"' in said
    assert places_of([secret, token, password], [("output", said)]) == []

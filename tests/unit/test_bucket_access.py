"""With which credentials a bucket is asked, and by which address: by what came to the store."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from buckets import Buckets
from fault_proxy import FaultProxy, Head
from lakebook.errors import InvalidSetting
from lakebook.storage.access import S3Access
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

#: What the two that speak to a bucket call themselves.
SPEAKERS = {"botocore", "object_store"}


@pytest.fixture(autouse=True)
def _nothing_of_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def proxy(buckets: Buckets) -> Iterator[FaultProxy]:
    with closing(FaultProxy(buckets.endpoint, "store.test")) as proxy:
        yield proxy


def use(bucket: str, **access: str) -> None:
    """Read, list, write and delete, so that both of those who speak to a bucket have spoken."""
    store = ObjectStore(Warehouse(f"s3://{bucket}/lake", access=S3Access(**access)))  # type: ignore[arg-type]
    store.put_new("a/b", b"1")
    assert store.read("a/b") == b"1"
    assert [found.path for found in store.list()] == ["a/b"]
    store.end_uploads()
    assert store.delete_folder("a") == 1


def speaker(head: Head) -> str:
    return head.headers["user-agent"].partition("/")[0].lower()


# --- credentials -----------------------------------------------------------------


def by_settings(_: Path, __: pytest.MonkeyPatch) -> dict[str, str]:
    # They count before all that AWS's tools would find.
    return {"access_key_id": "GIVEN", "secret_access_key": "s", "session_token": "given-token", "region": "eu-west-1"}


def by_environment(_: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"ACCESS_KEY_ID": "EXPORTED", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "t", "DEFAULT_REGION": "eu-west-2"}
    for name, value in found.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return {}


def by_environment_without_a_token(_: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in {"ACCESS_KEY_ID": "EXPORTED", "SECRET_ACCESS_KEY": "s", "REGION": "eu-west-3"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return {}


def by_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (folder / "own").write_text(
        "[default]\naws_access_key_id = OTHER\naws_secret_access_key = s\n"
        "[lake]\naws_access_key_id = PROFILE\naws_secret_access_key = s\naws_session_token = profile-token\n"
    )
    (folder / "config").write_text("[profile lake]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "own"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    return {}


def by_home(folder: Path, _: pytest.MonkeyPatch) -> dict[str, str]:
    (folder / ".aws").mkdir()
    (folder / ".aws" / "credentials").write_text("[default]\naws_access_key_id = HOME\naws_secret_access_key = s\n")
    return {}


def by_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    told = '{"Version": 1, "AccessKeyId": "COMMAND", "SecretAccessKey": "s", "SessionToken": "command-token"}'
    (folder / "says.py").write_text(f"print({told!r})\n")
    (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {folder}/says.py\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    return {}


@pytest.mark.parametrize(
    ("say", "signer"),
    [
        (by_settings, ("GIVEN", "eu-west-1", "given-token")),
        (by_environment, ("EXPORTED", "eu-west-2", "t")),
        (by_environment_without_a_token, ("EXPORTED", "eu-west-3", None)),
        (by_profile, ("PROFILE", "eu-north-1", "profile-token")),
        (by_home, ("HOME", "us-east-1", None)),
        (by_command, ("COMMAND", "us-east-1", "command-token")),
    ],
)
def test_a_bucket_is_asked_with_the_credentials_that_were_given(
    buckets: Buckets,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    say: Callable[[Path, pytest.MonkeyPatch], dict[str, str]],
    signer: tuple[str, str, str | None],
) -> None:
    by_environment(tmp_path, monkeypatch) if say is by_settings else None
    access = say(tmp_path, monkeypatch)
    use(buckets.new_bucket(), endpoint=proxy.endpoint, **access)
    assert {head.signer for head in proxy.heads} == {signer}
    assert {speaker(head) for head in proxy.heads} == SPEAKERS


@pytest.mark.parametrize("given", [False, True])
def test_a_profile_that_is_not_there_is_told_of(buckets: Buckets, monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    monkeypatch.setenv("AWS_PROFILE", "gone")
    access = {"access_key_id": "k", "secret_access_key": "s"} if given else {}
    with pytest.raises(InvalidSetting, match="gone"):
        use(buckets.new_bucket(), endpoint=buckets.endpoint, **access)


def test_half_of_a_key_in_the_environment_is_told_of(buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    with pytest.raises(InvalidSetting, match="credentials"):
        use(buckets.new_bucket(), endpoint=buckets.endpoint)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"])
def test_a_key_with_a_line_break_in_the_environment_is_told_of(
    buckets: Buckets, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t", name: "s3cret\n"}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidSetting, match="line break") as caught:
        use(buckets.new_bucket(), endpoint=buckets.endpoint)
    assert "s3cret" not in str(caught.value)


def test_a_profile_names_the_region_for_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_profile(tmp_path, monkeypatch)
    told = S3Access(endpoint="http://store.test").iceberg_properties(credentials=False)
    assert told["s3.region"] == told["client.region"] == "eu-north-1"


@pytest.mark.parametrize("said", ["endpoint_url = {0}", "endpoint_url = http://other.test\nservices = mine"])
def test_a_profile_names_the_endpoint_for_every_engine(
    buckets: Buckets, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    by_profile(tmp_path, monkeypatch)
    services = f"[services mine]\ns3 =\n  endpoint_url = {proxy.endpoint}\n"
    (tmp_path / "config").write_text(f"[profile lake]\nregion = eu-north-1\n{said.format(proxy.endpoint)}\n{services}")
    bucket = buckets.new_bucket()
    use(bucket)
    assert {speaker(head) for head in proxy.heads if bucket in head.target} == SPEAKERS
    told = S3Access().iceberg_properties(credentials=False)
    assert (told["s3.endpoint"], told["s3.path-style-access"]) == (proxy.endpoint, "true")
    # The environment, the settings and who wants none of it count before that.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://third.test")
    assert S3Access().resolved().endpoint == "http://third.test"
    assert S3Access(endpoint="http://fourth.test").resolved().endpoint == "http://fourth.test"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert S3Access().resolved().endpoint == ""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("services = nobody", ""),
        ("services = mine\n[services mine]\ns3 = no section", ""),
        ("endpoint_url = ftp://store.test", None),
    ],
)
def test_a_profile_with_a_bad_endpoint_is_no_riddle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: str | None
) -> None:
    by_profile(tmp_path, monkeypatch)
    (tmp_path / "config").write_text(f"[profile lake]\n{said}\n")
    if found is None:
        with pytest.raises(InvalidSetting, match="address of a store"):
            S3Access().resolved()
    else:
        assert S3Access().resolved().endpoint == found


# --- addresses -------------------------------------------------------------------

KEY = {"access_key_id": "k", "secret_access_key": "s"}


@pytest.fixture
def through(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    """A store that is known by a name, through a proxy of HTTP: nobody here could find a bucket's name before it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy.endpoint)
    return proxy


def test_the_bucket_stands_in_the_host_where_that_is_asked_for(buckets: Buckets, through: FaultProxy) -> None:
    bucket = buckets.new_bucket()
    use(bucket, endpoint="http://store.test", path_style="no", **KEY)
    assert {head.host for head in through.heads} == {f"{bucket}.store.test"}
    assert not [head for head in through.heads if f"/{bucket}/" in head.target]
    assert {speaker(head) for head in through.heads} == SPEAKERS


@pytest.mark.parametrize("style", ["auto", "yes"])
def test_the_bucket_stands_in_the_path_of_an_endpoint(buckets: Buckets, through: FaultProxy, style: str) -> None:
    bucket = buckets.new_bucket()
    use(bucket, endpoint="http://store.test", path_style=style, **KEY)
    assert {head.host for head in through.heads} == {"store.test"}
    assert all(f"store.test/{bucket}" in head.target for head in through.heads)

"""A bucket whose store fails, is slow, answers in part or not at all: what is done in the end, and what is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import moto.s3.models
import pytest

from buckets import Buckets
from fault_proxy import (
    CLOSED,
    ENDLESS,
    ERROR,
    ERROR_INSIDE,
    HELD,
    LATE,
    LOST,
    REFUSED,
    SHORT,
    SLOW_DOWN,
    UNCONDITIONAL,
    FaultProxy,
)
from lakebook.config import Settings
from lakebook.errors import ObjectExists, ObjectNotFound, StorageRefused, StorageUnavailable, WarehouseNotWritable
from lakebook.storage import s3
from lakebook.storage.access import access_of
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse

#: Smaller parts than stores take, so that little has to be sent.
PART = 100_000
DATA = bytes(range(256)) * 300
LARGE = DATA * 3
REQUEST_SECONDS = 0.4
#: In which every call has to end, however busy the machine.
PATIENCE = 20.0

PUT, BEGIN, PUT_PART, FINISH = "PUT .*/new$", "POST .*uploads", "PUT .*partNumber", "POST .*uploadId"


@pytest.fixture(scope="module")
def buckets() -> Iterator[Buckets]:
    server = Buckets()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def proxy(buckets: Buckets) -> Iterator[FaultProxy]:
    with closing(FaultProxy(buckets.endpoint)) as proxy:
        yield proxy


OLD = {"old": DATA, "folder/a": b"a", "folder/b/c": b"c"}


class Faulty:
    """A bucket of which `old` and `folder/…` are there, reached through a proxy."""

    def __init__(self, buckets: Buckets, proxy: FaultProxy) -> None:
        self.buckets, self.bucket, self.proxy = buckets, buckets.new_bucket(), proxy
        self._stores: dict[tuple[float, float], ObjectStore] = {}

    def store(self, retry_seconds: float = 30.0, request_seconds: float = REQUEST_SECONDS) -> ObjectStore:
        if (retry_seconds, request_seconds) not in self._stores:
            settings: dict[str, Any] = {
                **self.buckets.settings,
                "s3_endpoint": self.proxy.endpoint,
                "s3_request_seconds": request_seconds,
                "s3_retry_seconds": retry_seconds,
            }
            warehouse = Warehouse(f"s3://{self.bucket}/lake", access=access_of(Settings(**settings)))
            self._stores[retry_seconds, request_seconds] = ObjectStore(warehouse)
        return self._stores[retry_seconds, request_seconds]

    def there(self) -> dict[str, bytes]:
        """Every object, seen without the proxy."""
        client = self.buckets.client
        return {
            key.removeprefix("lake/"): client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            for key in self.buckets.keys(self.bucket)
        }

    def uploads(self) -> list[str]:
        return self.buckets.uploads(self.bucket)

    def begin_anew(self) -> None:
        there, client = self.there(), self.buckets.client
        for path in there.keys() - OLD.keys():
            client.delete_object(Bucket=self.bucket, Key=f"lake/{path}")
        for path in OLD.keys() - there.keys():
            client.put_object(Bucket=self.bucket, Key=f"lake/{path}", Body=OLD[path])
        for found in client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ()):
            client.abort_multipart_upload(Bucket=self.bucket, Key=found["Key"], UploadId=found["UploadId"])


@pytest.fixture(scope="module")
def one_bucket(buckets: Buckets, proxy: FaultProxy) -> Faulty:
    return Faulty(buckets, proxy)


@pytest.fixture
def faulty(one_bucket: Faulty, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    monkeypatch.setattr(s3, "PART", PART)
    monkeypatch.setattr(s3, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", PART)
    one_bucket.begin_anew()
    return one_bucket


def write(store: ObjectStore, data: bytes) -> None:
    with store.create("new") as file:
        file.write(data)


def read_file(store: ObjectStore) -> bytes:
    with store.open("old") as file:
        file.seek(1000)
        return file.read()


@dataclass(frozen=True)
class Operation:
    """What is asked of a store, what it gives, and what is there afterwards."""

    do: Callable[[ObjectStore], Any]
    gives: Any = None
    leaves: Callable[[dict[str, bytes]], dict[str, bytes]] = lambda old: old


OPERATIONS = {
    "put_new": Operation(lambda s: s.put_new("new", DATA), leaves=lambda old: {**old, "new": DATA}),
    "create": Operation(lambda s: write(s, DATA), leaves=lambda old: {**old, "new": DATA}),
    "create in parts": Operation(lambda s: write(s, LARGE), leaves=lambda old: {**old, "new": LARGE}),
    "read": Operation(lambda s: s.read("old"), DATA),
    "read_range": Operation(lambda s: s.read_range("old", 5, 70_000), DATA[5:70_005]),
    "stream": Operation(lambda s: b"".join(s.stream("old", 1 << 15)), DATA),
    "open": Operation(read_file, DATA[1000:]),
    "size": Operation(lambda s: s.size("old"), len(DATA)),
    "measure": Operation(lambda s: s.measure(["old"])[0].size, len(DATA)),
    "list": Operation(lambda s: sorted(found.path for found in s.list()), sorted(OLD)),
    "delete": Operation(lambda s: s.delete_one("old"), leaves=lambda old: {k: v for k, v in old.items() if k != "old"}),
    "delete_folder": Operation(lambda s: s.delete_folder("folder") and None, leaves=lambda old: {"old": DATA}),
    "end_uploads": Operation(lambda s: s.end_uploads(), 0),
}
WRITES = ("put_new", "create", "create in parts")
READS = ("read", "read_range", "stream", "open")


def in_time(call: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - begun < PATIENCE


# --- faults that end -----------------------------------------------------------


@pytest.mark.parametrize("fault", [ERROR, SLOW_DOWN, CLOSED, HELD, LATE, SHORT, LOST])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fails_for_a_while_is_done_in_the_end(faulty: Faulty, name: str, fault: str) -> None:
    operation, store = OPERATIONS[name], faulty.store()
    # What takes time is not done twice; late is later than anybody waits.
    times = 1 if fault in (HELD, LATE) else 2
    with faulty.proxy.faulty(fault, f"/{faulty.bucket}", times, seconds=2 * REQUEST_SECONDS) as rule:
        given = in_time(lambda: operation.do(store))
        assert rule.left == 0
    # A folder that is gone already has nothing to count.
    assert given == operation.gives or (name, fault) == ("delete_folder", LOST)
    assert faulty.there() == operation.leaves(OLD)
    assert faulty.uploads() == []


@pytest.mark.parametrize("fault", [ERROR, SLOW_DOWN, CLOSED, SHORT, LOST, ERROR_INSIDE])
@pytest.mark.parametrize("step", [BEGIN, PUT_PART, FINISH])
def test_an_upload_in_parts_is_whole_whichever_step_fails_for_a_while(faulty: Faulty, step: str, fault: str) -> None:
    if fault == ERROR_INSIDE and step != FINISH:
        fault = ERROR  # Only what takes long is answered before it is known.
    with faulty.proxy.faulty(fault, step, 2) as rule:
        write(faulty.store(), LARGE)
        assert rule.left == 0
    assert faulty.there() == {**OLD, "new": LARGE}
    assert faulty.uploads() == []


def test_what_is_slow_but_in_time_is_not_asked_for_again(faulty: Faulty) -> None:
    store, before = faulty.store(request_seconds=30.0), faulty.proxy.count(faulty.bucket)
    with faulty.proxy.faulty(LATE, times=1, seconds=0.3):
        assert store.read("old") == DATA
    assert faulty.proxy.count(faulty.bucket) == before + 1


# --- faults that do not --------------------------------------------------------


@pytest.mark.parametrize("fault", [SLOW_DOWN, CLOSED, HELD])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_fails_for_long_is_told_in_time(faulty: Faulty, name: str, fault: str) -> None:
    store = faulty.store(retry_seconds=0.0 if fault == HELD else 0.4)
    with (
        faulty.proxy.faulty(fault, f"/{faulty.bucket}", ENDLESS),
        pytest.raises(StorageUnavailable),
    ):
        in_time(lambda: OPERATIONS[name].do(store))
    assert faulty.there() == OLD
    assert faulty.uploads() == []


@pytest.mark.parametrize("name", READS)
def test_what_is_always_cut_short_is_never_taken_for_the_data(faulty: Faulty, name: str) -> None:
    with faulty.proxy.faulty(SHORT, f"GET /{faulty.bucket}", ENDLESS), pytest.raises(StorageUnavailable):
        in_time(lambda: OPERATIONS[name].do(faulty.store(retry_seconds=0.4)))


@pytest.mark.parametrize("fault", [ERROR, CLOSED, SHORT, LOST])
@pytest.mark.parametrize("step", [BEGIN, PUT_PART, FINISH])
def test_an_upload_in_parts_that_fails_leaves_nothing(faulty: Faulty, step: str, fault: str) -> None:
    carried_out = step == FINISH and fault in (SHORT, LOST)
    with faulty.proxy.faulty(fault, step, ENDLESS):
        if carried_out:
            write(faulty.store(retry_seconds=0.4), LARGE)
        else:
            with pytest.raises(StorageUnavailable):
                write(faulty.store(retry_seconds=0.4), LARGE)
    assert faulty.there() == ({**OLD, "new": LARGE} if carried_out else OLD)
    assert faulty.uploads() == []


def test_an_upload_whose_block_fails_in_an_outage_is_ended_by_a_sweep_of_its_folder(faulty: Faulty) -> None:
    def give_up() -> None:
        with faulty.store(retry_seconds=0.2).create("folder/new") as file:
            file.write(LARGE)
            raise ZeroDivisionError

    with faulty.proxy.faulty(CLOSED, "DELETE .*uploadId", ENDLESS), pytest.raises(ZeroDivisionError):
        give_up()
    assert faulty.uploads() == ["lake/folder/new"]
    faulty.store().delete_folder("folder")
    assert (faulty.uploads(), faulty.there()) == ([], {"old": DATA})


# --- writes whose answer is lost -----------------------------------------------


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("retry_seconds", [0.0, 30.0])
def test_a_write_whose_answer_was_lost_is_known_again(faulty: Faulty, name: str, retry_seconds: float) -> None:
    store = faulty.store(retry_seconds)
    with faulty.proxy.faulty(LOST, f"{PUT}|{FINISH}") as rule:
        OPERATIONS[name].do(store)
        assert rule.left == 0
    assert faulty.there() == OPERATIONS[name].leaves(OLD)
    with pytest.raises(ObjectExists):
        OPERATIONS[name].do(store)
    assert faulty.uploads() == []


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("fault", [ERROR, CLOSED, LOST])
def test_another_ones_object_is_never_taken_for_ones_own(faulty: Faulty, name: str, fault: str) -> None:
    faulty.store().put_new("new", DATA)
    with faulty.proxy.faulty(fault, f"{PUT}|{FINISH}"), pytest.raises(ObjectExists):
        OPERATIONS[name].do(faulty.store())
    assert faulty.there() == {**OLD, "new": DATA}
    assert faulty.uploads() == []


# --- what no retry helps against -----------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_refused_is_told_at_once(faulty: Faulty, name: str) -> None:
    before = faulty.proxy.count(f" /{faulty.bucket}")
    with faulty.proxy.faulty(REFUSED, f"/{faulty.bucket}", ENDLESS), pytest.raises(StorageRefused):
        OPERATIONS[name].do(faulty.store())
    # Of a listing the reason has to be asked for.
    assert faulty.proxy.count(f" /{faulty.bucket}") - before == (2 if name == "list" else 1)
    assert (faulty.there(), faulty.uploads()) == (OLD, [])


@pytest.mark.parametrize("name", [*READS, "measure"])
def test_what_is_not_there_is_told_at_once(faulty: Faulty, name: str) -> None:
    faulty.buckets.client.delete_object(Bucket=faulty.bucket, Key="lake/old")
    before = faulty.proxy.count(f" /{faulty.bucket}")
    with pytest.raises(ObjectNotFound):
        OPERATIONS[name].do(faulty.store())
    assert faulty.proxy.count(f" /{faulty.bucket}") - before == 1


# --- the probe of a warehouse --------------------------------------------------


def test_a_store_that_creates_what_is_there_already_is_refused(faulty: Faulty) -> None:
    warehouse = faulty.store().warehouse
    with (
        faulty.proxy.faulty(UNCONDITIONAL, times=ENDLESS),
        pytest.raises(WarehouseNotWritable, match=r"replaces an object.*If-None-Match"),
    ):
        warehouse.check_writable()
    assert faulty.there() == OLD
    before = faulty.proxy.count("")
    warehouse.check_writable()
    assert faulty.proxy.count("") == before + 4  # Created, refused, read, deleted.
    assert faulty.there() == OLD


@pytest.mark.parametrize("fault", [ERROR, LOST])
def test_a_store_that_fails_while_it_is_probed_is_not_taken_for_one_that_replaces(faulty: Faulty, fault: str) -> None:
    # The second creation is the one that fails, and is tried again.
    second = iter((False, True))
    with faulty.proxy.faulty(fault, "PUT .*probe", chosen=lambda: next(second)) as rule:
        faulty.store().warehouse.check_writable()
    assert rule.left == 0
    assert faulty.there() == OLD


# --- other processes ---------------------------------------------------------------


def test_a_forked_child_of_one_that_used_a_bucket_is_told_so(buckets: Buckets, proxy: FaultProxy) -> None:
    store = Faulty(buckets, proxy).store()
    store.put_new("t/one", b"1")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            store.put_new("t/two", b"2")
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"StorageRefused"
    os.close(reading)
    os.close(writing)
    # The parent goes on.
    assert store.read("t/one") == b"1"

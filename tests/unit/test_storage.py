"""The bytes of a warehouse: the same in a folder and in memory, whatever the names, and nothing half done."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from buckets import KEY, SECRET, Buckets
from faulty_stores import room_for
from lakebook.config import Settings
from lakebook.errors import (
    InvalidInput,
    InvalidSetting,
    LakebookError,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    PathOutsideWarehouse,
    StorageRefused,
    StorageUnavailable,
    WarehouseNotWritable,
)
from lakebook.storage import objects
from lakebook.storage.access import S3Access, access_of
from lakebook.storage.answers import Measured, reason_of
from lakebook.storage.objects import ObjectStore
from lakebook.storage.s3 import PART as PART_OF_UPLOAD
from lakebook.storage.warehouse import Warehouse

FOLDER = "folder"
# A file system that knows no files without a name, as some do.
PLAIN_FOLDER = "plain folder"
MEMORY = "memory"
BUCKET = "bucket"

HOSTILE: list[Any] = [
    "", "/etc/passwd", "../x", "a/../../x", "a/..", "a//b", "a/./b", "s3://other/x", "a\\b", "a\0b", "a\nb", "x" * 1025,
    None, 7, b"a", "a/", "..", "a/\ud800",
]  # fmt: skip
ODD = [
    "a b/c d", "a%20b", "%2e%2e/x", "ä/名前.parquet", "x#1", "#12", "x#1#2", "a?b=c&d", "st*r[0]{1}", "k=v/a+b,c;d",
    "q'\"`x", ".hidden/.x.crc", "-rf", "~", "a:b", "_SUCCESS", "ends.", "…", " ",
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "warehouse"


@pytest.fixture(params=[FOLDER, PLAIN_FOLDER])
def folder(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A store in a folder, whose files can also be looked at."""
    if request.param == PLAIN_FOLDER:
        monkeypatch.delattr(os, "O_TMPFILE")
    return ObjectStore(Warehouse(str(root)))


@pytest.fixture(params=[FOLDER, PLAIN_FOLDER, MEMORY, BUCKET])
def store(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Every kind: what holds on one holds on each."""
    if request.param == BUCKET:
        buckets: Buckets = request.getfixturevalue("buckets")
        return ObjectStore(in_bucket(buckets, buckets.new_bucket()))
    if request.param == MEMORY:
        return ObjectStore(Warehouse("memory://"))
    if request.param == PLAIN_FOLDER:
        monkeypatch.delattr(os, "O_TMPFILE")
    return ObjectStore(Warehouse(str(root)))


def in_bucket(buckets: Buckets, bucket: str, **more: Any) -> Warehouse:
    settings = Settings(**buckets.settings | more)
    return Warehouse(f"s3://{bucket}/lake", access=access_of(settings))


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(found.path for found in store.list(prefix))


def files_in(root: Path) -> list[str]:
    return sorted(str(file.relative_to(root)) for file in root.rglob("*"))


# --- paths ---------------------------------------------------------------------


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: repr(path)[:20])
def test_a_path_that_leaves_the_warehouse_is_refused(store: ObjectStore, tmp_path: Path, path: Any) -> None:
    (tmp_path / "x").write_bytes(b"outside")
    uses: list[Callable[[], object]] = [
        lambda: store.put_new(path, b"1"),
        lambda: store.create(path),
        lambda: store.read(path),
        lambda: store.read_range(path, 0, 1),
        lambda: store.read_ranges(path, [(0, 1)]),
        lambda: store.stream(path),
        lambda: store.open(path),
        lambda: store.size(path),
        lambda: store.checksum(path),
        lambda: store.measure([path]),
        lambda: store.make_durable([path]),
        lambda: store.delete_one(path),
        lambda: store.delete_folder(path),
        lambda: store.remove_empty_folders(path),
        lambda: store.local_path(path),
    ]
    if path != "":  # The root itself can be listed and has a URI.
        uses += [lambda: store.list(path), lambda: store.uri(path)]
    for use in uses:
        with pytest.raises(PathOutsideWarehouse):
            use()
    [(given_path, error)] = store.delete([path])
    assert given_path == path
    assert isinstance(error, PathOutsideWarehouse)
    assert (tmp_path / "x").read_bytes() == b"outside"
    assert paths(store) == []


def test_a_link_out_of_the_warehouse_is_not_followed(folder: ObjectStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    (root / "data").mkdir(parents=True)
    (root / "data" / "out").symlink_to(outside)
    (root / "data" / "file").symlink_to(outside / "kept")
    (root / "data" / "up").symlink_to("../..")
    uses: list[Callable[[], object]] = [
        lambda: folder.put_new("data/out/new", b"1"),
        lambda: folder.put_new("data/out/deep/new", b"1"),
        lambda: folder.put_new("data/up/new", b"1"),
        lambda: folder.create("data/out/new").__enter__(),
        lambda: folder.read("data/out/kept"),
        lambda: folder.read("data/up/outside/kept"),
        lambda: folder.read("data/file"),
        lambda: folder.read_range("data/file", 0, 1),
        lambda: next(folder.stream("data/file")),
        lambda: folder.open("data/out/kept"),
        lambda: folder.size("data/out/kept"),
        lambda: folder.checksum("data/file"),
        lambda: folder.make_durable(["data/out/kept"]),
        lambda: folder.list("data/out"),
        lambda: folder.delete_one("data/out/kept"),
        lambda: folder.delete_folder("data/out"),
        lambda: folder.delete_folder("data/up/outside"),
        lambda: folder.remove_empty_folders("data/out/kept/x"),
        lambda: folder.local_path("data/file"),
    ]
    for use in uses:
        with pytest.raises(PathOutsideWarehouse):
            use()
    with pytest.raises(ObjectExists):
        folder.put_new("data/file", b"1")
    assert paths(folder) == ["data/file", "data/out", "data/up"]
    assert files_in(outside) == ["kept"]
    assert (outside / "kept").read_bytes() == b"kept"


def test_a_link_that_stays_inside_can_be_read_through(folder: ObjectStore, root: Path) -> None:
    folder.put_new("data/7/a", b"12")
    (root / "latest").symlink_to("data/7")
    assert folder.read("latest/a") == b"12"
    folder.put_new("latest/b", b"3")
    assert paths(folder) == ["data/7/a", "data/7/b", "latest"]
    folder.delete_one("latest")
    assert paths(folder) == ["data/7/a", "data/7/b"]


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    store = ObjectStore(Warehouse(str(tmp_path / "link")))
    store.put_new("a/b", b"1")
    assert store.read("a/b") == b"1"
    assert paths(store) == ["a/b"]
    # An engine may report either.
    assert store.relative(f"file:{tmp_path}/link/a/b") == "a/b"
    assert store.relative(f"file:{tmp_path}/disk/a/b") == "a/b"


def test_odd_names_are_names_like_others(store: ObjectStore) -> None:
    for path in ODD:
        store.put_new(path, path.encode())
    assert paths(store) == sorted(ODD)
    for path in ODD:
        assert store.read(path) == path.encode()
        assert store.size(path) == len(path.encode())
        assert store.relative(store.uri(path)) == path
        with store.open(path) as file:
            assert file.read() == path.encode()
    assert store.delete(ODD) == []
    assert paths(store) == []


PART = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters="/\\") | st.sampled_from(".#%? "),
    min_size=1,
    max_size=15,
).filter(lambda part: part not in (".", ".."))


@settings(max_examples=40, deadline=None)
@given(path=st.lists(PART, min_size=1, max_size=4).map("/".join))
def test_every_legal_path_can_be_written_and_found(path: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        for store in (ObjectStore(Warehouse(place)), ObjectStore(Warehouse("memory://"))):
            store.put_new(path, b"1")
            assert paths(store) == [path]
            assert store.read(path) == b"1"
            assert store.relative(store.uri(path)) == path
            assert store.delete_folder(path) == 0
            store.delete_one(path)
            store.remove_empty_folders(path)
            assert store.size(path) is None
        assert os.listdir(place) == []


def test_a_name_that_the_file_system_does_not_take_is_a_typed_error(folder: ObjectStore, root: Path) -> None:
    with pytest.raises(StorageRefused, match="name too long"):
        folder.put_new(f"a/{'x' * 300}", b"1")
    assert paths(folder) == []
    assert not (root / "a").exists()


# --- writing -------------------------------------------------------------------


def test_an_object_is_written_once(store: ObjectStore) -> None:
    store.put_new("data/7/a", b"first")
    with pytest.raises(ObjectExists) as caught:
        store.put_new("data/7/a", b"second")
    assert "data/7/a" in caught.value.on
    with pytest.raises(ObjectExists), store.create("data/7/a") as file:
        file.write(b"third")
    assert store.read("data/7/a") == b"first"
    assert paths(store) == ["data/7/a"]


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 17 << 20])
def test_what_is_streamed_in_comes_back(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    with store.create("a/b") as file:
        for start in range(0, size, 700_001):
            assert file.write(memoryview(data)[start : start + 700_001]) == len(data[start : start + 700_001])
        assert file.tell() == size
        assert file.writable()
        assert store.size("a/b") is None
        assert paths(store) in ([], [path for path in paths(store) if path.startswith("a/.lakebook-")])
    assert store.read("a/b") == data
    assert paths(store) == ["a/b"]


def write_and_fail(
    store: ObjectStore, path: str, error: Exception, *, close: bool = False, size: int = 3 << 20
) -> None:
    with store.create(path) as file:
        file.write(b"x" * size)
        if close:
            file.close()
        raise error


def test_a_block_that_raises_leaves_nothing(store: ObjectStore, root: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"):
        write_and_fail(store, "a/b/c", RuntimeError("mine"))
    assert store.size("a/b/c") is None
    assert paths(store) == []
    assert not root.exists()
    store.put_new("a/b/c", b"1")
    # An error of the block's own is not taken for one of the storage.
    with pytest.raises(FileNotFoundError):
        write_and_fail(store, "a/b/d", FileNotFoundError())
    assert paths(store) == ["a/b/c"]


def test_closing_the_file_in_the_block_does_not_end_the_object(store: ObjectStore) -> None:
    with store.create("a") as file:
        file.write(b"12")
        file.flush()
        file.close()
        assert file.closed
        with pytest.raises(ValueError, match="closed"):
            file.write(b"3")
    assert store.read("a") == b"12"
    with pytest.raises(RuntimeError, match="mine"):
        write_and_fail(store, "b", RuntimeError("mine"), close=True)
    assert store.size("b") is None


def test_parquet_is_written_and_read_through_the_store(store: ObjectStore) -> None:
    table = pa.table({"id": list(range(50_000)), "text": [f"row {n}" for n in range(50_000)]})
    with store.create("data/t.parquet") as file:
        pq.write_table(table, file, row_group_size=10_000)
    with store.create("data/u.parquet") as file, pq.ParquetWriter(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=20_000):
            writer.write_batch(batch)
    for path in ("data/t.parquet", "data/u.parquet"):
        with store.open(path) as source, pq.ParquetFile(source) as parquet:
            assert parquet.read().equals(table)
        with store.open(path) as source:
            assert pq.read_table(pa.PythonFile(source), columns=["id"]).num_columns == 1
    with store.open("data/t.parquet") as source, pq.ParquetFile(source) as parquet:
        assert parquet.num_row_groups == 5
        assert parquet.read_row_group(3, columns=["text"])["text"][0].as_py() == "row 30000"


def race(number: int, act: Callable[[int], None]) -> list[int]:
    """Do the same in several threads at once; which of them came first?"""
    barrier = threading.Barrier(number)

    def run(mine: int) -> int | None:
        barrier.wait()
        try:
            act(mine)
        except ObjectExists:
            return None
        return mine

    with ThreadPoolExecutor(number) as pool:
        return [won for won in pool.map(run, range(number)) if won is not None]


def test_one_of_many_threads_creates_an_object(store: ObjectStore) -> None:
    for turn in range(10):
        path = f"data/{turn}/manifest"

        def put(mine: int, path: str = path) -> None:
            store.put_new(path, b"%d" % mine)

        def stream(mine: int, path: str = path) -> None:
            with store.create(path) as file:
                file.write(b"%d" % mine)

        winners = race(8, put if turn % 2 else stream)
        assert len(winners) == 1
        assert store.read(path) == b"%d" % winners[0]
    assert len(paths(store)) == 10


CHILD = """
import sys
from lakebook.errors import ObjectExists
from lakebook.storage.objects import ObjectStore
from lakebook.storage.warehouse import Warehouse
store = ObjectStore(Warehouse(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    try:
        with store.create(line.strip()) as file:
            file.write(sys.argv[2].encode())
    except ObjectExists:
        print("lost", flush=True)
    else:
        print("won", flush=True)
"""


def test_one_of_many_processes_creates_an_object(root: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), f"child {number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    store = ObjectStore(Warehouse(str(root)))
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for turn in range(20):
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"data/{turn}/manifest\n")
            child.stdin.flush()
        answers = [child.stdout.readline() for child in children if child.stdout is not None]
        assert sorted(answers) == ["lost\n", "lost\n", "won\n"]
        assert store.read(f"data/{turn}/manifest") == b"child %d" % answers.index("won\n")
    for child in children:
        child.communicate()
        assert child.returncode == 0
    assert len(paths(store)) == 20


def test_a_writer_that_is_killed_leaves_no_object(root: Path) -> None:
    killed = (
        "import os, signal, sys\n"
        "from lakebook.storage.objects import ObjectStore\n"
        "from lakebook.storage.warehouse import Warehouse\n"
        "with ObjectStore(Warehouse(sys.argv[1])).create('data/a') as file:\n"
        "    file.write(b'x' * (3 << 20))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", killed, str(root)], check=False).returncode == -9
    store = ObjectStore(Warehouse(str(root)))
    assert store.size("data/a") is None
    store.put_new("data/a", b"second")
    assert store.read("data/a") == b"second"


def test_a_folder_that_is_tidied_up_at_the_same_time_does_not_fail_a_writer(folder: ObjectStore, root: Path) -> None:
    barrier = threading.Barrier(4)

    def write_and_tidy(mine: int) -> None:
        barrier.wait()
        path = f"data/7/0/{mine}"
        for turn in range(25):
            with folder.create(path) as file:
                file.write(b"%d" % turn)
            assert folder.read(path) == b"%d" % turn
            folder.delete_one(path)
            folder.remove_empty_folders(path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_and_tidy, range(4)))
    assert files_in(root) == []


def inodes_synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    seen: set[int] = set()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        seen.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", watched)
    return seen


def test_an_object_and_the_folders_made_for_it_are_synced(
    folder: ObjectStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = inodes_synced(monkeypatch)
    folder.put_new("data/7/a", b"1")
    wanted = [root / "data/7/a", root / "data/7", root / "data", root, tmp_path]
    assert {place.stat().st_ino for place in wanted} == synced
    synced.clear()
    with folder.create("data/7/b") as file:
        file.write(b"1")
    assert {(root / "data/7/b").stat().st_ino, (root / "data/7").stat().st_ino} == synced


def test_what_is_made_durable_later_is_not_synced_at_once(
    folder: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = inodes_synced(monkeypatch)
    folder.put_new("data/a", b"1", durable=False)
    with folder.create("data/b", durable=False) as file:
        file.write(b"2")
    assert synced == set()
    assert paths(folder) == ["data/a", "data/b"]
    folder.make_durable(["data/a", "data/b"])
    assert synced == {(root / place).stat().st_ino for place in ("data/a", "data/b", "data", ".")}


def test_what_others_wrote_is_made_durable(folder: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"data/{part}/deep/{n}" for part in "ab" for n in range(20)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"1")
    (root / "other").mkdir()
    synced = inodes_synced(monkeypatch)
    folder.make_durable(names)
    folders = ["data/a/deep", "data/a", "data/b/deep", "data/b", "data", "."]
    assert synced == {(root / place).stat().st_ino for place in names + folders}
    with pytest.raises(ObjectNotFound):
        folder.make_durable([*names, "data/a/none"])
    with pytest.raises(ObjectNotFound):
        folder.make_durable(["data/a"])
    synced.clear()
    folder.make_durable([])
    assert synced == set()


def test_objects_that_are_durable_already_can_be_made_durable(store: ObjectStore) -> None:
    store.put_new("a/b", b"1")
    store.make_durable(["a/b"], workers=1)
    assert store.read("a/b") == b"1"


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize(
    ("number", "expected"), [(errno.EIO, StorageUnavailable), (errno.ENOSPC, StorageRefused)], ids=["EIO", "ENOSPC"]
)
def test_a_disk_that_fails_leaves_nothing(
    folder: ObjectStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    number: int,
    expected: type[LakebookError],
) -> None:
    fsync = os.fsync
    calls = iter(range(100))

    def fails(descriptor: int) -> None:
        if next(calls) == failing:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(expected, match=os.strerror(number)):
        folder.put_new("data/7/a", b"1")
    assert not root.exists()
    folder.put_new("data/7/a", b"2")
    assert folder.read("data/7/a") == b"2"


def test_a_write_that_finds_no_room_leaves_nothing(folder: ObjectStore, root: Path) -> None:
    def small(file: BinaryIO) -> None:
        file.write(b"x" * 500_000)

    def large(file: BinaryIO) -> None:
        file.writelines(b"x" * 1_000_000 for _ in range(5))

    def parquet(file: BinaryIO) -> None:
        pq.write_table(pa.table({"a": list(range(200_000))}), file)

    folder.put_new("data/kept", b"kept")
    for write in (small, large, parquet):
        with pytest.raises(StorageRefused, match="too large"), room_for(100_000), folder.create("data/new/a") as file:
            write(file)
    assert files_in(root) == ["data", "data/kept"]


def test_something_else_in_the_place_of_an_object_is_not_taken_for_it(folder: ObjectStore, root: Path) -> None:
    folder.put_new("data/a", b"1")
    (root / "data/folder").mkdir()
    # This is no `ObjectExists`: whoever finds that may think that his object is there.
    with pytest.raises(StorageRefused, match="folder in its place"):
        folder.put_new("data/folder", b"1")
    with pytest.raises(StorageRefused):
        folder.put_new("data/a/b", b"1")
    with pytest.raises(StorageRefused):
        folder.put_new("data/a/b/c", b"1")
    assert folder.size("data/folder") is None
    assert folder.size("data/a/b") is None
    for path in ("data/folder", "data/a/b"):
        with pytest.raises(ObjectNotFound):
            folder.read(path)
    assert files_in(root) == ["data", "data/a", "data/folder"]


# --- reading -------------------------------------------------------------------


def test_a_missing_object_is_a_typed_error(store: ObjectStore) -> None:
    store.put_new("a/b", b"1")
    uses: list[Callable[[], object]] = [
        lambda: store.read("a/c"),
        lambda: store.read_range("a/c", 0, 1),
        lambda: store.read_range("a/c", 0, 0),
        lambda: store.read_ranges("a/c", []),
        lambda: list(store.stream("a/c")),
        lambda: store.open("a/c"),
        lambda: store.checksum("a/c"),
        lambda: store.measure(["a/b", "a/c"]),
        lambda: store.read("a"),
        lambda: store.open("a"),
    ]
    for use in uses:
        with pytest.raises(ObjectNotFound):
            use()
    assert store.size("a/c") is None
    assert store.size("a") is None
    assert store.size("a/b") == 1


def test_a_range_is_exact(store: ObjectStore) -> None:
    data = bytes(range(256)) * 10
    store.put_new("a", data)
    assert store.read_range("a", 0, 2560) == data
    assert store.read_range("a", 7, 3) == data[7:10]
    assert store.read_range("a", 2559, 1) == data[-1:]
    assert store.read_range("a", 2560, 0) == b""
    assert store.read_ranges("a", [(100, 4), (0, 0), (0, 1), (2000, 560), (100, 4)]) == [
        data[100:104],
        b"",
        data[:1],
        data[2000:],
        data[100:104],
    ]
    assert store.read_ranges("a", []) == []
    # Close to each other, far from each other, and overlapping.
    large = os.urandom(5 << 20)
    store.put_new("b", large)
    asked = [(4 << 20, 100), (0, 10), (5, 10), ((2 << 20) + 7, 1 << 20), (20, 5), (0, 2), (4 << 20, 1 << 20)]
    assert store.read_ranges("b", asked) == [large[start : start + length] for start, length in asked]
    assert type(store.read_range("a", 0, 1)) is bytes


@pytest.mark.parametrize("asked", [(0, 2561), (2559, 2), (2560, 1), (9999, 1), (2561, 0)])
def test_an_object_that_is_too_short_is_a_typed_error(store: ObjectStore, asked: tuple[int, int]) -> None:
    store.put_new("a", bytes(2560))
    with pytest.raises(ObjectTruncated):
        store.read_range("a", *asked)
    with pytest.raises(ObjectTruncated):
        store.read_ranges("a", [(0, 5), asked])


def test_a_range_or_a_chunk_that_cannot_be_is_refused(store: ObjectStore) -> None:
    store.put_new("a", b"12")
    for asked in [(-1, 1), (0, -1)]:
        with pytest.raises(InvalidInput):
            store.read_range("a", *asked)
    with pytest.raises(InvalidInput):
        store.stream("a", 0)
    with pytest.raises(InvalidInput):
        store.measure(["a"], workers=0)


def test_an_object_larger_than_a_chunk_is_streamed_in_chunks(store: ObjectStore) -> None:
    data = os.urandom((5 << 20) + 17)
    store.put_new("a", data)
    chunks = list(store.stream("a", 1 << 20))
    assert [len(chunk) for chunk in chunks] == [1 << 20] * 5 + [17]
    assert b"".join(chunks) == data
    assert all(type(chunk) is bytes for chunk in chunks)
    assert list(store.stream("a")) == [data]
    store.put_new("empty", b"")
    assert list(store.stream("empty")) == []
    with closing(store.stream("a", 1000)) as stream:  # type: ignore[type-var]
        assert next(stream) == data[:1000]


def test_an_open_object_can_be_read_anywhere(store: ObjectStore) -> None:
    data = os.urandom((3 << 20) + 5)
    store.put_new("a", data)
    with store.open("a") as file:
        assert file.readable()
        assert file.seekable()
        assert file.read(10) == data[:10]
        assert file.tell() == 10
        assert file.seek(-5, io.SEEK_END) == len(data) - 5
        assert file.read() == data[-5:]
        assert file.read(1) == b""
        file.seek(1 << 20)
        assert file.read(2 << 20) == data[1 << 20 : 3 << 20]
        file.seek(-100, io.SEEK_CUR)
        assert file.read(100) == data[(3 << 20) - 100 : 3 << 20]
        file.seek(len(data) + 10)
        assert file.read() == b""
        file.seek(0)
        assert file.read() == data
    assert file.closed


def test_a_checksum_is_that_of_the_bytes(store: ObjectStore) -> None:
    own = store.warehouse.bucket is None
    contents = {f"data/{size}": os.urandom(size) for size in (0, 1, 1000, 1 << 20, (2 << 20) + 3)}
    for path, data in contents.items():
        store.put_new(path, data)
    expected = [Measured(path, len(data), f"xxh3:{xxhash.xxh3_64_hexdigest(data)}") for path, data in contents.items()]
    # Whatever the place knows its objects by, their bytes can be asked for.
    assert [store.measure_as(item.path, item.checksum) for item in expected] == expected
    if not own:
        tags = [hashlib.md5(data).hexdigest() for data in contents.values()]
        expected = [Measured(item.path, item.size, f"etag:{tag}") for item, tag in zip(expected, tags, strict=True)]
        assert [store.measure_as(item.path, item.checksum) for item in expected] == expected
    assert store.measure(list(contents)) == expected
    assert store.measure(list(contents), workers=1) == expected
    assert [store.checksum(path) for path in contents] == [measured.checksum for measured in expected]
    if own:
        assert store.checksum("data/0") == "xxh3:2d06800538d394c2"
    assert store.measure([]) == []


# --- listing and deleting ------------------------------------------------------


def test_a_listing_keeps_to_its_folder(store: ObjectStore) -> None:
    names = ["data/7/abc/x", "data/7/abc/deep/er/y", "data/7/abcd/x", "data/7/ab", "data/70/x", "x"]
    for name in names:
        store.put_new(name, name.encode())
    assert paths(store) == sorted(names)
    assert paths(store, "data/7/abc") == ["data/7/abc/deep/er/y", "data/7/abc/x"]
    assert paths(store, "data/7") == sorted(name for name in names if name.startswith("data/7/"))
    assert paths(store, "data/7/ab") == []
    assert paths(store, "none") == []


def test_a_listing_says_how_large_and_how_old(store: ObjectStore) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    store.put_new("a/b", b"12345")
    [found] = store.list("a")
    assert (found.path, found.size) == ("a/b", 5)
    assert found.modified.tzinfo is not None
    assert before < found.modified < datetime.now(UTC) + timedelta(seconds=2)


def test_a_listing_hides_nothing(folder: ObjectStore, root: Path) -> None:
    names = [".x.parquet.crc", "_SUCCESS", "x.parquet#1", ".tmp/x", "_temporary/0/x", "Thumbs.db~"]
    for name in names:
        (root / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "data" / name).write_bytes(b"1")
    (root / "data" / "link").symlink_to("nowhere")
    (root / "data" / "empty").mkdir()
    assert paths(folder, "data") == sorted(f"data/{name}" for name in [*names, "link"])


def test_a_listing_of_no_folder_is_empty(store: ObjectStore) -> None:
    assert paths(store) == []
    assert paths(store, "data") == []


def test_a_listing_bears_that_what_it_lists_is_deleted(store: ObjectStore) -> None:
    names = [f"data/{n % 3}/{n}" for n in range(12)]
    for name in names:
        store.put_new(name, b"1")
    listing = store.list("data")
    first = next(listing)
    store.delete_folder("data")
    assert {first.path, *(found.path for found in listing)} <= set(names)
    assert paths(store, "data") == []


def test_deleting_what_is_gone_is_fine(store: ObjectStore) -> None:
    names = [f"data/{n}" for n in range(5)]
    for name in names:
        store.put_new(name, b"1")
    assert store.delete(iter(["data/none", *names[:3], "none/at/all", names[0]])) == []
    assert paths(store) == names[3:]
    assert store.delete(names) == []
    store.delete_one(names[0])
    assert store.delete([]) == []
    assert paths(store) == []


def test_many_objects_are_deleted_at_once(store: ObjectStore, root: Path) -> None:
    names = [f"d/{n}" for n in range(2100)]
    if (local := store.local_path("d")) is not None:  # Without a sync for each.
        local.mkdir(parents=True)
    for name in names:
        if (file := store.local_path(name)) is not None:
            file.touch()
        else:
            store.put_new(name, b"")
    assert len(paths(store, "d")) == 2100
    assert store.delete(names[:1050]) == []
    assert sorted(paths(store)) == sorted(names[1050:])
    assert store.delete_folder("d") == 1050
    assert paths(store) == []


def test_what_cannot_be_deleted_does_not_keep_the_rest(folder: ObjectStore, root: Path) -> None:
    for name in ("a/1", "a/2", "a/folder/x"):
        folder.put_new(name, b"1")
    failures = folder.delete(["a/1", "a/folder", "../x", "a/none", "a/1/below", "a/2"])
    assert [(path, type(error)) for path, error in failures] == [
        ("a/folder", StorageRefused),
        ("../x", PathOutsideWarehouse),
    ]
    assert paths(folder) == ["a/folder/x"]
    with pytest.raises(StorageRefused):
        folder.delete_one("a/folder")


def test_a_folder_is_deleted_with_all_that_is_in_it(store: ObjectStore) -> None:
    inside = ["data/7/abc/x", "data/7/abc/.x.crc", "data/7/abc/deep/er/y", "data/7/abc/x#1"]
    beside = ["data/7/abcd/x", "data/7/ab", "data/x"]
    for name in inside + beside:
        store.put_new(name, b"1")
    assert store.delete_folder("data/7/abc") == 4
    assert paths(store) == sorted(beside)
    assert store.delete_folder("data/7/abc") == 0
    assert store.delete_folder("none/at/all") == 0
    # An object is no folder.
    assert store.delete_folder("data/x") == 0
    assert paths(store) == sorted(beside)


def test_a_deleted_folder_is_gone_and_links_in_it_are_not_followed(
    folder: ObjectStore, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "kept").write_bytes(b"1")
    folder.put_new("data/7/x", b"1")
    folder.put_new("data/8/kept", b"1")
    (root / "data/7/empty/er").mkdir(parents=True)
    (root / "data/7/out").symlink_to(outside)
    (root / "data/7/file").symlink_to(outside / "deep" / "kept")
    (root / "data/7/beside").symlink_to("../8")
    (root / "data/7/nowhere").symlink_to("nowhere")
    (root / "data/9").symlink_to("8")
    assert folder.delete_folder("data/7") == 5
    with pytest.raises(PathOutsideWarehouse):
        folder.delete_folder("data/9")
    assert files_in(root) == ["data", "data/8", "data/8/kept", "data/9"]
    assert files_in(outside) == ["deep", "deep/kept"]


def test_many_delete_the_same_folder_at_once(store: ObjectStore, root: Path) -> None:
    for turn in range(3):
        for n in range(20):
            store.put_new(f"data/{turn}/{n % 4}/{n}", b"1")
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(lambda _, turn=turn: store.delete_folder(f"data/{turn}"), range(4)))
        assert sum(counts) >= 20
        assert paths(store) == []
        assert not (root / "data" / str(turn)).exists()


def test_empty_folders_go_and_others_stay(folder: ObjectStore, root: Path) -> None:
    folder.put_new("data/7/0/a", b"1")
    folder.put_new("data/7/1/b", b"1")
    folder.remove_empty_folders("data/7/0/a")
    assert paths(folder) == ["data/7/0/a", "data/7/1/b"]
    folder.delete_one("data/7/0/a")
    folder.remove_empty_folders("data/7/0/a")
    assert files_in(root) == ["data", "data/7", "data/7/1", "data/7/1/b"]
    folder.delete_one("data/7/1/b")
    # Some of its folders may be gone already.
    folder.remove_empty_folders("data/7/1/gone/too/b")
    assert files_in(root) == []
    assert root.is_dir()
    folder.remove_empty_folders("b")
    assert root.is_dir()


def test_where_there_are_no_folders_none_is_removed() -> None:
    store = ObjectStore(Warehouse("memory://"))
    store.put_new("a/b", b"1")
    store.remove_empty_folders("a/b")
    assert paths(store) == ["a/b"]


# --- names for others ----------------------------------------------------------


def test_a_uri_is_not_escaped() -> None:
    store = ObjectStore(Warehouse("/lake house/50%/ü"))
    assert store.uri() == "file:///lake house/50%/ü"
    assert store.uri("a b/%20") == "file:///lake house/50%/ü/a b/%20"
    # PyIceberg would end the path of a URI there.
    assert store.uri("a#1") == "/lake house/50%/ü/a#1"
    assert ObjectStore(Warehouse("/c#")).uri("a") == "/c#/a"
    assert store.local_path("a b/%20") == Path("/lake house/50%/ü/a b/%20")


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:/lake/w/a/b", "a/b"),
        ("file:///lake/w/a/b", "a/b"),
        ("file://localhost/lake/w/a/b", "a/b"),
        ("/lake/w/a/b", "a/b"),
        ("/lake/w/a%20b", "a%20b"),
        ("/lake/w/a b#1?", "a b#1?"),
        ("/lake/w/a/", "a"),
        ("file:///lake/w", ""),
        ("/lake/w/", ""),
    ],
)
def test_what_an_engine_reports_is_found_again(uri: str, path: str) -> None:
    assert ObjectStore(Warehouse("/lake/w")).relative(uri) == path


@pytest.mark.parametrize(
    "uri",
    [
        "", "a/b", "/lake/wide/a", "/lake", "/", "file:a", "file:///other/w/a", "file://host/lake/w/a", "s3://lake/w/a",
        "/lake/w/../x", "/lake/w//x", "hdfs:///lake/w/a", "memory:///a", "file:///lake/w/a\0",
    ],
)  # fmt: skip
def test_what_lies_elsewhere_is_not_found(uri: str) -> None:
    with pytest.raises(PathOutsideWarehouse):
        ObjectStore(Warehouse("/lake/w")).relative(uri)


def test_an_escaped_uri_is_found_again() -> None:
    store = ObjectStore(Warehouse("/wh %41 ü#"))
    assert store.relative("file:///wh%20%2541%20ü%23/k=v/a%20b%252F+.txt", escaped=True) == "k=v/a b%2F+.txt"
    assert store.relative("file:/wh%20%2541%20%C3%BC%23/a", escaped=True) == "a"
    with pytest.raises(PathOutsideWarehouse):
        store.relative("file:///wh%20%2541%20ü%23/%2e%2e/x", escaped=True)


def test_memory_has_uris_too() -> None:
    store = ObjectStore(Warehouse("memory://"))
    assert store.relative(store.uri("a b/c#1")) == "a b/c#1"
    assert store.relative(store.uri()) == ""
    assert store.local_path("a") is None
    with pytest.raises(PathOutsideWarehouse):
        store.relative("file:///a")


def test_a_warehouse_at_the_root_of_the_file_system_can_be() -> None:
    store = ObjectStore(Warehouse("/"))
    assert store.uri() == "file:///"
    assert store.uri("a/b") == "file:///a/b"
    assert store.relative("file:/a/b") == "a/b"
    assert store.relative("/") == ""


# --- a bucket that refuses -----------------------------------------------------


class Refusing(BaseHTTPRequestHandler):
    """A bucket in which nothing can be read or written, but most can be deleted."""

    def do_GET(self) -> None:
        gone = self.path.endswith("/gone")
        taken = self.path.endswith("/taken") and self.headers.get("If-None-Match") == "*"
        self.answer(404 if gone else 412 if taken else 403)

    def do_POST(self) -> None:
        answers = [
            b"<Error>%b<Code>AccessDenied</Code><Message>No</Message></Error>" % key
            if b"locked" in key
            else b"<Deleted>%b</Deleted>" % key
            for key in re.findall(rb"<Key>[^<]*</Key>", self.body())
        ]
        self.answer(200, b"<DeleteResult>%b</DeleteResult>" % b"".join(answers))

    do_HEAD = do_PUT = do_GET  # noqa: N815 - the names of the library

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: bytes = b"") -> None:
        if self.command == "PUT":
            self.body()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("AWS_REGION", "eu-north-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
        yield ObjectStore(Warehouse("s3://bucket/lake/"))
        server.shutdown()
        thread.join()


def test_a_bucket_that_refuses_is_a_typed_error(refusing: ObjectStore) -> None:
    uses: list[tuple[type[LakebookError], Callable[[], object]]] = [
        (StorageRefused, lambda: refusing.read("a")),
        (StorageRefused, lambda: refusing.size("a")),
        (StorageRefused, lambda: refusing.read_range("a", 0, 1)),
        (StorageRefused, lambda: refusing.put_new("a", b"1")),
        (LakebookError, lambda: list(refusing.list("a"))),
        (ObjectNotFound, lambda: refusing.read("gone")),
        (ObjectExists, lambda: refusing.put_new("taken", b"1")),
    ]
    for expected, use in uses:
        with pytest.raises(expected) as caught:
            use()
        assert "s3cret" not in str(caught.value)
        assert "\n" not in str(caught.value)
    assert refusing.size("gone") is None


def test_a_bucket_that_keeps_one_object_deletes_the_others(refusing: ObjectStore) -> None:
    assert refusing.delete(["a", "gone", "b"]) == []
    failures = refusing.delete(["a", "locked/1", "b", "locked/2", "c"])
    assert [path for path, _ in failures] == ["locked/1", "locked/2"]


def test_objects_of_a_bucket_have_uris(refusing: ObjectStore) -> None:
    assert refusing.uri() == "s3://bucket/lake"
    assert refusing.uri("a b/%20#1") == "s3://bucket/lake/a b/%20#1"
    for scheme in ("s3", "s3a", "s3n"):
        assert refusing.relative(f"{scheme}://bucket/lake/a/b") == "a/b"
    assert refusing.relative("s3://bucket/lake") == ""
    for elsewhere in ("s3://bucket/lakes/a", "s3://other/lake/a", "/bucket/lake/a", "file:///bucket/lake/a"):
        with pytest.raises(PathOutsideWarehouse):
            refusing.relative(elsewhere)
    assert refusing.local_path("a") is None


# --- a bucket ------------------------------------------------------------------

LARGE = PART_OF_UPLOAD * 2 + 5


@pytest.fixture
def bucket(buckets: Buckets) -> str:
    return buckets.new_bucket()


@pytest.fixture
def remote(buckets: Buckets, bucket: str) -> ObjectStore:
    return ObjectStore(in_bucket(buckets, bucket))


def test_a_large_object_goes_to_a_bucket_in_parts(buckets: Buckets, bucket: str, remote: ObjectStore) -> None:
    data = os.urandom(LARGE)
    with remote.create("large") as file:
        for start in range(0, LARGE, 1_000_000):
            file.write(data[start : start + 1_000_000])
        # It is on its way, and nobody sees it.
        assert buckets.uploads(bucket) == ["lake/large"]
        assert remote.size("large") is None
    assert remote.read("large") == data
    assert buckets.uploads(bucket) == []
    (measured,) = remote.measure(["large"])
    assert measured.checksum.endswith("-3")


@pytest.mark.parametrize(
    ("kept", "made_by", "known_as"),
    [
        ("SHA256", lambda data: hashlib.sha256(data).digest(), "sha256"),
        # The store takes the writer's word for it; so may this test.
        ("CRC64NVME", lambda data: xxhash.xxh3_64(data).digest(), "crc64nvme"),
        ("SHA1", lambda data: hashlib.sha1(data).digest(), "sha1"),
        ("CRC32", lambda data: zlib.crc32(data).to_bytes(4), "etag"),
    ],
)
def test_an_object_is_known_by_the_best_checksum_that_its_store_keeps(
    kept: str,
    made_by: Callable[[bytes], bytes],
    known_as: str,
    buckets: Buckets,
    bucket: str,
    remote: ObjectStore,
) -> None:
    data, other = os.urandom(1000), os.urandom(1000)
    checksum = base64.b64encode(made_by(data)).decode()
    given = {"ChecksumAlgorithm": kept, f"Checksum{kept}": checksum}
    buckets.client.put_object(Bucket=bucket, Key="lake/a", Body=data, **given)
    etag = f"etag:{hashlib.md5(data).hexdigest()}"
    expected = etag if known_as == "etag" else f"{known_as}:{checksum}"
    (found,) = remote.measure(["a"])
    assert found == Measured("a", len(data), expected)
    assert remote.mark("a") == remote.checksum("a") == expected
    # What was recorded before the store kept one is compared with what it was recorded by.
    assert remote.mark("a", etag) == remote.measure_as("a", etag).checksum == etag
    assert remote.measure_as("a", found.checksum) == found
    buckets.client.put_object(Bucket=bucket, Key="lake/a", Body=other)
    assert remote.measure_as("a", found.checksum).checksum != found.checksum


def test_what_a_store_makes_of_the_checksums_of_parts_is_no_checksum(
    buckets: Buckets, bucket: str, remote: ObjectStore
) -> None:
    name = {"Bucket": bucket, "Key": "lake/a"}
    kept = {"ChecksumAlgorithm": "SHA256", "ChecksumType": "COMPOSITE"}
    upload = buckets.client.create_multipart_upload(**kept, **name)["UploadId"]
    parts = []
    for number, data in enumerate((os.urandom(5 << 20), b"the end"), 1):
        part = {"UploadId": upload, "PartNumber": number}
        stored = buckets.client.upload_part(Body=data, ChecksumAlgorithm="SHA256", **part, **name)
        parts.append({"PartNumber": number, "ETag": stored["ETag"], "ChecksumSHA256": stored["ChecksumSHA256"]})
    buckets.client.complete_multipart_upload(UploadId=upload, MultipartUpload={"Parts": parts}, **name)
    head = buckets.client.head_object(ChecksumMode="ENABLED", **name)
    assert "ChecksumSHA256" in head and head["ChecksumType"] == "COMPOSITE"
    assert remote.checksum("a").startswith("etag:")


def test_a_large_object_replaces_nothing(buckets: Buckets, bucket: str, remote: ObjectStore) -> None:
    remote.put_new("large", b"first")
    with pytest.raises(ObjectExists), remote.create("large") as file:
        file.write(b"x" * LARGE)
    assert remote.read("large") == b"first"
    assert buckets.uploads(bucket) == []


def test_an_upload_that_is_given_up_leaves_nothing(buckets: Buckets, bucket: str, remote: ObjectStore) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail(remote, "large", ZeroDivisionError(), size=LARGE)
    assert (buckets.keys(bucket), buckets.uploads(bucket)) == ([], [])


def test_uploads_that_others_left_are_ended(buckets: Buckets, bucket: str, remote: ObjectStore) -> None:
    for key in ("lake/inserts/1/a", "lake/inserts/1/b", "lake/inserts/10/c", "elsewhere/d"):
        buckets.client.create_multipart_upload(Bucket=bucket, Key=key)
    remote.put_new("inserts/1/x", b"1")
    assert remote.delete_folder("inserts/1") == 1
    assert buckets.uploads(bucket) == ["lake/inserts/10/c", "elsewhere/d"]
    assert remote.end_uploads(before=datetime(2000, 1, 1, tzinfo=UTC)) == 0
    assert remote.end_uploads(before=datetime.now(UTC)) == 1
    # What is not below the warehouse is somebody else's.
    assert buckets.uploads(bucket) == ["elsewhere/d"]


def test_a_folder_goes_with_the_marks_that_hadoop_makes(buckets: Buckets, bucket: str, remote: ObjectStore) -> None:
    for key in ("lake/a/", "lake/a/b/", "lake/a/b/file", "lake/ab/"):
        buckets.client.put_object(Bucket=bucket, Key=key, Body=b"")
    assert remote.delete_folder("a") == 1
    assert buckets.keys(bucket) == ["lake/ab/"]


def test_a_bucket_without_credentials_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InvalidSetting, match="no credentials"):
        ObjectStore(Warehouse("s3://bucket/lake"))


def test_credentials_come_from_a_profile_too(
    buckets: Buckets, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    profile = tmp_path / "credentials"
    profile.write_text("[lake]\naws_access_key_id = key\naws_secret_access_key = s3cret\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    store = ObjectStore(Warehouse(f"s3://{bucket}/lake", access=S3Access(endpoint=buckets.endpoint)))
    store.put_new("a", b"1")
    assert store.read("a") == b"1"


@pytest.mark.parametrize(
    ("root", "access"),
    [
        ("s3://", {}),
        ("s3://bucket?key=s3cret", {}),
        ("s3://bucket/a/../../other", {}),
        # Engines would look for these elsewhere than we do.
        ("s3://bucket//lake", {}),
        ("s3://bucket/la\nke", {}),
        ("s3://key:s3cret@bucket/lake", {}),
        ("s3://bucket/lake", {"endpoint": "no address"}),
        ("s3://bucket/lake", {"endpoint": "https://key:s3cret@host"}),
        ("s3://bucket/lake", {"endpoint": "http://a b"}),
        ("s3://bucket/lake", {"endpoint": "http://"}),
        ("s3://bucket/lake", {"endpoint": "http://[::1"}),
        ("s3://bucket/lake", {"endpoint": "http://key:s3cret@[::1"}),
        # What sends the requests would panic over these, when the first is to be sent.
        ("s3://bucket/lake", {"endpoint": "http://host:99999999"}),
        ("s3://bucket/lake", {"endpoint": "http://host:port"}),
        ("s3://bucket/lake", {"endpoint": "http://host/a b"}),
        ("s3://bucket/lake", {"endpoint": "http://host/\0"}),
        ("s3://bucket/lake", {"endpoint": "http://host?key=s3cret"}),
        ("s3://bucket/lake", {"access_key_id": "s3cret\n"}),
        ("s3://bucket/lake", {"secret_access_key": "s3cret\n"}),
        ("s3://bucket/lake", {"session_token": "s3cret\n"}),
        ("s3://bucket/lake", {"region": "eu-north-1\n"}),
        ("s3://bucket/lake", {"request_seconds": 1e300}),
        ("s3://bucket/lake", {"retry_seconds": 1e300}),
        ("s3://buck et/lake", {}),
        ("s3://bucket:99999999/lake", {}),
        ("s3://bu\0cket/lake", {}),
        ("s3://[bucket/lake", {}),
        ("s3://[key:s3cret@bucket/lake", {}),
        # What is recorded, and what engines are told, begins with s3://.
        ("S3://bucket/lake", {}),
        (" s3://bucket/lake", {}),
        ("s\n3://bucket/lake", {}),
        ("Memory://", {}),
        ("s3://bucket/lake", {"region": "eu west!"}),
        ("s3://bucket/lake", {"region": "x/../y", "endpoint": "http://127.0.0.1:1"}),
        ("s3://bucket/lake", {"secret_access_key": ""}),
        ("s3://bucket/lake", {"access_key_id": "", "secret_access_key": "", "session_token": "s3cret"}),
    ],
)
def test_a_bucket_that_cannot_be_reached_is_refused(root: str, access: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        ObjectStore(Warehouse(root, access=S3Access(**{"access_key_id": "k", "secret_access_key": "s", **access})))
    assert "s3cret" not in str(caught.value)


def test_the_clock_of_a_store_is_asked_without_a_trace_and_what_the_killed_left_goes(store: ObjectStore) -> None:
    store.put_new("a", b"1")
    (before,) = (item.modified for item in store.list())
    old, young = f"{objects._PROBES}/old", f"{objects._PROBES}/young"
    with pytest.MonkeyPatch.context() as patch:
        # All are as old as can be, but for the one that is asked about.
        patch.setattr(objects, "_PROBED", timedelta())
        store.put_new(old, b"")
        (left,) = (item.modified for item in store.list(objects._PROBES))
        while store.now() <= left:
            pass
    store.put_new(young, b"")
    assert store.now() >= before
    # Somebody may be asking at this very moment.
    assert {item.path for item in store.list()} == {"a", young}


def test_secrets_of_a_bucket_are_shown_nowhere(buckets: Buckets, bucket: str) -> None:
    given: dict[str, Any] = {**buckets.settings, "s3_session_token": "t0ken"}
    settings = Settings(**given)
    warehouse = in_bucket(buckets, bucket, s3_session_token="t0ken")
    for text in (repr(settings), repr(warehouse), repr(warehouse.access), str(settings.redacted())):
        assert SECRET not in text
        assert KEY not in text
        assert "t0ken" not in text


def test_who_debugs_sees_no_secret_of_a_bucket(buckets: Buckets, bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    store = ObjectStore(in_bucket(buckets, bucket, s3_session_token="t0ken"))
    with caplog.at_level(logging.DEBUG):
        store.put_new("a/b", b"1")
        assert store.read("a/b") == b"1"
        assert [found.path for found in store.list()] == ["a/b"]
        assert store.delete_folder("a") == 1
    # It is told what was asked for, and with which headers.
    assert "x-amz-security-token:***" in caplog.text
    assert "'Authorization': b'***'" in caplog.text
    for secret in (KEY, SECRET, "t0ken"):
        assert secret not in caplog.text


@pytest.mark.parametrize("between", ["", '<?xml version="1.0" encoding="UTF-8"?>', '<?xml version="1.0"?>\n'])
def test_of_what_a_store_answers_only_code_and_message_are_told(between: str) -> None:
    told = "<Error><Token-0>t0ken</Token-0><Code>ExpiredToken</Code><Message>too old</Message><Key>k</Key></Error>"
    assert reason_of(GenericError(f"PUT http://host/x - 400 Bad Request: {between}{told}")) == "ExpiredToken: too old"
    assert reason_of(GenericError("PUT http://host/x - 400: <html>t0ken")) == "PUT http://host/x - 400:"
    assert reason_of(GenericError("<html>t0ken")) == "GenericError"


def test_a_bucket_that_is_not_there_is_a_typed_error(buckets: Buckets) -> None:
    with pytest.raises(WarehouseNotWritable):
        in_bucket(buckets, "no-such-bucket").check_writable()

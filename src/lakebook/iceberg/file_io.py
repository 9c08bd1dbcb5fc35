"""PyIceberg's file interface over the warehouse's object store."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from pyiceberg.io import FileIO, InputFile, OutputFile

from lakebook.storage.objects import ObjectStore


class _Input(InputFile):
    def __init__(self, store: ObjectStore, location: str) -> None:
        super().__init__(location)
        self._store = store
        self._path = store.relative(location)

    def __len__(self) -> int:
        size = self._store.size(self._path)
        if size is None:
            raise FileNotFoundError(self.location)
        return size

    def exists(self) -> bool:
        return self._store.size(self._path) is not None

    def open(self, seekable: bool = True) -> Any:  # noqa: ARG002 - all of ours are
        return self._store.open(self._path)


class _Written:
    """A stream that completes its object when it is closed."""

    def __init__(self, store: ObjectStore, path: str, durable: bool) -> None:
        self._block = ExitStack()
        self._stream = self._block.enter_context(store.create(path, durable=durable))

    def write(self, data: bytes) -> int:
        self._stream.write(data)
        return len(data)

    def tell(self) -> int:
        return int(self._stream.tell())

    def close(self) -> None:
        self._block.close()

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._block.__exit__(*raised)


class _Output(OutputFile):
    def __init__(self, store: ObjectStore, location: str, durable: bool) -> None:
        super().__init__(location)
        self._durable = durable
        self._store = store
        self._path = store.relative(location)

    def __len__(self) -> int:
        return len(self.to_input_file())

    def exists(self) -> bool:
        return self.to_input_file().exists()

    def to_input_file(self) -> _Input:
        return _Input(self._store, self.location)

    def create(self, overwrite: bool = False) -> Any:  # noqa: ARG002 - nothing is written twice
        return _Written(self._store, self._path, self._durable)


class WarehouseIO(FileIO):
    """Reads and writes Iceberg's files in a warehouse. Nothing is ever overwritten.

    What is only staged need not be durable.
    """

    def __init__(self, store: ObjectStore, *, durable: bool = True) -> None:
        super().__init__()
        self._store = store
        self._durable = durable

    def new_input(self, location: str) -> InputFile:
        return _Input(self._store, location)

    def new_output(self, location: str) -> OutputFile:
        return _Output(self._store, location, self._durable)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        name = location if isinstance(location, str) else location.location
        self._store.delete_one(self._store.relative(name))

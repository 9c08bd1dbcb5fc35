"""Which files of a partition become one file: the choice itself, without a registry or Spark.

Every file that is rewritten ends either in one that is large enough to be left alone from then on, or in one
of twice its size or more. So a byte is rewritten at most once more than the target can be halved down to the
file it came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What has to be known of a file."""

    @property
    def id(self) -> int:
        """Its number; a later file has a larger one."""

    @property
    def file_size(self) -> int:
        """Its bytes."""


F = TypeVar("F", bound=Sized)


def longest_run(files: Iterable[F]) -> list[F]:
    """The most files, from the smallest on, of which none is larger than the others together."""
    ordered = sorted(files, key=lambda file: (file.file_size, file.id))
    total = found = 0
    for number, file in enumerate(ordered):
        if number and file.file_size <= total:
            found = number + 1
        total += file.file_size
    return ordered[:found]


def bundles_of(files: Iterable[F], worth: Mapping[int, int], *, target: int, small: int, least: int) -> list[list[F]]:
    """Files of a partition in bundles, each of which becomes one file; files that are in none stay as they are.

    Those in `worth` have deletes that are worth applying: they are rewritten whatever their size is, and are
    given with the bytes that will be left of them. Small files are, if there is a run of at least `least`.
    """
    marked: list[F] = []
    others: list[F] = []
    for file in files:
        (marked if file.id in worth else others).append(file)
    run = longest_run(file for file in others if file.file_size < small)
    if len(run) < least:
        run = []
    large = [[file] for file in marked if worth[file.id] >= small]
    # In the order in which they came: rows that came together stay together, and bounds stay narrow.
    rest = sorted([*run, *(file for file in marked if worth[file.id] < small)], key=lambda file: file.id)
    full, left = _packed(rest, worth, target, small)
    last = [*(file for file in left if file.id in worth), *longest_run(file for file in left if file.id not in worth)]
    return [*large, *full, *([last] if last else [])]


def _packed(files: Sequence[F], worth: Mapping[int, int], target: int, small: int) -> tuple[list[list[F]], list[F]]:
    """Bundles that are no longer small, and what is left over; each of the files is small."""
    full: list[list[F]] = []
    bundle: list[F] = []
    total = 0
    for file in files:
        size = worth.get(file.id, file.file_size)
        if total >= small and total + size > target:
            full.append(bundle)
            bundle, total = [], 0
        bundle.append(file)
        total += size
    if total >= small:
        full.append(bundle)
        bundle = []
    return full, bundle


def tasks_of(bundles: Sequence[tuple[object, int]], target: int, small: int) -> list[int]:
    """The task that writes each bundle, which is given by its partition and its bytes; tasks count from 0.

    A large bundle has a task to itself. Others share one, but never two of the same partition: a task writes
    one file for each partition.
    """
    tasks: list[int] = []
    number = -1
    shared: tuple[int, int, set[object]] | None = None
    for partition, size in bundles:
        if size >= small:
            number += 1
            tasks.append(number)
            continue
        if shared is None or shared[1] + size > target or partition in shared[2]:
            number += 1
            shared = (number, 0, set())
        tasks.append(shared[0])
        shared = (shared[0], shared[1] + size, {*shared[2], partition})
    return tasks

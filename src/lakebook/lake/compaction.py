"""Compaction: small files, and files of which many rows are deleted, become few files of the right size.

What is worth it, the registry's rows of files say; nothing is listed. Spark reads exactly the chosen files,
without deleted rows, and writes them in the table's sort order. The result is one version that changes no
row. A compaction gives way to every writer of the book: if a file it has read was ended meanwhile, if rows
of it were deleted, if a writer has declared that it is about to end files, or if an outside engine has
precedence, then its work is thrown away.

Whoever compacts a table has claimed it before, so that several workers share the tables and none does the work of
another. A claim is renewed while Spark works; what was done under one that another has taken over cannot land.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lakebook import failpoints
from lakebook.errors import ClaimLost, CompactionClaimed, FilesChanged, SchemaChanged
from lakebook.lake.attempts import Attempt
from lakebook.lake.bundles import bundles_of, tasks_of
from lakebook.lake.claims import held
from lakebook.lake.inserting import insert_data, one_clear_error, report
from lakebook.lake.lake import Lake
from lakebook.lake.leasing import Lease, acquire
from lakebook.lake.planning import Plan, files_of, make_plan
from lakebook.lake.position_deletes import DeletedRows
from lakebook.lake.properties import TARGET_SIZE, CompactionPolicy, compaction_policy
from lakebook.lake.reading import read_frame
from lakebook.lake.rewriting import of_files, require_same_rows
from lakebook.lake.steps import Steps
from lakebook.registry.compaction_claims import CompactionClaim, end_claim, renew_claim, settle_claim, take_claim
from lakebook.registry.inserts import COMPACTION
from lakebook.registry.maintenance import DONE, FAILED, YIELDED
from lakebook.registry.small_files import Partition, Run, live_since, runs_of, small_files
from lakebook.registry.table_files import (
    Committed,
    DeleteFile,
    NewFile,
    PlannedFile,
    TableChange,
    files_by_path,
    give_way,
)
from lakebook.registry.tables import TableRecord, current_table, refuse_mirror
from lakebook.registry.transactions import Transaction
from lakebook.spark import frames

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

#: Files that one version replaces at most, so that its transaction is short.
MOST_FILES = 10_000
# Partitions that are looked at for one version: more than it can take, since each has some files.
_MOST_PARTITIONS = 10_000
_NO_BOUND = 2**62
# Deletes are worth applying to a file from this share of its rows on, or from so many files of deletes.
_DELETED_SHARE = 0.1
_MANY_DELETES = 5
_DISTRIBUTION = "write.distribution-mode"

#: Somebody else had precedence, or was faster: work is lost, and nothing is wrong.
GAVE_WAY = (FilesChanged, SchemaChanged, ClaimLost)


@dataclass(frozen=True)
class Debt:
    """How much of a table is worth a compaction."""

    files: int = 0
    bytes: int = 0
    partitions: int = 0

    def __bool__(self) -> bool:
        return self.files > 0


@dataclass(frozen=True)
class CompactionReport:
    """What a compaction did; all zeros if it found nothing to do."""

    table: str
    versions: tuple[int, ...] = ()
    partitions: int = 0
    files_in: int = 0
    files_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    #: With those that were deleted.
    rows_in: int = 0
    rows_out: int = 0
    #: Files of deletes that are no longer needed.
    deletes: int = 0
    seconds: float = 0.0

    @property
    def gained(self) -> bool:
        """Whether there are fewer files now, or fewer deleted rows."""
        return self.files_out < self.files_in or self.rows_out < self.rows_in or self.deletes > 0

    def and_then(self, other: CompactionReport) -> CompactionReport:
        """Both together."""
        numbers = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name not in ("table", "seconds")
        }
        return CompactionReport(self.table, seconds=round(self.seconds + other.seconds, 6), **numbers)


# --- the entrances -------------------------------------------------------------


def compact(lake: Lake, table: TableRecord, spark: SparkSession, *, max_bytes: int | None = None) -> CompactionReport:
    """Compact a table until there is nothing to gain, or until so many bytes were rewritten.

    `FilesChanged` is raised if somebody else had precedence before anything was done, and `CompactionClaimed` if
    another worker compacts it.
    """
    budget = lake.settings.compact_bytes if max_bytes is None else max_bytes
    whole = CompactionReport(_name(table))
    while whole.bytes_in < budget:
        try:
            done = compact_once(lake, table, spark, max_bytes=budget - whole.bytes_in)
        except (*GAVE_WAY, CompactionClaimed):
            if not whole.versions:
                raise
            break
        whole = whole.and_then(done)
        if not done.versions or not done.gained:
            break
    return whole


def compact_once(
    lake: Lake, table: TableRecord, spark: SparkSession, *, max_bytes: int | None = None
) -> CompactionReport:
    """Make one version of what is most worth a compaction, or none if nothing is.

    `CompactionClaimed` is raised while another worker compacts the table.
    """
    refuse_mirror(table)
    begun = lake.clock.monotonic()
    budget = lake.settings.compact_bytes if max_bytes is None else max_bytes
    outcome, done = FAILED, CompactionReport(_name(table))
    try:
        if _may_gain(lake, table):
            lake.registry.read_with(lambda reader: give_way(reader, table, lake.clock.now_ms()))
            with claimed(lake, table) as claim:
                done = _compact(lake, table, spark, budget, claim)
        outcome = DONE
    except CompactionClaimed:
        outcome = DONE  # By another: nothing was begun here.
        raise
    except GAVE_WAY:
        outcome = YIELDED
        raise
    finally:
        if done.versions or outcome != DONE:
            lake.metrics.count_compaction(outcome, done.files_in, done.files_out, done.bytes_in, done.bytes_out)
    return replace(done, seconds=round(lake.clock.monotonic() - begun, 6))


@contextmanager
def claimed(lake: Lake, table: TableRecord) -> Iterator[CompactionClaim]:
    """Claim a table for a compaction while the block runs: nobody else compacts it meanwhile."""
    seconds = lake.settings.lease_seconds
    claim = lake.registry.write(lambda transaction: take_claim(transaction, table, seconds))
    renew = lambda transaction: renew_claim(transaction, claim, seconds)  # noqa: E731
    with held(lake, claim.token, renew, lambda transaction: end_claim(transaction, claim)):
        failpoints.reach("compact.claimed")
        yield claim


def debt_of(lake: Lake, table: TableRecord) -> Debt:
    """How much of a table is worth a compaction, from rows of the registry; files of deletes may be read."""
    policy = policy_of(lake, table)
    runs = _runs(lake, table, policy, _NO_BOUND, _NO_BOUND)
    marked = _Marked()
    if _has_deletes(lake, table):
        with acquire(lake, table) as lease:
            marked = _marked(_plan(lake, table, lease), MOST_FILES)
    partitions = {run.partition for run in runs} | set(marked.by_partition())
    return Debt(
        sum(run.files for run in runs) + len(marked.files),
        sum(run.bytes for run in runs) + sum(file.file_size for file in marked.files),
        len(partitions),
    )


def policy_of(lake: Lake, table: TableRecord) -> CompactionPolicy:
    """Whether and how a table is compacted, by its present properties."""
    policy = compaction_policy(lake, lake.metadata_of(table, table.schema_version).properties)
    # Small files of a topic's table are small segments: the topic merges those.
    owned = table.topic_id is not None or table.view_id is not None
    return replace(policy, enabled=False) if owned else policy


# --- choosing ------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What one version rewrites."""

    plan: Plan
    policy: CompactionPolicy
    #: Files that become one file, each with its partition.
    bundles: tuple[tuple[Partition, tuple[PlannedFile, ...]], ...]
    #: The bytes that will be left of files with deletes.
    left: Mapping[int, int]
    #: Files of deletes that are about none but these files.
    ended: tuple[DeleteFile, ...] = ()

    @cached_property
    def files(self) -> tuple[PlannedFile, ...]:
        """All files."""
        return tuple(file for _, bundle in self.bundles for file in bundle)

    @property
    def partitions(self) -> int:
        """In how many partitions they are."""
        return len({partition for partition, _ in self.bundles})

    @property
    def is_of_present_spec(self) -> bool:
        """Whether the rows of a file stay in one partition; all files are of one kind."""
        return _is_present(self.plan, self.bundles[0][0])

    @property
    def tasks(self) -> dict[str, int]:
        """Which task writes the rows of each file, by its location."""
        sizes = [
            (partition, sum(self.left.get(file.id, file.file_size) for file in bundle))
            for partition, bundle in self.bundles
        ]
        numbers = tasks_of(sizes, self.policy.target, self.policy.small)
        return {
            self.plan.location_of(file): number
            for number, (_, bundle) in zip(numbers, self.bundles, strict=True)
            for file in bundle
        }


def choose(lake: Lake, table: TableRecord, lease: Lease, max_bytes: int) -> Choice | None:
    """What is most worth a compaction in a version: of the partitions with the most files first."""
    plan, policy = _plan(lake, table, lease), policy_of(lake, table)
    marked = _marked(plan, MOST_FILES)
    runs = {run.partition: run for run in _runs(lake, table, policy, MOST_FILES, max_bytes)}
    picked = _picked(plan, runs, marked, max_bytes)
    members = _members(plan, policy, picked)
    bundles = [
        (partition, tuple(bundle))
        for partition, files in members.items()
        for bundle in bundles_of(files, picked.left, target=policy.target, small=policy.small, least=policy.least)
    ]
    if not bundles:
        return None
    choice = Choice(plan, policy, tuple(bundles), picked.left)
    return replace(choice, ended=marked.ended_with(choice.files))


def _plan(lake: Lake, table: TableRecord, lease: Lease) -> Plan:
    return make_plan(lake, table, lease.version, lease.schema_version, None)


def _runs(
    lake: Lake,
    table: TableRecord,
    policy: CompactionPolicy,
    most_files: int,
    most_bytes: int,
    most: int = _MOST_PARTITIONS,
) -> list[Run]:
    bounds = (most_files, most_bytes)
    return lake.registry.read_with(
        lambda reader: runs_of(reader, table.id, policy.small, policy.least, bounds, most),
        plan_once=False,
    )


def _is_present(plan: Plan, partition: Partition) -> bool:
    return bool(partition[0] == plan.shape.spec.spec_id)


@dataclass
class _Picked:
    """How much of each partition one version takes."""

    #: Small files, from the smallest on.
    runs: dict[Partition, int] = field(default_factory=dict)
    marked: dict[Partition, list[PlannedFile]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)


def _picked(plan: Plan, runs: Mapping[Partition, Run], marked: _Marked, max_bytes: int) -> _Picked:
    """The partitions with the most files, as many as the bounds allow; one file is always allowed."""
    by_partition = marked.by_partition()
    counts = {partition: run.files for partition, run in runs.items()}
    for partition, files in by_partition.items():
        counts[partition] = counts.get(partition, 0) + len(files)
    # Rows of an earlier spec's files land in partitions that only their writer knows: they go by themselves.
    present = [partition for partition in counts if _is_present(plan, partition)]
    picked, files_left, bytes_left = _Picked(), MOST_FILES, max_bytes
    for partition in sorted(present or counts, key=lambda item: -counts[item]):
        for file in by_partition.get(partition, ()):
            if files_left and (file.file_size <= bytes_left or not (picked.left or picked.runs)):
                picked.marked.setdefault(partition, []).append(file)
                picked.left[file.id] = marked.left[file.id]
                files_left, bytes_left = files_left - 1, bytes_left - file.file_size
        run = runs.get(partition)
        if run is not None and run.files <= files_left and run.bytes <= bytes_left:
            picked.runs[partition] = run.files
            files_left, bytes_left = files_left - run.files, bytes_left - run.bytes
    return picked


def _members(plan: Plan, policy: CompactionPolicy, picked: _Picked) -> dict[Partition, list[PlannedFile]]:
    """The files that were picked; small ones are looked up in one walk, and only these are kept."""
    members = {partition: list(files) for partition, files in picked.marked.items()}
    wanted = dict(picked.runs)
    for file in _small_files(plan, policy) if wanted else ():
        partition = (file.spec_id, file.partition_values)
        if file.id in picked.left or partition not in wanted:
            continue
        members.setdefault(partition, []).append(file)
        wanted[partition] -= 1
        if not wanted[partition]:
            del wanted[partition]
            if not wanted:
                break
    return members


def _small_files(plan: Plan, policy: CompactionPolicy) -> Iterator[PlannedFile]:
    after = (-1, 0)
    while True:
        start = after
        page = plan.lake.registry.read_with(
            lambda reader: small_files(reader, plan.table.id, policy.small, plan.version, start)  # noqa: B023 - called at once
        )
        if not page:
            return
        yield from page
        after = (page[-1].file_size, page[-1].id)


# --- deletes -------------------------------------------------------------------


@dataclass
class _Marked:
    """Files of which so many rows are deleted that it is worth applying the deletes."""

    files: list[PlannedFile] = field(default_factory=list)
    #: By the id of each, the bytes that will be left of it.
    left: dict[int, int] = field(default_factory=dict)
    wide: _WideDeletes | None = None

    def by_partition(self) -> dict[Partition, list[PlannedFile]]:
        """The files of each partition."""
        found: dict[Partition, list[PlannedFile]] = {}
        for file in self.files:
            found.setdefault((file.spec_id, file.partition_values), []).append(file)
        return found

    def ended_with(self, files: Iterable[PlannedFile]) -> tuple[DeleteFile, ...]:
        """Deletes about several files that name rows of no other live file than these."""
        return () if self.wide is None else self.wide.ended_with(files)


class _WideDeletes:
    """Files of deletes that are not about one file alone: which files they really name."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rows = DeletedRows(plan.lake.store)
        # How many live files each may still be needed for.
        self._needed = {delete.id: 0 for delete in plan.deletes if delete.referenced_path is None}

    def __bool__(self) -> bool:
        return bool(self._needed)

    def about(self, file: PlannedFile) -> tuple[list[DeleteFile], int]:
        """Those that may name rows of a file, and how many rows they name; none if they name no row."""
        found = [delete for delete in self._plan.deletes_for(file) if delete.referenced_path is None]
        rows = self._rows.of(self._plan.location_of(file), file.row_count, found) if found else None
        return (found, len(rows)) if rows is not None else ([], 0)

    def note(self, deletes: Iterable[DeleteFile]) -> None:
        """Remember that a live file needs them."""
        for delete in deletes:
            self._needed[delete.id] += 1

    def ended_with(self, files: Iterable[PlannedFile]) -> tuple[DeleteFile, ...]:
        """Those that are needed for none but these files."""
        left = dict(self._needed)
        for file in files:
            for delete in self.about(file)[0]:
                left[delete.id] -= 1
        return tuple(delete for delete in self._plan.deletes if left.get(delete.id) == 0)


def _may_gain(lake: Lake, table: TableRecord) -> bool:
    """Whether it is worth to look closer, for which a lease is taken."""
    return bool(_runs(lake, table, policy_of(lake, table), MOST_FILES, _NO_BOUND, 1)) or _has_deletes(lake, table)


def _has_deletes(lake: Lake, table: TableRecord) -> bool:
    return lake.registry.read_with(lambda reader: current_table(reader, table)).deleted_rows > 0


def _marked(plan: Plan, most: int) -> _Marked:
    """The files whose deletes are worth applying; at most so many."""
    if not plan.deletes:
        return _Marked()
    wide = _WideDeletes(plan)
    marked = _Marked(wide=wide)
    # Which files deletes about several of them name, only the deletes themselves know: all are looked at.
    for file in plan if wide else _named_files(plan):
        shared, gone = wide.about(file)
        wide.note(shared)
        alone = [delete for delete in plan.deletes_for(file) if delete.referenced_path is not None]
        gone = min(file.row_count, gone + sum(delete.row_count for delete in alone))
        many = len(shared) + len(alone) > _MANY_DELETES
        if gone and (many or gone >= _DELETED_SHARE * file.row_count) and len(marked.files) < most:
            marked.files.append(file)
            marked.left[file.id] = file.file_size * (file.row_count - gone) // file.row_count
    return marked


def _named_files(plan: Plan) -> Iterator[PlannedFile]:
    """The files that deletes about one file alone name."""
    paths = sorted({delete.referenced_path for delete in plan.deletes if delete.referenced_path is not None})
    rows = plan.lake.registry.read_with(lambda reader: files_by_path(reader, paths))
    live = [row["id"] for row in rows.values() if _is_visible(row, plan)]
    yield from files_of(plan, sorted(live))


def _is_visible(row: Mapping[str, Any], plan: Plan) -> bool:
    return (
        row["table_id"] == plan.table.id
        and not row["content"]
        and row["to_version"] is None
        and row["from_version"] <= plan.version
    )


# --- rewriting -----------------------------------------------------------------


def _compact(
    lake: Lake, table: TableRecord, spark: SparkSession, max_bytes: int, claim: CompactionClaim
) -> CompactionReport:
    steps = Steps(lake.clock)
    with one_clear_error(table), acquire(lake, table) as lease:
        choice = choose(lake, table, lease, max_bytes)
        if choice is None:
            return CompactionReport(_name(table))
        with begin(lake, table, choice) as attempt:
            frame = read_frame(spark, of_files(choice.plan, choice.files), lease)
            if choice.is_of_present_spec:
                tasks = choice.tasks
                frame = frames.by_file(frame, tasks, max(tasks.values()) + 1)
            files = insert_data(lake, table, attempt, frame, steps, lease.schema_version)
            return finish(lake, lease, attempt, choice, files, steps, claim)


def begin(lake: Lake, table: TableRecord, choice: Choice) -> Attempt:
    """An attempt at a compaction, whose writer makes one file of each bundle."""
    if choice.is_of_present_spec:
        # The tasks are made as they shall be, and a bundle may be up to half as large again as the target.
        writing = {_DISTRIBUTION: "none", TARGET_SIZE: str(2 * choice.policy.target)}
    else:
        writing = {_DISTRIBUTION: "hash", TARGET_SIZE: str(choice.policy.target)}
    return Attempt(lake, table, kind=COMPACTION, writing=writing)


def finish(
    lake: Lake,
    lease: Lease,
    attempt: Attempt,
    choice: Choice,
    files: Sequence[NewFile],
    steps: Steps,
    claim: CompactionClaim,
) -> CompactionReport:
    """Replace the chosen files by those that were written, in one version that changes no row."""
    table, inputs = attempt.table, choice.files

    def check(transaction: Transaction) -> None:
        settle_claim(transaction, table, claim)
        _refuse_returned(transaction, choice)

    rows = require_same_rows(of_files(choice.plan, inputs), lease, files)
    number = _sequence_number(lake, lease, choice)
    change = TableChange(
        "replace",
        [replace(file, sequence_number=number) for file in files],
        [*(file.id for file in inputs), *(delete.id for delete in choice.ended)],
        {"lakebook.compacted": f"{len(inputs)} files of {choice.partitions} partitions"},
        check=check,
        read_version=lease.version,
        yields=True,
    )
    failpoints.reach("compact.written")
    with steps.step("commit"):
        committed: Committed = attempt.commit(change)
    report(lake, table, attempt, change, committed, steps)
    return CompactionReport(
        _name(table),
        (committed.version,),
        choice.partitions,
        len(inputs),
        len(files),
        sum(file.file_size for file in inputs),
        sum(file.file_size for file in files),
        sum(file.row_count for file in inputs),
        rows,
        committed.removed_deletes,
    )


def _sequence_number(lake: Lake, lease: Lease, choice: Choice) -> int | None:
    """The data sequence number of what a compaction writes: that of the version it has read, if that is published.

    By it an engine knows that deletes which came after that version, and no earlier ones, may be about the
    rows. For a version that is not published there is no number yet, and then the number of the compaction's
    own snapshot is as good: deletes between the two that touch the files make the compaction fail, so there
    are none. That is also taken while deletes about several files are live: with the number of the snapshot
    that brought them they would seem to be about the new files, and would be read in vain.
    """
    pointer = lake.publisher.pointer(lease.table)
    if pointer is None or pointer.version != lease.version:
        return None
    return None if any(delete.referenced_path is None for delete in choice.plan.deletes) else pointer.last_sequence


def _refuse_returned(transaction: Transaction, choice: Choice) -> None:
    """Refuse to end deletes that a file needs which came, or came back, after they were looked at."""
    if not choice.ended:
        return
    for file in live_since(transaction, choice.plan.table.id, choice.plan.version):
        for delete in choice.ended:
            same = (delete.spec_id, delete.partition_values) == (file.spec_id, file.partition_values)
            if same and delete.applies_to(file):
                raise FilesChanged(
                    "files came back meanwhile of which rows are deleted",
                    on=choice.plan.table.shown,
                    remedy="Try again",
                )


def _name(table: TableRecord) -> str:
    return f"{table.namespace}.{table.name}"

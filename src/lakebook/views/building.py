"""Building a range of a view: claim it, read its sources, write one file, and enter it in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakebook import failpoints
from lakebook.errors import ClaimLost, CommitOutcomeUnknown, LakebookError, PublishFailed, RegistryCorrupt
from lakebook.iceberg.sql_names import INSTANCE
from lakebook.lake.attempts import Attempt
from lakebook.lake.claims import held
from lakebook.lake.cleaning import Cleaner
from lakebook.lake.inserting import insert_data, one_clear_error
from lakebook.lake.lake import Lake
from lakebook.lake.properties import TARGET_SIZE
from lakebook.lake.steps import Steps
from lakebook.registry.claims import Claim, end_claim, is_frozen, renew_claim, settle_claim, take_claim
from lakebook.registry.file_stats import span_of_stats
from lakebook.registry.losses import losses_between
from lakebook.registry.ranges import NewRange, Range, enter_range, outline_of, replaced_by, retire_ranges
from lakebook.registry.table_files import Committed, NewFile, TableChange, commit_change, files_by_path
from lakebook.registry.tables import TableRecord, locked_table
from lakebook.registry.transactions import Transaction
from lakebook.registry.views import ViewRecord, view_table
from lakebook.spark import queries
from lakebook.streams.metadata_store import MetadataStore
from lakebook.views.definition import definition_of
from lakebook.views.planning import FROZEN, RangeSpec, state_of
from lakebook.views.shaping import table_for
from lakebook.views.sources import opened
from lakebook.views.times import extent

if TYPE_CHECKING:
    from lakebook.spark.types import DataFrame, SparkSession

BUILT, EMPTY, UP_TO_DATE = "built", "empty", "up to date"
# However many bytes a range has, it is one file.
_ONE_FILE = {TARGET_SIZE: str(2**62)}


@dataclass(frozen=True)
class Built:
    """What became of a range."""

    begin: int
    end: int
    outcome: str
    rows: int = 0
    #: Ranges in whose place it came.
    replaced: int = 0


@contextmanager
def claimed(
    lake: Lake, view: ViewRecord, instance: str, begin: int, end: int
) -> Iterator[tuple[Claim, ViewRecord, list[Range]]]:
    """Claim a range while the block runs; with the view and what is built in it, as they are under the claim.

    Whatever fails there after another has taken it over is `ClaimLost`.
    """
    seconds = lake.settings.lease_seconds
    claim, current, ranges = lake.registry.write(
        lambda transaction: take_claim(transaction, view, instance, begin, end, seconds)
    )
    renew = lambda transaction: renew_claim(transaction, claim, seconds)  # noqa: E731
    with held(lake, claim.token, renew, lambda transaction: end_claim(transaction, claim)):
        failpoints.reach("view.claimed")
        try:
            yield claim, current, ranges
        except (ClaimLost, CommitOutcomeUnknown, PublishFailed):
            raise  # With a commit that was made, or may have been, the claim has gone as well.
        except Exception as error:
            _refuse_lost(lake, view, claim, error)
            raise


def _refuse_lost(lake: Lake, view: ViewRecord, claim: Claim, error: Exception) -> None:
    """Raise `ClaimLost` if the claim is another's by now: one that was frozen fails at whatever it finds gone."""
    try:
        # That it ends here is as well: what was to be done under it has failed.
        lake.registry.write(lambda transaction: settle_claim(transaction, view, claim))
    except ClaimLost as lost:
        raise lost from error
    except LakebookError:
        return  # If nobody can tell, or the view was dropped, it is what it was.


def build_range(
    lake: Lake,
    metadata: MetadataStore,
    spark: SparkSession,
    view: ViewRecord,
    instance: str,
    spec: RangeSpec,
    *,
    force: bool = False,
) -> Built:
    """Build a range, unless another worker has built it meanwhile; `RangeClaimed` while one does.

    What has become part of a wider range meanwhile is built with all of that. But not by force where that is frozen:
    it would lose rows of which nobody has spoken.
    """
    with claimed(lake, view, instance, spec.begin, spec.end) as (claim, current, ranges):
        wider = _wider(spec, ranges)
        if wider is None:
            return _build_claimed(lake, metadata, spark, current, instance, claim, ranges, force=force)
        force = force and all(item.frozen_at is None for item in ranges)
    return build_range(lake, metadata, spark, view, instance, wider, force=force)


def _wider(spec: RangeSpec, ranges: Sequence[Range]) -> RangeSpec | None:
    """The range that covers a planned one and all that is built there; none if nothing reaches beyond it."""
    extents = [extent(item) for item in ranges]
    begin = min([spec.begin, *(low for low, _ in extents)])
    end = max([spec.end, *(high for _, high in extents)])
    return None if (begin, end) == (spec.begin, spec.end) else RangeSpec(begin, end, spec.state)


def _build_claimed(
    lake: Lake,
    metadata: MetadataStore,
    spark: SparkSession,
    current: ViewRecord,
    instance: str,
    claim: Claim,
    ranges: Sequence[Range],
    *,
    force: bool,
) -> Built:
    lost = lake.registry.read_with(lambda reader: losses_between(reader, current.id, claim.begin, claim.end))
    built = [outline_of(item, current.schema_hash) for item in ranges]
    now = RangeSpec(claim.begin, claim.end, state_of(built, claim.begin, claim.end, lost))
    if not now.is_due(force=force):
        return Built(claim.begin, claim.end, FROZEN if now.state == FROZEN else UP_TO_DATE)
    with opened(lake, metadata, spark, current, claim.begin, claim.end) as sources:
        if not force and lake.registry.read_with(lambda reader: is_frozen(reader, claim)):
            # Rows have gone before they were pinned: a build would not have them.
            return Built(claim.begin, claim.end, FROZEN)
        query = definition_of(current).query
        table = lake.registry.read_with(lambda reader: view_table(reader, current, instance))
        if sources.is_empty and query.is_empty_of_nothing and table is not None:
            return _enter_nothing(lake, current, instance, table, claim, sources.source_hash)
        parameters = {INSTANCE: instance} if INSTANCE in query.parameters else {}
        with queries.query_over(spark, sources.frames, query.over, parameters) as frame:
            return _write(lake, current, instance, claim, frame, sources.source_hash)


def _write(lake: Lake, view: ViewRecord, instance: str, claim: Claim, frame: DataFrame, source_hash: str) -> Built:
    table = table_for(lake, view, instance, queries.optional_schema(frame))
    return enter_frame(lake, view, instance, table, claim, frame, source_hash, lambda ranges: None)


def _enter_nothing(
    lake: Lake, view: ViewRecord, instance: str, table: TableRecord, claim: Claim, source_hash: str
) -> Built:
    """Enter a range without rows, without Spark: of its sources the registry knows no row."""
    with Attempt(lake, table, writes=False, by_view=True) as attempt:
        made = _described(lake, view, table, claim, (), source_hash, ())
        built = insert_partition(lake, view, instance, table, claim, attempt, made, (), lambda _: None, "overwrite")
    if built.replaced:
        tidy(lake, table)
    return built


def enter_frame(
    lake: Lake,
    view: ViewRecord,
    instance: str,
    table: TableRecord,
    claim: Claim,
    frame: DataFrame,
    source_hash: str,
    check: Callable[[Sequence[Range]], None],
    *,
    operation: str = "overwrite",
    rows: int | None = None,
) -> Built:
    """Write the rows of a claimed range as one file, and enter it in the place of what is built there.

    `check` is asked, under all locks, whether it may take the place of these ranges. `rows`, where it is known
    before, is how many it must have.
    """
    steps = Steps(lake.clock)
    sort_by = [name for name in definition_of(view).sort_by if name in frame.columns]
    with one_clear_error(table), Attempt(lake, table, writing=_ONE_FILE, by_view=True) as attempt:
        files = insert_data(lake, table, attempt, queries.as_one_file(frame, sort_by), steps)
        written = sum(file.row_count for file in files)
        if len(files) > 1 or written != (written if rows is None else rows):
            raise RegistryCorrupt(
                f"a range was written as {len(files)} files of {written} rows", on=view.shown, remedy="Try again"
            )
        failpoints.reach("view.built")
        made = _described(lake, view, table, claim, files, source_hash, tuple(sort_by))
        built = insert_partition(lake, view, instance, table, claim, attempt, made, files, check, operation)
    tidy(lake, table)
    return built


def insert_partition(
    lake: Lake,
    view: ViewRecord,
    instance: str,
    table: TableRecord,
    claim: Claim,
    attempt: Attempt,
    made: NewRange,
    files: Sequence[NewFile],
    check: Callable[[Sequence[Range]], None],
    operation: str,
) -> Built:
    """Enter a built range, its file and footer, and retire what it replaces: in one transaction."""
    replaced: list[Range] = []

    def work(transaction: Transaction) -> Committed | None:
        locked_table(transaction, table)
        stale, frozen = settle_claim(transaction, view, claim)
        replaced[:] = replaced_by(transaction, view.name, instance, made.begin, made.end)
        check(replaced)
        # What moves from several files into one stays as it was.
        kept = operation == "replace"
        stale = stale or (kept and any(item.stale_at is not None for item in replaced))
        frozen = frozen or any(item.frozen_at is not None for item in replaced)
        # Built by force, from what is left.
        frozen = frozen or (not kept and bool(losses_between(transaction, view.id, made.begin, made.end)))
        retire_ranges(transaction, view.name, replaced)
        enter_range(transaction, view.name, instance, made, stale=stale, frozen=frozen)
        done = change_files(transaction, table, operation, files, replaced, attempt.commit_id)
        failpoints.reach("view.written")
        return done

    try:
        done = lake.registry.write(work, commit_id=attempt.commit_id)
    except CommitOutcomeUnknown:
        attempt.outcome_unknown = True
        raise
    attempt.committed = done or Committed(table.version, table.last_modified)
    failpoints.reach("view.committed")
    if done is not None:
        lake.changed(table, done.version)
    return Built(made.begin, made.end, BUILT if files else EMPTY, made.num_rows, len(replaced))


def change_files(
    transaction: Transaction,
    table: TableRecord,
    operation: str,
    files: Sequence[NewFile],
    replaced: Sequence[Range],
    commit_id: str,
    *,
    gone: bool = False,
) -> Committed | None:
    """Make a version of the view's table in which files come in the place of ranges; none if there are none.

    `gone` says that the ranges are retired: a view of this view keeps what it has of them. A range that is built
    anew and has no rows any more is another matter.
    """
    paths = [item.file_path for item in replaced if item.file_path is not None]
    rows = files_by_path(transaction, paths)
    ids = [row["id"] for row in rows.values() if row["table_id"] == table.id and row["to_version"] is None]
    if len(ids) != len(paths):
        raise RegistryCorrupt(
            f"{len(paths)} ranges have {len(ids)} files", on=table.shown, remedy="Run lakebook verify"
        )
    if not files and not ids:
        return None
    if operation != "replace":
        operation = "overwrite" if files and ids else "append" if files else "delete"
    # The paths are the view's own, and nobody else changes the table.
    change = TableChange(operation, files, ids, checked=True, waits=False, by_view=True, gone=gone)
    return commit_change(transaction, table, change, commit_id)


def _described(
    lake: Lake,
    view: ViewRecord,
    table: TableRecord,
    claim: Claim,
    files: Sequence[NewFile],
    source_hash: str,
    sort_by: tuple[str, ...],
) -> NewRange:
    if not files:
        return NewRange(claim.begin, claim.end, view.schema_hash, source_hash, sort_order=sort_by)
    (file,) = files
    least, most = _event_times(lake, view, table, file)
    return NewRange(
        claim.begin,
        claim.end,
        view.schema_hash,
        source_hash,
        file.row_count,
        file.file_path,
        file.file_size,
        least,
        most,
        sort_by,
    )


def event_time_field(lake: Lake, view: ViewRecord, table: TableRecord) -> str | None:
    """The column of a view's own rows that is their event time, if it has one of that name and type."""
    wanted = definition_of(view).event_time
    for field in lake.shape_of(table, table.schema_version).schema.fields:
        if field.name == wanted and str(field.field_type) in ("timestamp", "timestamptz"):
            return wanted
    return None


def _event_times(lake: Lake, view: ViewRecord, table: TableRecord, file: NewFile) -> tuple[int | None, int | None]:
    """The bounds of the rows' own event time."""
    name = event_time_field(lake, view, table)
    fields = {field.name: field.field_id for field in lake.shape_of(table, file.schema_version).schema.fields}
    for stats in file.stats:
        if name is not None and stats.field_id == fields.get(name) and stats.lower is not None:
            span = span_of_stats(stats)
            return (None, None) if span is None else span
    return None, None


def tidy(lake: Lake, table: TableRecord) -> None:
    """Let go of former versions: ranges of views have no history. What fails, the janitor does later."""
    with suppress(LakebookError):
        Cleaner(lake).expire(table)

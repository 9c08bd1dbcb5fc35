"""`lakebook tables`: create, describe, read and change tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from lakebook.book import Book
from lakebook.cli.commands import (
    BookGroup,
    Place,
    confirm,
    json_option,
    limit_option,
    moment_given,
    namespace_option,
    pairs_of,
    pass_place,
    property_option,
    spark_log_option,
    walk,
    yes_option,
)
from lakebook.cli.output import advancing, print_fields, print_json, print_line, print_table, working
from lakebook.cli.spark import spark_started
from lakebook.clock import to_datetime
from lakebook.errors import InvalidTable, NamespaceNotFound, SparkUnsuitable
from lakebook.names import shown
from lakebook.registry.table_files import PlannedFile
from lakebook.registry.tables import TableRecord

if TYPE_CHECKING:
    # These load Arrow and PyIceberg, for which no other command shall wait.
    from lakebook.iceberg.evolution import SchemaUpdate
    from lakebook.lake.inserting import InsertReport
    from lakebook.lake.published import PublishReport
    from lakebook.lake.table import Table, TableDescription
    from lakebook.lake.tagging import Tag

_FORMATS = click.Choice(["parquet", "json"])

_where_option = click.option("--where", metavar="CONDITION", help='Only rows of this condition, such as "id > 5".')
_version_option = click.option("--version", type=int, help="The version to look at.  [default: the newest]")
_as_of_option = click.option("--as-of", metavar="ISO", help="The version of this time (UTC unless it says otherwise).")


@click.group(cls=BookGroup)
def tables() -> None:
    """Create, describe, read and change tables.

    A table is named like orders, or like sales.orders with its namespace.
    """


# --- tables as a whole -------------------------------------------------------------


@tables.command()
@click.argument("name")
@click.option("--schema", metavar="DDL", required=True, help='The columns, such as "id BIGINT NOT NULL, name STRING".')
@click.option("--partition-by", metavar="TERM", multiple=True, help='Such as "day(at)"; can be given several times.')
@click.option("--sort-by", metavar="TERM", multiple=True, help='Such as "id DESC"; can be given several times.')
@click.option("--format", "file_format", type=_FORMATS, default="parquet", show_default=True, help="The files' format.")
@click.option("--compression", metavar="CODEC", help="The files' codec.  [default: zstd, and gzip for json]")
@property_option
@namespace_option
@json_option
@pass_place
def create(
    place: Place,
    name: str,
    schema: str,
    partition_by: tuple[str, ...],
    sort_by: tuple[str, ...],
    file_format: str,
    compression: str | None,
    properties: tuple[str, ...],
    namespace: str | None,
    as_json: bool,
) -> None:
    """Create the table NAME."""
    pairs = pairs_of(properties, f"table {shown(name)}", InvalidTable)
    with place.open() as book:
        made = book.tables.create(
            name,
            schema,
            namespace=namespace,
            partition_by=partition_by,
            sort_by=sort_by,
            format=file_format,
            compression=compression,
            properties=pairs,
        ).describe()
    if as_json:
        print_json(made)
    else:
        print_line(f"created table {_full_name(made)} with {len(made.columns)} column(s)")


@tables.command("list")
@click.option("--namespace", help="Only tables of this namespace.  [default: all]")
@click.option("--prefix", default="", help="Only tables whose names begin with this.")
@limit_option
@json_option
@pass_place
def list_tables(place: Place, namespace: str | None, prefix: str, limit: int | None, as_json: bool) -> None:
    """List the tables in the order of their names."""
    with place.open() as book:
        if namespace is None:
            found = list(islice(_of_every_namespace(book, prefix), limit))
        else:
            found = list(_of_namespace(book, namespace, prefix, limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ("table", "format", "version", "rows", "files", "bytes", "changed"),
        [
            (
                _full_name(table),
                table.format,
                table.version,
                table.row_count,
                table.file_count,
                table.total_size,
                table.last_modified,
            )
            for table in found
        ],
    )


def _of_namespace(book: Book, namespace: str, prefix: str, limit: int | None = None) -> Iterator[TableRecord]:
    return walk(lambda after, size: book.tables.list(namespace, prefix=prefix, after=after, limit=size), limit)


def _of_every_namespace(book: Book, prefix: str) -> Iterator[TableRecord]:
    for namespace in walk(lambda after, size: book.tables.list_namespaces(after=after, limit=size), None):
        # It may be dropped while the ones before it are listed.
        with suppress(NamespaceNotFound):
            yield from _of_namespace(book, namespace.name, prefix)


@tables.command()
@click.argument("name")
@namespace_option
@json_option
@pass_place
def describe(place: Place, name: str, namespace: str | None, as_json: bool) -> None:
    """Describe the table NAME.

    It has columns with their ids, partitioning, totals, properties, and what it is published as.
    """
    with place.open() as book:
        described = book.table(name, namespace=namespace).describe()
    if as_json:
        print_json(described)
    else:
        _print_description(described)


def _print_description(described: TableDescription) -> None:
    print_fields(
        {
            "table": _full_name(described),
            "id": described.id,
            "uuid": described.table_uuid,
            "format": f"{described.format}, {described.compression}",
            "version": described.version,
            "schema version": described.schema_version,
            "partitioned by": ", ".join(described.partition_by) or None,
            "sorted by": ", ".join(described.sort_by) or None,
            "rows": described.row_count,
            "files": described.file_count,
            "bytes": described.total_size,
            "created": described.created_at,
            "changed": described.last_modified,
            "published": described.published_version,
            "metadata": described.metadata_location,
        }
    )
    print_line("")
    print_table(
        ("id", "column", "type", "required", "doc"),
        [(column.field_id, column.name, column.type, column.required, column.doc) for column in described.columns],
    )
    if described.properties:
        print_line("")
        print_table(("property", "value"), sorted(described.properties.items()))


@tables.command()
@click.argument("name")
@click.argument("new_name", metavar="NEW")
@namespace_option
@click.option("--new-namespace", help="The namespace to move it to.  [default: as NEW says, or the same]")
@json_option
@pass_place
def rename(
    place: Place, name: str, new_name: str, namespace: str | None, new_namespace: str | None, as_json: bool
) -> None:
    """Give the table NAME the name NEW."""
    with place.open() as book:
        moved = book.tables.rename(name, new_name, namespace=namespace, new_namespace=new_namespace).record
    if as_json:
        print_json(moved)
    else:
        print_line(f"the table is now {_full_name(moved)}")


@tables.command()
@click.argument("name")
@namespace_option
@yes_option
@json_option
@pass_place
def drop(place: Place, name: str, namespace: str | None, yes: bool, as_json: bool) -> None:
    """Drop the table NAME. Its files are deleted when nobody reads them any more."""
    with place.open() as book:
        record = book.table(name, namespace=namespace).record
        full_name = _full_name(record)
        confirm(f"Drop table {full_name} with its {record.row_count} row(s)?", yes=yes)
        book.tables.drop(record.name, namespace=record.namespace)
    if as_json:
        print_json({"dropped": full_name})
    else:
        print_line(f"dropped table {full_name}")


@tables.command()
@click.argument("name")
@namespace_option
@limit_option
@json_option
@pass_place
def history(place: Place, name: str, namespace: str | None, limit: int | None, as_json: bool) -> None:
    """List the versions of the table NAME.

    Those that are kept, the newest first.
    """
    with place.open() as book:
        table = book.table(name, namespace=namespace)
        found = list(walk(lambda after, size: table.history(after=after, limit=size), limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ("version", "operation", "schema", "added files", "added rows", "removed files", "removed rows", "committed"),
        [
            (
                version.version,
                version.operation,
                version.schema_version,
                version.added_files,
                version.added_rows,
                version.removed_files,
                version.removed_rows,
                version.committed_at,
            )
            for version in found
        ],
    )


@tables.command("set")
@click.argument("name")
@click.argument("pairs", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--unset", "unsets", metavar="KEY", multiple=True, help="Remove a key; can be given several times.")
@namespace_option
@json_option
@pass_place
def set_properties(
    place: Place, name: str, pairs: tuple[str, ...], unsets: tuple[str, ...], namespace: str | None, as_json: bool
) -> None:
    """Set properties of the table NAME.

    Without a change they are printed.
    """
    on = f"table {shown(name)}"
    changes: dict[str, str | None] = {**pairs_of(pairs, on, InvalidTable)}
    for key in unsets:
        if key in changes:
            raise InvalidTable(f"{shown(key)} is given twice", on=on, remedy="Give every key once")
        changes[key] = None
    with place.open() as book:
        table = book.table(name, namespace=namespace)
        properties = table.set_properties(**changes) if changes else table.metadata.properties
    if as_json:
        print_json(properties)
    else:
        print_fields(dict(sorted(properties.items())))


# --- files and rows ----------------------------------------------------------------


@tables.command()
@click.argument("name")
@_where_option
@_version_option
@_as_of_option
@namespace_option
@limit_option
@json_option
@pass_place
def files(
    place: Place,
    name: str,
    where: str | None,
    version: int | None,
    as_of: str | None,
    namespace: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the files of the table NAME.

    With --where only those that can have such rows, as a reader would plan them.
    """
    moment = moment_given(as_of, "--as-of")
    with place.open() as book:
        plan = book.table(name, namespace=namespace).plan(where, version=version, as_of=moment)
        found = list(islice(plan, limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ("path", "rows", "bytes", "row groups", "partition"),
        [
            (file.file_path, file.row_count, file.file_size, _row_groups(file), file.partition_path or None)
            for file in found
        ],
    )


def _row_groups(file: PlannedFile) -> str:
    every = str(file.row_group_count)
    return every if file.row_groups is None else f"{len(file.row_groups)} of {every}"


@tables.command()
@click.argument("name")
@_where_option
@click.option("--columns", metavar="A,B", help="Only these columns, in this order.  [default: all]")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Print at most this many rows."
)
@_version_option
@_as_of_option
@namespace_option
@json_option
@pass_place
def read(
    place: Place,
    name: str,
    where: str | None,
    columns: str | None,
    limit: int,
    version: int | None,
    as_of: str | None,
    namespace: str | None,
    as_json: bool,
) -> None:
    """Print rows of the table NAME, without Spark.

    With --json every row is a line. Decimals and times are texts there, and bytes are base64.
    """
    from lakebook.cli.rows import cell, plain_rows

    moment = moment_given(as_of, "--as-of")
    wanted = None if columns is None else list(dict.fromkeys(name.strip() for name in columns.split(",")))
    with place.open() as book, book.table(name, namespace=namespace).pin(version=version, as_of=moment) as pinned:
        plan = pinned.plan(where)
        names = [field.name for field in plan.schema.fields] if wanted is None else wanted
        rows = islice(
            (row for batch in pinned.to_batches(where, wanted) for row in plain_rows(batch.slice(0, limit))), limit
        )
        if as_json:
            for row in rows:
                print_json(row, line=True)
            return
        found = [tuple(map(cell, row.values())) for row in rows]
    print_table(names, found)


@tables.command()
@click.argument("name")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--format", "file_format", type=_FORMATS, required=True, help="The format of the files to read.")
@click.option(
    "--ignore-unknown", is_flag=True, help="Leave out keys of JSON that the table has no column for.  [default: refuse]"
)
@namespace_option
@spark_log_option
@json_option
@pass_place
def insert(
    place: Place,
    name: str,
    paths: tuple[str, ...],
    file_format: str,
    ignore_unknown: bool,
    namespace: str | None,
    spark_log: bool,
    as_json: bool,
) -> None:
    """Insert rows of files into the table NAME.

    PATH is a file or a folder, wherever Spark can read it.
    """
    if ignore_unknown and file_format != "json":
        raise click.UsageError("--ignore-unknown needs --format json.")
    with place.open() as book:
        # Looked up before Spark is started, which takes a while.
        table = book.table(name, namespace=namespace)
        with spark_started(book, show_log=spark_log) as spark, working("inserting"):
            if file_format == "json":
                report = table.insert_json(spark, *paths, unknown="ignore" if ignore_unknown else "error")
            else:
                report = table.insert_parquet(spark, *paths)
    _print_inserted(report, as_json=as_json)


@tables.command("add-files")
@click.argument("name")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@namespace_option
@json_option
@pass_place
def add_files(place: Place, name: str, paths: tuple[str, ...], namespace: str | None, as_json: bool) -> None:
    """Add files of the warehouse to the table NAME.

    They lie there already, and PATH is relative to the warehouse. None of them is copied.
    """
    with place.open() as book, working("measuring"):
        report = book.table(name, namespace=namespace).add_files(paths)
    _print_inserted(report, as_json=as_json)


def _print_inserted(report: InsertReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    elif report.files:
        print_line(
            f"inserted {report.rows} row(s) in {report.files} file(s) of {report.bytes} bytes into {report.table},"
            f" which is now at version {report.version}"
        )
    else:
        print_line(f"there were no rows; {report.table} is as it was")


@tables.command("delete-rows")
@click.argument("name")
@click.option("--where", metavar="CONDITION", required=True, help='The rows to delete, such as "id > 5".')
@namespace_option
@spark_log_option
@json_option
@pass_place
def delete_rows(place: Place, name: str, where: str, namespace: str | None, spark_log: bool, as_json: bool) -> None:
    """Delete rows of the table NAME.

    Spark is started only where files have to be rewritten, because some of their rows stay.
    """
    with place.open() as book:
        table = book.table(name, namespace=namespace)
        try:
            with working("deleting"):
                report = table.delete(where)
        except SparkUnsuitable:
            with spark_started(book, show_log=spark_log) as spark, working("rewriting"):
                report = table.delete(where, spark=spark)
    deleted = report.removed_rows - report.rows
    if as_json:
        print_json({"deleted_rows": deleted, **vars(report)})
    elif deleted:
        print_line(f"deleted {deleted} row(s) from {report.table}, which is now at version {report.version}")
    else:
        print_line(f"no row matches; {report.table} is as it was")


# --- what other engines see --------------------------------------------------------


@tables.command()
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Publish all tables that have something to publish.")
@namespace_option
@json_option
@click.pass_context
def publish(context: click.Context, name: str | None, every: bool, namespace: str | None, as_json: bool) -> None:
    """Publish the table NAME, or all tables, as Iceberg.

    Every version that is not published yet gets into a snapshot.

    The exit code is 1 if a table could not be published.
    """
    if (name is None) != every or (every and namespace is not None):
        raise click.UsageError("Name a table, or give --all.")
    place = context.find_object(Place)
    assert place is not None
    if name is not None:
        with place.open() as book, working("publishing"):
            done = book.table(name, namespace=namespace).publish()
        print_json(done) if as_json else _print_published(done)
        return
    with place.open() as book, advancing("publishing") as say:
        pending = book.publish_pending(say)
    if as_json:
        print_json(pending)
    else:
        for done in pending.published:
            _print_published(done)
        for failed, why in pending.failed:
            print_line(f"failed: {failed}: {why}")
        print_line(f"published {len(pending.published)} table(s), {len(pending.failed)} failed")
    context.exit(1 if pending.failed else 0)


def _print_published(done: PublishReport) -> None:
    print_line(f"{done.table} is published at version {done.version}: {done.metadata_location}")


@tables.command()
@click.argument("name")
@click.argument("metadata")
@namespace_option
@json_option
@pass_place
def register(place: Place, name: str, metadata: str, namespace: str | None, as_json: bool) -> None:
    """Take an Iceberg table that lies in the warehouse as the table NAME.

    METADATA is the address of its metadata file. No data is rewritten.
    """
    with place.open() as book, working("reading metadata"):
        record = book.tables.register(name, metadata, namespace=namespace).record
    if as_json:
        print_json(record)
        return
    print_line(f"registered {record.namespace}.{record.name}: {record.row_count} rows in {record.file_count} files")


@tables.command()
@click.argument("name")
@namespace_option
@json_option
@pass_place
def snapshots(place: Place, name: str, namespace: str | None, as_json: bool) -> None:
    """List the Iceberg snapshots of the table NAME.

    Those that its published metadata lists, the oldest first.
    """
    with place.open() as book:
        found = book.table(name, namespace=namespace).snapshots()
    if as_json:
        print_json(found)
        return
    print_table(
        ("snapshot", "version", "sequence", "operation", "added rows", "deleted rows", "rows", "committed"),
        [
            (
                snapshot.snapshot_id,
                snapshot.version,
                snapshot.sequence_number,
                snapshot.summary.get("operation"),
                _number(snapshot.summary.get("added-records")),
                _number(snapshot.summary.get("deleted-records")),
                _number(snapshot.summary.get("total-records")),
                to_datetime(snapshot.timestamp_ms),
            )
            for snapshot in found
        ],
    )


def _number(text: str | None) -> int | None:
    # An engine from outside may have written anything there.
    return int(text) if text is not None and text.isdecimal() else None


@tables.command("tag")
@click.argument("table_name", metavar="TABLE")
@click.argument("name")
@click.option("--version", type=int, help="The version to keep.  [default: the newest]")
@click.option("--keep-seconds", type=float, metavar="S", help="Let it go after this time.  [default: keep it for good]")
@namespace_option
@json_option
@pass_place
def tag_table(
    place: Place,
    table_name: str,
    name: str,
    version: int | None,
    keep_seconds: float | None,
    namespace: str | None,
    as_json: bool,
) -> None:
    """Keep a state of the TABLE under the tag NAME.

    Every engine can read it by that name, and its files stay until the tag is removed. What is not
    published yet is published first.
    """
    with place.open() as book, working("tagging"):
        table = book.table(table_name, namespace=namespace)
        made = table.tag(name, version=version, keep_seconds=keep_seconds)
        full_name = _full_name(table)
    if as_json:
        print_json(made)
    else:
        print_line(f"{full_name} has the tag {made.name} on {_state(made)}{_until(made)}")


@tables.command("untag")
@click.argument("table_name", metavar="TABLE")
@click.argument("name")
@namespace_option
@json_option
@pass_place
def untag_table(place: Place, table_name: str, name: str, namespace: str | None, as_json: bool) -> None:
    """Remove the tag NAME from the TABLE.

    Files that only it kept are deleted later, when nobody can read them any more.
    """
    with place.open() as book, working("removing the tag"):
        table = book.table(table_name, namespace=namespace)
        gone = table.untag(name)
        full_name = _full_name(table)
    if as_json:
        print_json(gone)
    else:
        print_line(f"removed the tag {gone.name} on {_state(gone)} from {full_name}")


@tables.command("tags")
@click.argument("table_name", metavar="TABLE")
@namespace_option
@json_option
@pass_place
def list_tags(place: Place, table_name: str, namespace: str | None, as_json: bool) -> None:
    """List the tags of the TABLE.

    The one on the oldest snapshot comes first. Tags that begin with lb- are the snapshotter's own.
    """
    with place.open() as book:
        found = book.table(table_name, namespace=namespace).tags()
    if as_json:
        print_json(found)
        return
    print_table(
        ("tag", "snapshot", "version", "committed", "goes"),
        [(tag.name, tag.snapshot_id, tag.version, tag.snapshot_at, tag.goes_at) for tag in found],
    )


def _state(tag: Tag) -> str:
    return f"snapshot {tag.snapshot_id}" if tag.version is None else f"version {tag.version}"


def _until(tag: Tag) -> str:
    return "" if tag.goes_at is None else f" until {tag.goes_at.isoformat(timespec='seconds')}"


# --- columns -----------------------------------------------------------------------


@tables.command("add-column")
@click.argument("name")
@click.argument("column")
@click.argument("column_type", metavar="TYPE")
@click.option("--doc", help="A comment on the column.")
@namespace_option
@json_option
@pass_place
def add_column(
    place: Place, name: str, column: str, column_type: str, doc: str | None, namespace: str | None, as_json: bool
) -> None:
    """Add a COLUMN of a TYPE to the table NAME.

    It is null in the rows that are there. A field of a struct is named with its struct, such as address.city.
    """
    _change_schema(place, name, namespace, lambda update: update.add_column(column, column_type, doc), as_json=as_json)


@tables.command("drop-column")
@click.argument("name")
@click.argument("column")
@namespace_option
@json_option
@pass_place
def drop_column(place: Place, name: str, column: str, namespace: str | None, as_json: bool) -> None:
    """Drop a COLUMN of the table NAME. Older versions keep it."""
    _change_schema(place, name, namespace, lambda update: update.drop_column(column), as_json=as_json)


@tables.command("rename-column")
@click.argument("name")
@click.argument("column")
@click.argument("new_name", metavar="NEW")
@namespace_option
@json_option
@pass_place
def rename_column(place: Place, name: str, column: str, new_name: str, namespace: str | None, as_json: bool) -> None:
    """Give a COLUMN of the table NAME the name NEW."""
    _change_schema(place, name, namespace, lambda update: update.rename_column(column, new_name), as_json=as_json)


@tables.command("widen-column")
@click.argument("name")
@click.argument("column")
@click.argument("column_type", metavar="TYPE")
@namespace_option
@json_option
@pass_place
def widen_column(place: Place, name: str, column: str, column_type: str, namespace: str | None, as_json: bool) -> None:
    """Let a COLUMN of the table NAME hold more.

    An int can become a long, a float a double, and a decimal can get more digits.
    """
    _change_schema(place, name, namespace, lambda update: update.widen_column(column, column_type), as_json=as_json)


@tables.command("make-optional")
@click.argument("name")
@click.argument("column")
@namespace_option
@json_option
@pass_place
def make_optional(place: Place, name: str, column: str, namespace: str | None, as_json: bool) -> None:
    """Let a COLUMN of the table NAME be null."""
    _change_schema(place, name, namespace, lambda update: update.make_optional(column), as_json=as_json)


def _change_schema(
    place: Place, name: str, namespace: str | None, change: Callable[[SchemaUpdate], Any], *, as_json: bool
) -> None:
    with place.open() as book:
        table: Table = book.table(name, namespace=namespace)
        before = table.record.schema_version
        with table.update_schema() as update:
            change(update)
        described = table.describe()
    if as_json:
        print_json(described)
    elif described.schema_version == before:
        print_line(f"{_full_name(described)} is like that already")
    else:
        print_line(f"{_full_name(described)} has now the schema version {described.schema_version}")


def _full_name(table: TableRecord | TableDescription | Table) -> str:
    return f"{table.namespace}.{table.name}"

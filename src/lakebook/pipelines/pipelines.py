"""The pipelines of a book: making, finding and listing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from lakebook.errors import InvalidPipeline, LakebookError, OffsetBelowLogStart, PipelineBusy, TableNotFound
from lakebook.iceberg.schemas import as_spark_has, check_writable_from, schema_from
from lakebook.iceberg.staging import spark_type
from lakebook.lake.lake import Lake
from lakebook.lake.table import Table
from lakebook.lake.tables import Tables
from lakebook.names import check_name, shown
from lakebook.pages import every, page_of
from lakebook.pipelines.definitions import (
    BATCH_BYTES,
    BATCH_RECORDS,
    DEAD_LETTER,
    EARLIEST,
    STOP,
    WAIT,
    Definition,
    Source,
    check_definition,
    schema_text,
)
from lakebook.pipelines.pipeline import Pipeline
from lakebook.pipelines.running import target_of, tried
from lakebook.pipelines.turns import Turn
from lakebook.registry.pipelines import (
    TABLE,
    TOPIC,
    ClaimLost,
    PipelineRecord,
    alter_pipeline,
    begin_at_table,
    begin_at_topic,
    create_pipeline,
    get_pipeline,
    list_pipelines,
)
from lakebook.registry.tables import TableRecord
from lakebook.registry.topics import not_found
from lakebook.registry.transactions import Transaction
from lakebook.spark import frames
from lakebook.spark import pipelines as spark_pipelines
from lakebook.spark.session import reason_of
from lakebook.streams.metadata_store import MetadataStore
from lakebook.streams.ranges import partitions_of

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

_PAGE = 1000
_PROVENANCE_TYPES = dict(zip(spark_pipelines.PROVENANCE, ("STRING", "INT", "BIGINT", "TIMESTAMP"), strict=True))


#: What can be changed of a pipeline: not what it reads, nor what its rows say of where they come from.
ALTERABLE = {field.name for field in fields(Definition)} - {"sources", "provenance", "start", "retention"}
#: What a declaration may say.
_SPELLED = {"topics", "tables"}
_OPTIONS = {field.name for field in fields(Definition)} - {"sources"} | {"into", "dead_letters"} | _SPELLED


class Pipelines:
    """The pipelines of a book, by their names: `pipelines["clicks"]`."""

    def __init__(self, lake: Lake, metadata: MetadataStore) -> None:
        self._lake = lake
        self._metadata = metadata
        self._tables = Tables(lake)

    def __getitem__(self, name: str) -> Pipeline:
        check_name("pipeline", name)
        return self._pipeline(self._lake.registry.read_with(lambda reader: get_pipeline(reader, name)))

    def __iter__(self) -> Iterator[Pipeline]:
        """All pipelines, in the order of their names."""

        def page(after: Any) -> Any:
            found = self._lake.registry.read_with(lambda reader: list_pipelines(reader, after or "", _PAGE + 1))
            return page_of(found, _PAGE, lambda record: record.name)

        return (self._pipeline(record) for record in every(page))

    def _pipeline(self, record: PipelineRecord) -> Pipeline:
        return Pipeline(self._lake, self._metadata, record)

    def create(
        self,
        name: str,
        *,
        into: str,
        topics: str | Sequence[str] = (),
        tables: str | Sequence[str] = (),
        sql: str | None = None,
        function: str | None = None,
        decoder: str = spark_pipelines.RAW,
        schema: str | None = None,
        header: str | None = None,
        schemas: Mapping[Any, str] | None = None,
        provenance: bool = False,
        bad_records: str = STOP,
        dead_letters: str | None = None,
        evolve: bool = False,
        start: str = EARLIEST,
        retention: str = WAIT,
        interval: float | None = None,
        batch_records: int = BATCH_RECORDS,
        batch_bytes: int = BATCH_BYTES,
        target_file_size: int | None = None,
        spark: SparkSession | None = None,
    ) -> Pipeline:
        """Make a pipeline from topics, or tables, into a table.

        The transformation is `sql` over `source`, or a `function` given as `module:function`, or none. With a Spark
        session the transformation is tried without rows, and a target that is not there is made with its columns;
        without one the target has to be there, and the first run tells. Records that do not fit their `decoder` stop
        the pipeline, or go to the table `dead_letters` (by default the target's name with `_dead_letters`).

        `header="confluent"` reads records of Avro with a schema registry's header. Each is read by the one of
        `schemas` that has its id, and has the columns of `schema`, or of the schema with the highest id; without
        `schemas`, `schema` is used whatever the id.
        """
        check_name("pipeline", name)
        sources = [Source(TOPIC, item) for item in _listed(topics)]
        sources += [Source(TABLE, item) for item in _listed(tables)]
        definition = check_definition(
            Definition(
                tuple(sources),
                sql,
                function,
                decoder,
                schema,
                header,
                schemas,
                provenance,
                bad_records,
                evolve,
                start,
                retention,
                interval,
                batch_records,
                batch_bytes,
                target_file_size,
            )
        )
        self._require_sources(definition)
        target = self._existing(into)
        definition = self._with_schema(definition, target)
        if spark is not None:
            target = self._tried(spark, definition, into, target)
        if target is None:
            raise TableNotFound(
                f"there is no table {shown(into)}",
                on=f"pipeline {name}",
                remedy="Create it, or give spark= so that it is made with the columns of the query",
            )
        _check_provenance(definition, target)
        dead = self._dead_letters(definition, target, dead_letters)
        self._refuse_circles(definition, target, dead)
        return self._begin(name, definition, target, dead)

    def apply(self, declared: Mapping[str, Mapping[str, Any]], *, spark: SparkSession | None = None) -> list[Pipeline]:
        """Make the declared pipelines that are not there yet; those that are stay as they are.

        A declaration has the options of `create`, with `from` for topics and `from_table` for tables.
        """
        known = {pipeline.name for pipeline in self}
        made = []
        for name, options in declared.items():
            if name not in known:
                given = dict(options)
                given["topics"] = given.pop("from", given.get("topics", ()))
                given["tables"] = given.pop("from_table", given.get("tables", ()))
                strange = sorted(given.keys() - _OPTIONS)
                if strange or "into" not in given:
                    raise InvalidPipeline(
                        f"it has no option {shown(strange[0])}" if strange else "it does not say into which table",
                        on=f"pipeline {shown(name)}",
                        remedy=f"The options are from, from_table, {', '.join(sorted(_OPTIONS - _SPELLED))}",
                    )
                made.append(self.create(name, spark=spark, **given))
        return made

    def alter(
        self, name: str, *, dead_letters: str | None = None, spark: SparkSession | None = None, **changes: Any
    ) -> Pipeline:
        """Change what a pipeline makes of the records that it has not read yet, or how it goes about it.

        It takes the options of `create` except for sources, target, provenance, start and retention. A batch that
        was planned is planned anew. While somebody runs the pipeline it is refused (`PipelineBusy`).
        """
        pipeline = self[name]
        strange = sorted(changes.keys() - ALTERABLE)
        if strange:
            raise InvalidPipeline(
                f"{shown(strange[0])} cannot be changed",
                on=f"pipeline {name}",
                remedy=f"Only {', '.join(sorted(ALTERABLE))} can be; else delete it and make another",
            )
        with Turn(self._lake, pipeline.record) as turn:
            record = pipeline.record
            target = Table(self._lake, target_of(self._lake, record))
            definition = check_definition(replace(pipeline.definition, **changes))
            definition = self._with_schema(definition, target)
            if spark is not None:
                self._tried(spark, definition, f"{target.namespace}.{target.name}", target)
            _check_provenance(definition, target)
            dead_id = record.dead_letters_id
            if dead_letters is not None or (definition.bad_records == DEAD_LETTER and dead_id is None):
                dead = self._dead_letters(definition, target, dead_letters)
                self._refuse_circles(definition, target, dead)
                dead_id = None if dead is None else dead.id
            try:
                self._lake.registry.write(
                    lambda transaction: alter_pipeline(transaction, record, turn.token, dead_id, definition.as_dict())
                )
            except ClaimLost:
                raise PipelineBusy(
                    "another process has begun to run it; nothing was changed", on=record.shown, remedy="Try again"
                ) from None
        return self[name]

    # --- making --------------------------------------------------------------------

    def _require_sources(self, definition: Definition) -> None:
        for source in definition.sources:
            if source.kind == TOPIC:
                if self._metadata.get_topic(source.name) is None:
                    raise not_found(source.name)
            else:
                self._tables.get(source.name)

    def _existing(self, name: str) -> Table | None:
        try:
            return self._tables.get(name)
        except TableNotFound:
            return None

    def _with_schema(self, definition: Definition, target: Table | None) -> Definition:
        """Records of JSON have the columns of the target, where nothing else is said and nothing is made of them."""
        if definition.decoder != spark_pipelines.RAW and definition.schema is None:
            if target is None or definition.sql is not None or definition.function is not None:
                raise InvalidPipeline(
                    "the columns of its records are not known", on="pipeline", remedy="Give schema= for the decoder"
                )
            return replace(definition, schema=schema_text(target.schema))
        return definition

    def _tried(self, spark: SparkSession, definition: Definition, into: str, target: Table | None) -> Table:
        """The target, after the transformation was tried without rows; made with its columns if it was not there."""
        try:
            made = tried(self._nothing(spark, definition), definition)
            columns = schema_from(made)
        except LakebookError:
            raise
        except Exception as error:
            raise InvalidPipeline(
                f"the transformation cannot be run ({reason_of(error)})",
                on="pipeline",
                remedy="Correct the query; its source is called `source`",
            ) from error
        if target is None:
            return self._tables.create(into, made.schema)
        if not definition.evolve:
            check_writable_from(as_spark_has(target.schema), columns)
        return target

    def _nothing(self, spark: SparkSession, definition: Definition) -> Any:
        if definition.of_topics:
            return spark_pipelines.no_records(spark)
        return frames.empty(spark, spark_type(self._tables.get(definition.sources[0].name).schema))

    def _refuse_circles(self, definition: Definition, target: Table, dead: Table | None) -> None:
        """Refuse a table that would be fed with what it has itself."""
        read = {self._tables.get(item.name).id for item in definition.sources if item.kind == TABLE}
        filled = [target.id] if dead is None else [target.id, dead.id]
        if read & {*filled} or len({*filled}) != len(filled):
            raise InvalidPipeline(
                "its sources, its target and its dead letters have to be different tables", on="pipeline"
            )

    def _dead_letters(self, definition: Definition, target: Table, name: str | None) -> Table | None:
        if definition.bad_records != DEAD_LETTER:
            if name is not None:
                raise InvalidPipeline(
                    "a table of dead letters was named, and bad records stop the pipeline",
                    on="pipeline",
                    remedy="Give bad_records='dead_letter' too",
                )
            return None
        wanted = name or f"{target.namespace}.{target.name}_dead_letters"
        found = self._existing(wanted)
        if found is None:
            return self._tables.create(wanted, spark_pipelines.DEAD_LETTERS)
        check_writable_from(as_spark_has(found.schema), schema_from(spark_pipelines.DEAD_LETTERS))
        return found

    def _begin(self, name: str, definition: Definition, target: Table, dead: Table | None) -> Pipeline:
        """Enter the pipeline where it begins: at the beginning or the end of each source, as it is now."""
        pins = definition.retention == WAIT
        while True:
            offsets = {
                item.name: self._first_offsets(item.name, definition.start, item.kind) for item in definition.sources
            }

            def work(transaction: Transaction) -> None:
                pipeline_id = create_pipeline(
                    transaction, name, target.id, None if dead is None else dead.id, definition.as_dict()
                )
                for source, places in offsets.items():  # noqa: B023 - called at once
                    if isinstance(places, dict):
                        begin_at_topic(transaction, pipeline_id, source, places, pins=pins)
                    else:
                        begin_at_table(transaction, pipeline_id, *places)

            try:
                self._lake.registry.write(work)
                return self[name]
            except OffsetBelowLogStart:
                # Retention has removed its first records since they were looked up.
                if definition.start != EARLIEST:
                    raise

    def _first_offsets(self, source: str, start: str, kind: str) -> dict[int, int] | tuple[TableRecord, int]:
        if kind == TABLE:
            table = self._tables.get(source).record
            return table, 0 if start == EARLIEST else table.version
        return {
            number: item.log_start if start == EARLIEST else item.high_watermark
            for number, item in partitions_of(self._metadata, source).items()
        }


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_provenance(definition: Definition, target: Table) -> None:
    """Refuse a target without the columns that say where its rows come from, where they are asked for."""
    if not definition.provenance:
        return
    names = {item.name for item in target.schema.fields}
    missing = [name for name in spark_pipelines.PROVENANCE if name not in names]
    if missing and not definition.evolve:
        wanted = ", ".join(f"{name} {_PROVENANCE_TYPES[name]}" for name in missing)
        raise InvalidPipeline(
            f"the target has no columns {', '.join(missing)}",
            on=f"table {target.namespace}.{target.name}",
            remedy=f"Add them to the target ({wanted}), and have the query give them: `source` has them",
        )

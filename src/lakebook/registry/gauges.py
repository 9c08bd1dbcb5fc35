"""Numbers about the whole registry, for metrics and for `lakebook doctor`."""

from __future__ import annotations

import sqlalchemy as sa

from lakebook.registry import schema
from lakebook.registry.pipelines import STOPPED, standing_of_all
from lakebook.registry.statements import Statement
from lakebook.registry.temporary_files import COUNT_FILES
from lakebook.registry.transactions import Reader

_t = schema.topics.c
_p = schema.partitions.c
_s = schema.segments.c
_o = schema.consumer_offsets.c
_i = schema.iceberg_tables.c
_live = _t.deleted_at.is_(None)

COUNT_TOPICS = Statement(sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_t.partition_count), 0)).where(_live))
COUNT_SEGMENTS = Statement(
    sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(_s.size_bytes), 0),
        sa.func.coalesce(sa.func.sum(_s.record_count), 0),
    )
    .select_from(schema.segments.join(schema.topics, _t.id == _s.topic_id))
    .where(_live)
)
COUNT_GROUPS = Statement(sa.select(sa.func.count()).select_from(schema.consumer_groups))
SUM_LAG = Statement(
    sa.select(
        sa.func.coalesce(
            sa.func.sum(
                _p.high_watermark
                - sa.case((_o.committed_offset < _p.log_start, _p.log_start), else_=_o.committed_offset)
            ),
            0,
        )
    ).select_from(
        schema.consumer_offsets.join(
            schema.partitions, sa.and_(_p.topic_id == _o.topic_id, _p.partition_id == _o.partition_id)
        ).join(schema.topics, sa.and_(_t.id == _p.topic_id, _live))
    )
)
COUNT_EVENTS = Statement(sa.select(sa.func.count()).select_from(schema.events))
COUNT_OPEN_COMMITS = Statement(sa.select(sa.func.count()).select_from(schema.commits).where(sa.text("state = 'open'")))


COUNT_TABLES = Statement(
    sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(schema.tables.c.file_count), 0),
        sa.func.coalesce(sa.func.sum(schema.tables.c.row_count), 0),
        sa.func.coalesce(sa.func.sum(schema.tables.c.total_size), 0),
    ).where(schema.tables.c.deleted_at.is_(None))
)
# A table that was never published lacks its version 0 too.
COUNT_UNPUBLISHED = Statement(
    sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(schema.tables.c.version - sa.func.coalesce(_i.version, -1)), 0),
    )
    .select_from(schema.tables.outerjoin(schema.iceberg_tables, _i.table_id == schema.tables.c.id))
    .where(
        schema.tables.c.deleted_at.is_(None),
        schema.tables.c.format == sa.literal_column("'parquet'"),
        sa.or_(_i.version.is_(None), _i.version < schema.tables.c.version),
    )
)
COUNT_LEASES = Statement(sa.select(sa.func.count()).select_from(schema.leases))
COUNT_INSERTS = Statement(sa.select(sa.func.count()).select_from(schema.inserts))
COUNT_OWED = Statement(
    sa.select(
        sa.func.count(),
        sa.func.coalesce(
            sa.func.sum(sa.case((sa.text("state = 'failed'"), sa.literal_column("1")), else_=sa.literal_column("0"))), 0
        ),
    )
    .select_from(schema.metadata_updates)
    .where(sa.text("state <> 'completed'"))
)
COUNT_STALLED = Statement(sa.select(sa.func.count()).select_from(schema.deliveries))
COUNT_DEAD_LETTERS = Statement(
    sa.select(sa.func.count()).select_from(schema.dead_letters).where(schema.dead_letters.c.redriven_at.is_(None))
)
COUNT_REQUESTS = Statement(sa.select(sa.func.count()).select_from(schema.requests))


def read_gauges(reader: Reader, now: int) -> dict[str, int]:
    """The values of `lakebook.metrics.GAUGES`."""

    def row(statement: Statement, *values: int) -> tuple[int, ...]:
        found = reader.one(statement, *values)
        assert found is not None
        return tuple(int(value) for value in found)

    topics, partitions = row(COUNT_TOPICS)
    segments, segment_bytes, segment_records = row(COUNT_SEGMENTS)
    files, file_bytes, expired = row(COUNT_FILES, now)
    tables, table_files, table_rows, table_bytes = row(COUNT_TABLES)
    unpublished_tables, unpublished_versions = row(COUNT_UNPUBLISHED)
    owed, failed = row(COUNT_OWED)
    pipelines = standing_of_all(reader)
    return {
        "topics": topics,
        "partitions": partitions,
        "segments": segments,
        "segment_bytes": segment_bytes,
        "segment_records": segment_records,
        "consumer_groups": row(COUNT_GROUPS)[0],
        "consumer_lag": row(SUM_LAG)[0],
        "tables": tables,
        "table_files": table_files,
        "table_rows": table_rows,
        "table_bytes": table_bytes,
        "unpublished_tables": unpublished_tables,
        "unpublished_versions": unpublished_versions,
        "leases": row(COUNT_LEASES)[0],
        "inserts": row(COUNT_INSERTS)[0],
        "events": row(COUNT_EVENTS)[0],
        "temporary_files": files,
        "temporary_files_expired": expired,
        "temporary_file_bytes": file_bytes,
        "open_commits": row(COUNT_OPEN_COMMITS)[0],
        "owed_updates": owed,
        "failed_updates": failed,
        "stalled_deliveries": row(COUNT_STALLED)[0],
        "dead_letters": row(COUNT_DEAD_LETTERS)[0],
        "requests": row(COUNT_REQUESTS)[0],
        "pipelines": len(pipelines),
        "stopped_pipelines": sum(item.state == STOPPED for item in pipelines),
        "failing_pipelines": sum(item.failures > 0 for item in pipelines),
        "pipeline_lag": sum(item.lag for item in pipelines),
    }

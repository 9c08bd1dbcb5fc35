"""One round of the components by hand: the same work as `lakebook run` does, here and now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lakebook.cdc.subscribers import Refresh
from lakebook.components.compactor import Compactor
from lakebook.components.janitor import Janitor
from lakebook.components.names import COMPONENTS, check_components
from lakebook.components.orchestrator import Orchestrator
from lakebook.components.pipeline_runner import PipelineRunner
from lakebook.components.snapshotter import Snapshotter
from lakebook.components.topic_publisher import TopicPublisher
from lakebook.components.view_keeper import ViewKeeper
from lakebook.errors import LakebookError
from lakebook.lake.lake import Lake
from lakebook.lake.published import publish_now, publish_pending
from lakebook.registry.deliveries import object_state, objects_of
from lakebook.registry.tables import TableRecord

if TYPE_CHECKING:
    from lakebook.spark.types import SparkSession

# The topic publisher first: the others look after what it has put into tables. The janitor last: it removes
# what the others have retired.
_ORDER = (
    "pipelines",
    "topic_publisher",
    "orchestrator",
    "iceberg_updater",
    "views",
    "compactor",
    "snapshotter",
    "janitor",
)
_BY_HAND = "by hand"


def run_round(
    lake: Lake,
    components: Sequence[str] | None,
    table: TableRecord | None,
    spark: Callable[[], SparkSession] | None,
    progress: Callable[[str], None],
) -> Mapping[str, Mapping[str, Any]]:
    """Run the named components once, or all; what each has done. One that fails stops no other."""
    wanted = check_components(COMPONENTS if components is None else components)
    runs: Mapping[str, Callable[[], Mapping[str, Any]]] = {
        "pipelines": lambda: PipelineRunner(lake, spark).run_once(),
        "topic_publisher": lambda: _mirror(lake, table),
        "orchestrator": lambda: _owe(lake, table),
        "iceberg_updater": lambda: _publish(lake, table, progress),
        "compactor": lambda: Compactor(lake, spark).run_once(table),
        "snapshotter": lambda: _keep(lake, table),
        "views": lambda: {} if table is not None else ViewKeeper(lake, spark).run_once(),
        "janitor": lambda: Janitor(lake).run_once(),
    }
    done: dict[str, Mapping[str, Any]] = {}
    for name in _ORDER:
        if name in wanted:
            progress(name)
            try:
                done[name] = runs[name]()
            except LakebookError as error:
                done[name] = {"error": str(error)}
    return done


def _mirror(lake: Lake, table: TableRecord | None) -> Mapping[str, Any]:
    if table is not None and table.topic_id is None:
        return {"mirrored": {}, "failed": {}}  # No topic's table.
    return TopicPublisher(lake).run_once(None if table is None else table.topic_id)


def _publish(lake: Lake, table: TableRecord | None, progress: Callable[[str], None]) -> Mapping[str, Any]:
    if table is not None:
        report = publish_now(lake, table)
        return {"published": [report.table], "failed": []}
    found = publish_pending(lake, lambda done, total, name: progress(f"iceberg_updater: {name} ({done} of {total})"))
    return {"published": [report.table for report in found.published], "failed": list(found.failed)}


def _keep(lake: Lake, table: TableRecord | None) -> Mapping[str, Any]:
    """Rounds of the snapshotter until none is left over for the next."""
    snapshotter = Snapshotter(lake)
    looked = snapshotter.run_once(None if table is None else table.id)
    while table is None and snapshotter.due() <= 0 and (more := snapshotter.run_once()):
        looked += more
    return {"looked_at": looked}


def _owe(lake: Lake, table: TableRecord | None) -> Mapping[str, Any]:
    """Write down what is owed, as a refresh of the orchestrator does."""
    orchestrator = Orchestrator(lake)
    if table is not None:
        objects = [table.object_id]
    else:
        found = lake.registry.in_snapshot(lambda reader: objects_of(reader, orchestrator.subscribed_tables))
        objects = [object_id for object_id, _ in found[1]]
    for object_id in objects:
        kind, _, record = lake.registry.in_snapshot(lambda reader: object_state(reader, object_id))  # noqa: B023
        orchestrator.on_refresh(Refresh(object_id, kind, record, _BY_HAND))
    return orchestrator.status()

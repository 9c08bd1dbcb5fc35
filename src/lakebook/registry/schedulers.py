"""Whether somebody looks after the tables for all processes, as the others can see."""

from __future__ import annotations

from lakebook.clock import to_ms
from lakebook.registry.deliveries import SchedulerState, scheduler_state
from lakebook.registry.maintenance import pause_of
from lakebook.registry.transactions import Reader

#: Who keeps Iceberg current, where a scheduler is at work.
UPDATER = "iceberg_updater"
#: What a scheduler's status says of who it runs.
COMPONENTS = "components"


def active_scheduler(reader: Reader, now: int, lease_ms: int) -> SchedulerState | None:
    """Who has the scheduler's turn and was heard of lately; none if nobody was."""
    found = scheduler_state(reader)
    if found is None or found.holder is None:
        return None
    # A time far ahead is that of a wrong clock, and says nothing.
    return found if abs(now - to_ms(found.renewed_at)) <= lease_ms else None


def publishes_for_all(reader: Reader, table_id: int, now: int, lease_ms: int) -> bool:
    """Whether a scheduler is at work that keeps Iceberg current, also of this table."""
    found = active_scheduler(reader, now, lease_ms)
    if found is None or pause_of(reader, UPDATER, table_id) is not None:
        return False
    components = found.status.get(COMPONENTS)
    return components is None or UPDATER in components

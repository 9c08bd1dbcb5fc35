"""Named places in the code where a test may act: kill the process, wait, or fail.

In production every `reach` is one look into an empty dictionary. A test arms a
point in its own process with `armed`, or in a child through `LAKEBOOK_FAILPOINTS`,
for example `append.before_commit=kill@3` (the third time it is reached).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Every point there is: a test walks through this list and arms each of them.
POINTS = (
    "transaction.beginning",
    "transaction.begun",
    "transaction.before_commit",
    "transaction.after_commit",
    "commit.opened",
    "object.written",
    "upload.finishing",
    "append.claimed",
    "produce.stamped",
    "produce.stored",
    "produce.committed",
    "produce.releasing",
    "batch.stored",
    "batch.landed",
    "retention.log_start_moved",
    "topic.hidden",
    "insert.reserved",
    "insert.staged",
    "insert.written",
    "insert.measured",
    "insert.chunk_staged",
    "insert.aborted",
    "change.written",
    "change.committed",
    "insert.arrow_written",
    "appender.rotated",
    "expire.retired",
    "clean.marked",
    "clean.object_deleted",
    "clean.forgotten",
    "sweep.fenced",
    "sweep.folder_deleted",
    "sweep.leftovers_deleted",
    "footers.upgraded",
    "lease.taken",
    "outside.metadata_written",
    "outside.committed",
    "outside.created",
    "debt.taken",
    "mirror.written",
    "mirror.committed",
    "compact.claimed",
    "compact.written",
    "view.claimed",
    "view.built",
    "view.written",
    "view.committed",
    "merge.written",
    "merge.committed",
    "publish.reserved",
    "publish.manifests_written",
    "publish.list_written",
    "publish.metadata_written",
    "publish.committed",
    "publish.discarded",
    "astha.claimed",
    "astha.saved",
    "delivery.taken",
    "pipeline.planned",
    "pipeline.written",
    "pipeline.landed",
    "backup.table_written",
    "backup.written",
    "restore.rows_loaded",
    "restore.loaded",
    "copy.object_copied",
    "copy.table_relocated",
    "copy.verified",
    "copy.published",
    "checkpoint.written",
    "rebuild.begun",
    "rebuild.chunk",
    "rebuild.filled",
    "rebuild.done",
    "migration.step",
    "migration.footers_moved",
)

_armed: dict[str, Callable[[], None]] = {}


def reach(name: str) -> None:
    """Say that the code has come to this point."""
    if _armed:
        action = _armed.get(name)
        if action is not None:
            action()


@contextmanager
def armed(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Run `action` whenever this process reaches `name`, until the block ends."""
    if name not in POINTS:
        raise ValueError(f"no failpoint is called {name!r}")
    _armed[name] = action
    try:
        yield
    finally:
        _armed.pop(name, None)


def _kill_at(count: int) -> Callable[[], None]:
    left = count

    def action() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return action


def arm_from_environment() -> None:
    """Arm what `LAKEBOOK_FAILPOINTS` names; for children that a test starts."""
    for item in filter(None, os.environ.get("LAKEBOOK_FAILPOINTS", "").split(",")):
        name, _, action = item.partition("=")
        kind, _, count = action.partition("@")
        if name not in POINTS or kind != "kill":
            raise ValueError(f"LAKEBOOK_FAILPOINTS has {item!r}")
        _armed[name] = _kill_at(int(count or 1))


arm_from_environment()

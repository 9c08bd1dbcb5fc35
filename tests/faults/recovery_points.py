"""Points at which whoever rebuilds a registry, backs it up, writes a checkpoint or uploads is killed."""

from __future__ import annotations

STEPS = ("rebuild.begun=kill@1", "rebuild.chunk=kill@1", "rebuild.chunk=kill@9", "rebuild.filled=kill@1")
# After the first table, when most are written, and before the file takes its name.
BACKUP = ("backup.table_written=kill@1", "backup.table_written=kill@45", "backup.written=kill@1")
DONE = "rebuild.done"
WRITTEN = "checkpoint.written"
UPLOAD = "upload.finishing"
POINTS = {DONE, WRITTEN, UPLOAD, *(step.partition("=")[0] for step in (*STEPS, *BACKUP))}

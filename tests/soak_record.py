"""The record of the last soak: what the long tests of each file have found when they were run last."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

_TITLE = """# The last soak

What the long fault tests found when they were run last, file by file. `make soak` runs and records all of them; a file
that has no section here has not been run at length yet.
"""
_HEAD = "## "


def update(record: Path, found: Mapping[str, Sequence[str]]) -> None:
    """Replace what is recorded of the files whose tests were run; what is recorded of others stays."""
    today = datetime.now(UTC).date().isoformat()
    sections = _sections(record.read_text(encoding="utf-8") if record.exists() else "")
    for file, lines in found.items():
        text = "\n".join(textwrap.fill(f"- {line}", 116, subsequent_indent="  ") for line in lines)
        sections[file] = f"{_HEAD}{file}\n\nOn {today}:\n\n{text}\n"
    record.write_text("\n".join([_TITLE, *(sections[file] for file in sorted(sections))]), encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """The sections of a record by their files."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(_HEAD):
            lines = found.setdefault(line.removeprefix(_HEAD), [])
        lines.append(line)
    return {file: "\n".join(section).rstrip("\n") + "\n" for file, section in found.items()}

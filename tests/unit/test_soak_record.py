"""The record of soaks: a run replaces what it has found anew, and nothing else."""

from __future__ import annotations

from pathlib import Path

import soak_record


def test_a_run_replaces_what_is_recorded_of_its_own_files_alone(tmp_path: Path) -> None:
    record = tmp_path / "soak.md"
    soak_record.update(record, {"tests/b.py": ["of b", "more of b " * 20], "tests/a.py": ["of a"]})
    first = record.read_text(encoding="utf-8")
    assert first.startswith("# The last soak\n")
    assert first.index("## tests/a.py") < first.index("- of a") < first.index("## tests/b.py") < first.index("- of b")
    assert max(map(len, first.splitlines())) <= 120
    soak_record.update(record, {"tests/a.py": ["another of a"], "tests/c.py": ["of c"]})
    second = record.read_text(encoding="utf-8")
    assert "- of a\n" not in second
    assert "- another of a\n" in second
    assert second.partition("## tests/b.py")[2].partition("## tests/c.py")[0].strip() == (
        first.partition("## tests/b.py")[2].strip()
    )
    soak_record.update(record, {})
    assert record.read_text(encoding="utf-8") == second

"""The documentation's code runs, its links lead somewhere, and it knows what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "architecture").glob("*.md")])


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


CODE = [(page, number) for page in PAGES for number, _ in enumerate(blocks(page))]


def test_the_quickstart_of_the_readme_has_at_most_ten_lines_and_runs(tmp_path: Path) -> None:
    (quickstart,) = blocks(ROOT / "README.md")
    assert len([line for line in quickstart.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", quickstart], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'alice' b'two pens' 0", "True"]
    assert (tmp_path / "my-book" / "registry.db").is_file()


@pytest.mark.parametrize(("page", "number"), CODE, ids=lambda value: getattr(value, "name", value))
def test_the_documentations_code_runs(page: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(page)[number]
    if "postgresql://user@host" in code:
        # An address that is nobody's: it is enough that it is Python.
        compile(code, str(page), "exec")
        return
    namespace: dict[str, object] = {}
    exec(compile(code, str(page), "exec"), namespace)
    assert "lakebook" in namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_every_page_can_be_found_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        todo.extend((page.parent / target).resolve() for target in targets if "://" not in target)
    assert set((ROOT / "docs").rglob("*.md")) <= seen


def run_demo(name: str) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "demo" / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing is wrong" in done.stdout
    return done.stdout


def test_the_demo_of_topics_runs_to_its_end() -> None:
    assert "resuming at 2500" in run_demo("topic_life.py")


def test_the_demo_of_streams_runs_to_its_end() -> None:
    said = run_demo("stream_life.py")
    assert "none was left out" in said
    assert "2000 records, 97 customers" in said
    assert "2000 rows in snapshot" in said


def test_the_demo_of_tables_runs_to_its_end() -> None:
    assert "50000 rows gone, 51200 left" in run_demo("table_life.py")


@pytest.mark.parametrize("shape", ["whole_life.py", "scaled.py"])
def test_the_demo_of_the_whole_story_runs_to_its_end(shape: str) -> None:
    said = run_demo(shape)
    assert "Lakebook 24000, PyIceberg 24000, DuckDB 24000 rows with 24000 different ids" in said
    assert "records landed" in said

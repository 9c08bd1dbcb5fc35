"""The documentation's code runs, its links lead somewhere, and it knows what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from extent import long
from lakebook.cli.main import cli
from shapes import EMBEDDED, SCALED

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_spoken_of_exist(page: Path) -> None:
    missing = []
    # In the text, and as somebody types them: with options before the name of the command, or after it.
    spoken = re.findall(
        r"(?:`|^\$ |^)lakebook ((?:--\w+ \S+ )*)([a-z][a-z -]*)", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    for _, words in spoken:
        command: click.Command | None = cli
        for word in words.split():
            if not isinstance(command, click.Group):
                break  # What follows are arguments.
            command = command.commands.get(word)
        if command is None:
            missing.append(words)
    assert missing == []


#: What each demo says on its way.
DEMOS: dict[str, list[str]] = {
    "topic_life.py": ["resuming at 2500"],
    "stream_life.py": ["none was left out", "2000 records, 97 customers", "2000 rows in snapshot"],
    "table_life.py": ["50000 rows gone, 51200 left"],
    "upkeep_life.py": ["file(s), 100 rows", "compactor: compact (done)"],
    "whole_life.py": [
        "Lakebook 24000, PyIceberg 24000, DuckDB 24000 rows with 24000 different ids",
        "records landed",
    ],
}
#: Small runs have these in one process, whose Java machine they share, and on a cluster only `test_both_shapes`.
ON_SPARK = [name for name in DEMOS if name != "topic_life.py"]
ONE_BY_ONE = "import runpy, sys\nfor demo in sys.argv[1:]: runpy.run_path(demo, run_name='__main__')"


def demonstrated(*program: str) -> str:
    """What a demo prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBOOK_", "AWS_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "demo"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", [EMBEDDED, SCALED])
@pytest.mark.parametrize(
    "demo", [pytest.param(name, marks=long if name in ON_SPARK else long(EMBEDDED, SCALED)) for name in DEMOS]
)
def test_a_demo_runs_to_its_end_in_both_shapes(demo: str, shape: str) -> None:
    program = [str(ROOT / "demo" / demo)] if shape == EMBEDDED else [str(ROOT / "demo" / "scaled.py"), demo]
    said = demonstrated(*program)
    assert [text for text in [*DEMOS[demo], "nothing is wrong"] if text not in said] == []


@pytest.mark.timeout(600)
def test_the_demos_on_spark_run_one_after_the_other() -> None:
    said = demonstrated("-c", ONE_BY_ONE, *(str(ROOT / "demo" / name) for name in ON_SPARK))
    assert [text for name in ON_SPARK for text in DEMOS[name] if text not in said] == []
    assert said.count("nothing is wrong") == len(ON_SPARK)


def test_every_demo_is_run_by_both_commands_and_by_a_test() -> None:
    present = {file.name for file in (ROOT / "demo").glob("*_life.py")}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    scaled = (ROOT / "demo" / "scaled.py").read_text(encoding="utf-8")
    assert DEMOS.keys() == present
    assert set(re.findall(r"demo/(\w+_life\.py)", makefile)) == present
    assert set(re.findall(r"\w+_life\.py", scaled)) == present

"""Dependencies point downward, and each library stays in its room."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lakebook"
# Spark finds its data sources by the names of packages: that of this one stands beside, above all rooms.
DATA_SOURCE = SOURCE.parent / "pyspark_lakebook"

# From top to bottom: a room may use the rooms below it.
LAYERS = (
    "pyspark_lakebook",
    "cli",
    "doctor",
    "restoring",
    "copying",
    "book",
    "server",
    "components",
    "recovery",
    "cdc",
    "pipelines",
    "views",
    "streams",
    "lake",
    "iceberg",
    "spark",
    "storage",
    "registry",
)
# Below all rooms, in an order of their own.
BASE = ("predicates", "metrics", "config", "pages", "failpoints", "names", "clock", "forks", "errors")
ROOMS = {
    "sqlalchemy": {"registry"},
    "alembic": {"registry"},
    "psycopg": {"registry"},
    "pysqlite3": {"registry"},
    "sqlite3": {"registry"},
    "obstore": {"storage"},
    "boto3": {"storage"},
    "botocore": {"storage"},
    "pyspark": {"spark", "pyspark_lakebook"},
    "pyiceberg": {"iceberg", "server"},
    "pydantic": {"iceberg", "server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "sqlglot": {"iceberg"},
    "click": {"cli"},
    "rich": {"cli"},
    "prometheus_client": {"metrics"},
}
RANK = {name: number for number, name in enumerate((*LAYERS, *BASE))}


def room_of(file: Path) -> str:
    if file.is_relative_to(DATA_SOURCE):
        return DATA_SOURCE.name
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files() -> list[Path]:
    found = [file for file in sorted(SOURCE.rglob("*.py")) if file != SOURCE / "__init__.py"]
    assert found
    return found + sorted(DATA_SOURCE.rglob("*.py"))


def test_every_module_has_its_place() -> None:
    assert {room_of(file) for file in files()} <= RANK.keys()


def test_no_import_points_upward() -> None:
    upward = []
    for file in files():
        for name in imports(file):
            parts = name.split(".")
            if parts[0] == "lakebook" and len(parts) > 1 and parts[1] in RANK:
                here, there = room_of(file), parts[1]
                if here != there and RANK[there] < RANK[here]:
                    upward.append(f"{file.name}: {here} -> {there}")
    assert upward == []


def test_no_module_imports_the_package_as_a_whole() -> None:
    # `import lakebook` inside of it would be a circle through everything.
    below = [file for file in files() if room_of(file) not in ("cli", "server")]
    assert [file.name for file in below if "lakebook" in imports(file)] == []


def test_libraries_stay_in_their_rooms() -> None:
    strays = [
        f"{file.relative_to(SOURCE.parent)} imports {name}"
        for file in files()
        for name in imports(file)
        if room_of(file) not in ROOMS.get(name.split(".")[0], {room_of(file)})
    ]
    assert strays == []


def test_only_the_command_line_prints() -> None:
    printing = [
        file.name
        for file in files()
        if room_of(file) != "cli"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []

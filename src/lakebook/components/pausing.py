"""Letting components rest, and letting them go on."""

from __future__ import annotations

from lakebook.components.names import check_components
from lakebook.lake.lake import Lake
from lakebook.names import check_text
from lakebook.registry.maintenance import EVERY_COMPONENT, resume_component
from lakebook.registry.maintenance import pause as pause_component


def pause(lake: Lake, component: str | None, table_id: int | None, reason: str) -> None:
    """Let a component rest, or all; on a table, or on all."""
    name = _named(component)
    check_text("reason", reason)
    lake.registry.write(lambda transaction: pause_component(transaction, name, table_id, reason))


def resume(lake: Lake, component: str | None, table_id: int | None) -> bool:
    """Let it go on, and have what it missed taken anew; whether it rested."""
    name = _named(component)
    return lake.registry.write(lambda transaction: resume_component(transaction, name, table_id))


def _named(component: str | None) -> str:
    return EVERY_COMPONENT if component is None else check_components([component])[0]

"""Ids of schemas, partition specs and sort orders in the updates of a commit.

As Iceberg's own catalogs do it: what is equal to something that is there gets its id and is not added
again; an id that is taken is replaced by a new one; `-1` is the last that was added.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSortOrderUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetDefaultSpecUpdate,
    TableUpdate,
)

_LAST = -1
_FIRST_PARTITION_ID = 999


def with_settled_ids(base: TableMetadataV2, updates: Sequence[TableUpdate]) -> list[TableUpdate]:
    """The same updates, in which every id is right."""
    return _Settled(base).settled(updates)


class _Settled:
    def __init__(self, base: TableMetadataV2) -> None:
        self._schemas = list(base.schemas)
        self._specs = list(base.partition_specs)
        self._orders = list(base.sort_orders)
        self._last_partition_id = base.last_partition_id or _FIRST_PARTITION_ID
        self._last: dict[str, int] = {}

    def settled(self, updates: Sequence[TableUpdate]) -> list[TableUpdate]:
        found: list[TableUpdate] = []
        for update in updates:
            new = self._one(update)
            if new is not None:
                found.append(new)
        return found

    def _one(self, update: TableUpdate) -> TableUpdate | None:
        match update:
            case AddSchemaUpdate():
                return self._add_schema(update.schema_)
            case AddPartitionSpecUpdate():
                return self._add_spec(update.spec)
            case AddSortOrderUpdate():
                return self._add_order(update.sort_order)
            case SetCurrentSchemaUpdate() if update.schema_id == _LAST and "schema" in self._last:
                return SetCurrentSchemaUpdate.model_validate({"schema-id": self._last["schema"]})
            case SetDefaultSpecUpdate() if update.spec_id == _LAST and "spec" in self._last:
                return SetDefaultSpecUpdate.model_validate({"spec-id": self._last["spec"]})
            case SetDefaultSortOrderUpdate() if update.sort_order_id == _LAST and "order" in self._last:
                return SetDefaultSortOrderUpdate.model_validate({"sort-order-id": self._last["order"]})
        return update

    def _add_schema(self, schema: Schema) -> TableUpdate | None:
        for known in self._schemas:
            same_rows = known.identifier_field_ids == schema.identifier_field_ids
            if same_rows and known.as_struct() == schema.as_struct():
                self._last["schema"] = known.schema_id
                return None
        ids = {known.schema_id for known in self._schemas}
        if schema.schema_id in ids or schema.schema_id < 0:
            schema = schema.model_copy(update={"schema_id": max(ids) + 1})
        self._schemas.append(schema)
        self._last["schema"] = schema.schema_id
        return AddSchemaUpdate.model_validate({"schema": schema})

    def _add_spec(self, spec: PartitionSpec) -> TableUpdate | None:
        spec = PartitionSpec(*(self._field(field) for field in spec.fields), spec_id=spec.spec_id)
        for known in self._specs:
            if known.fields == spec.fields:
                self._last["spec"] = known.spec_id
                return None
        ids = {known.spec_id for known in self._specs}
        if spec.spec_id in ids or spec.spec_id < 0:
            spec = PartitionSpec(*spec.fields, spec_id=max(ids) + 1)
        self._specs.append(spec)
        self._last["spec"] = spec.spec_id
        return AddPartitionSpecUpdate.model_validate({"spec": spec})

    def _field(self, field: PartitionField) -> PartitionField:
        meaning = (field.source_id, str(field.transform))
        known = [item for spec in self._specs for item in spec.fields]
        for item in known:
            if (item.source_id, str(item.transform)) == meaning:
                return PartitionField(field.source_id, item.field_id, field.transform, field.name)
        ident = field.field_id
        if ident <= _FIRST_PARTITION_ID or any(item.field_id == ident for item in known):
            ident = self._last_partition_id + 1
        self._last_partition_id = max(self._last_partition_id, ident)
        return PartitionField(field.source_id, ident, field.transform, field.name)

    def _add_order(self, order: SortOrder) -> TableUpdate | None:
        for known in self._orders:
            if known.fields == order.fields:
                self._last["order"] = known.order_id
                return None
        ids = {known.order_id for known in self._orders}
        if not order.fields:
            ident = 0
        elif order.order_id in ids or order.order_id < 1:
            ident = max(ids, default=0) + 1
        else:
            ident = order.order_id
        new = SortOrder(*order.fields, order_id=ident)
        self._orders.append(new)
        self._last["order"] = ident
        return AddSortOrderUpdate.model_validate({"sort-order": new})

"""What Apache Iceberg defines: schemas, predicates, bounds; the only room that imports PyIceberg."""

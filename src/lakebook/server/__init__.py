"""The Iceberg REST catalog: Lakebook's tables for Spark and for any other Iceberg client, over HTTP."""

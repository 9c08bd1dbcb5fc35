"""What looks after tables: Iceberg updater, orchestrator, snapshotter, compactor and janitor."""

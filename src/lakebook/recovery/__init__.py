"""What outlives the registry: checkpoints in the warehouse, and a registry that is rebuilt from it."""

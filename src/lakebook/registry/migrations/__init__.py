"""The registry's migrations; `lakebook.registry.migrate` runs them."""

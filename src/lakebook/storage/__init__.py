"""Storage: the only place that touches the warehouse's bytes."""

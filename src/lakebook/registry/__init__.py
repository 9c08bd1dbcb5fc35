"""The registry: the one transactional store, and the only place that speaks SQL."""

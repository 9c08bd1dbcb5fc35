"""Materialised views: ranges of time, built by Spark, found by the registry."""

"""Spark: sessions and jobs. Plain arguments in, plain results out."""

"""Astha: captured changes reach whoever acts on them, in order and without loss."""

"""Streams: topics, partitions, segments and consumer offsets."""

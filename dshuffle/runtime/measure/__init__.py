"""Measuring a cluster: links, storage and processors."""

"""Measure the links, storage and processors of a cluster."""

"""A package, so that worker processes find these tests and not those that some distribution installs as ``tests``."""

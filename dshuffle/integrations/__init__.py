"""Adapters to tools that are not needed otherwise, each behind an extra; nothing is imported here."""

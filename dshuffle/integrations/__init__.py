"""Adapters to optional libraries. Import each module directly; some need an extra."""

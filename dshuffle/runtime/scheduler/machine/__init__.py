"""The scheduler's side of a session as a state machine: events in, instructions out. It knows no Dask and no clock."""

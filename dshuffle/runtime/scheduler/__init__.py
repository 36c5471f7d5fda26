"""What runs on the Dask scheduler: the plugin, and the coordinator of each session."""

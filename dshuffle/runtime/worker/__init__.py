"""What runs on a Dask worker: the plugin, its sessions, and the run of each exchange."""

"""Code that runs on a Dask worker: the plugin, its sessions, and their runs."""

"""Code that runs on the Dask scheduler: the plugin, and a coordinator per session."""

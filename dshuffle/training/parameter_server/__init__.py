"""Asynchronous parameter server, on Dask workers and simulated in one process."""

"""Rows of a Dask array or dataset in any order, without a session: `permute` and `take`."""

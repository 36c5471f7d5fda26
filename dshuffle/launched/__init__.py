"""Scripts that a launcher has started: torchrun, srun or mpirun (:func:`dshuffle.spmd`).

Every process of the job is one rank. Rank 0 runs a Dask scheduler and the session, and every rank runs a Dask worker.
All of these run in threads beside the loop of the script.
"""

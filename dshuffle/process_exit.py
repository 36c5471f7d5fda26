"""A process of our own ends without the interpreter's last garbage collections.

Numba keeps hundreds of thousands of objects that refer to each other. An interpreter that ends empties all modules and
then collects these objects, one by one. On each worker that takes longer than everything else that closing involves. On
a busy machine Dask's nanny stops waiting after 4 s and kills the worker.
"""

from __future__ import annotations

import atexit
import gc


def end_without_last_collections() -> None:
    """Exempt the objects that are alive when this process ends from garbage collection.

    Handlers of ``atexit`` and finalizers of ``weakref.finalize`` run, whenever they were registered, and garbage is
    finalized. But ``__del__`` of an object that is alive at the end and part of a cycle, which Python usually calls, is
    not called. So call this only in a process that does nothing else for its user: a Dask worker with a nanny, or a
    ``dshuffle`` command. A worker without a nanny may share its process with a notebook or a test.
    """
    atexit.unregister(collect_and_freeze)
    atexit.register(collect_and_freeze)


def collect_and_freeze() -> None:
    """Finalize the garbage, and leave what is alive to the operating system."""
    gc.collect()
    gc.freeze()  # the interpreter's last collections run even if the collector is disabled, so they get nothing to do
    gc.disable()  # handlers that run after this one create little

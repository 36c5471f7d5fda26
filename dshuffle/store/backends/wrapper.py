"""The base of stores that wrap another one: whatever zarr reads, it reads through ``get``.

Zarr's own wrapper hands some ways to read to the wrapped store, and newer releases of zarr have more of them. Retries,
time-outs and counts would then be bypassed.
"""

from __future__ import annotations

from zarr.abc.store import Store
from zarr.storage import WrapperStore

READS = ("_get_many", "get_ranges")
"""Methods of stores that read with ``get``, as far as this release of zarr has them."""


class Wrapper(WrapperStore[Store]):
    """A store that wraps another one. Subclasses override ``get``, and ``get_partial_values`` for batches."""

    # Synchronous reads cannot wait for retries on zarr's event loop, so zarr must not use them.
    _supports_sync_io = False


for name in READS:
    if hasattr(Store, name):
        setattr(Wrapper, name, getattr(Store, name))

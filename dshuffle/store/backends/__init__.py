"""Open the Zarr store at a URL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.private_files import replace_file
from dshuffle.redaction import option_values
from dshuffle.store.backends.patient_store import Meter, Patience, PatientStore
from dshuffle.store.backends.store_errors import SAME_ANSWER, explained

try:
    from dshuffle.store.backends import s3
except ImportError:  # without the extra
    s3 = None  # type: ignore[assignment]

# fsspec's schemes for files of this machine.
_FILES = ("local", "file")

_MEMORY: dict[str, dict[str, Buffer]] = {}


class PrivateFiles(LocalStore):
    """Local files that only this user can read, once they are written."""

    async def set(self, key: str, value: Buffer) -> None:
        """Replace a file at once, or not at all."""
        await asyncio.to_thread(replace_file, os.path.join(self.root, key), value.to_bytes())


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None,
    *,
    read_only: bool,
    private: bool = False,
    meter: Meter | None = None,
) -> PatientStore:
    """Open the Zarr store at a canonical URL. It repeats requests after transient errors.

    ``memory://name`` is a registry in this process, for tests. Schemes other than local paths and S3 are opened with
    fsspec. The options ``max_retries``, ``timeout`` and ``connections`` limit requests, see ``Patience``. All other
    options are passed to the store. Only this user can read ``private`` files that are written to a local path.

    Raises
    ------
    InvalidParameter
        If the scheme or an option is unknown.
    DatasetError
        If the scheme needs a package that is not installed.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    # Some servers with a short queue answer nobody for long if a process opens more.
    patience, options = Patience.of(storage_options, **({"connections": 16} if scheme in ("http", "https") else {}))
    secrets, access = option_values(options), ""
    store: Store
    if scheme in ("", "memory"):
        if options:
            # Values may be secrets, so show only the names of the options.
            raise InvalidParameter.of(
                "storage_options",
                sorted(options),
                f"max_retries, timeout or connections for {url}",
                "Other options apply only to S3 and to fsspec's schemes.",
            )
        if scheme == "memory":
            name = url.removeprefix("memory://")
            kept = _MEMORY.get(name, {}) if read_only else _MEMORY.setdefault(name, {})
            store = MemoryStore(kept, read_only=read_only)
        else:
            store = (PrivateFiles if private else LocalStore)(url, read_only=read_only)
    elif scheme == "s3":
        store, secrets, access = _open_s3(url, options, patience, read_only=read_only)
    else:
        store = _open_fsspec(url, scheme, options, read_only=read_only)
        if scheme not in _FILES:
            access = f"If {scheme}:// needs credentials, give them in storage_options. {SAME_ANSWER}"
    return PatientStore(store, url, patience, limits_itself=scheme == "s3", secrets=secrets, access=access, meter=meter)


def _open_s3(
    url: str, options: dict[str, Any], patience: Patience, *, read_only: bool
) -> tuple[Store, tuple[str, ...], str]:
    if s3 is None:
        raise DatasetError(f"{url} needs obstore to read s3:// URLs; install it with pip install 'dshuffle[s3]'")
    return s3.open_s3(url, options, patience, read_only=read_only)


def _open_fsspec(url: str, scheme: str, options: dict[str, Any], *, read_only: bool) -> Store:
    try:
        return FsspecStore.from_url(url, storage_options=options, read_only=read_only)
    except OSError as exc:  # some file systems connect at once
        raise DatasetError(f"cannot open {url}: {explained(exc, option_values(options))}") from None
    except ImportError as exc:
        raise DatasetError(f"{url} needs a package for {scheme}:// URLs that is not installed: {exc}") from exc
    except ValueError as exc:
        raise InvalidParameter.of(
            "url",
            url,
            "a local path, memory://, s3://, or a scheme that fsspec knows (gs://, https://, ...)",
            f"fsspec says: {exc}. Install the package for this scheme (gcsfs for gs://).",
        ) from exc

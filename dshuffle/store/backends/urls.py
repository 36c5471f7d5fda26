"""URLs and paths of datasets as users write them."""

from __future__ import annotations

import os
import re

from dshuffle.errors import InvalidParameter

_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")
# pathlib.Path turns "s3://bucket" into "s3:/bucket".
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def canonical_url(url: str | os.PathLike[str]) -> str:
    """Return a URL that is valid in any process on this machine: local paths become absolute.

    Raises
    ------
    InvalidParameter
        If it is neither a path nor a URL.

    Examples
    --------
    >>> canonical_url("file:///data/../scratch/x.zarr")
    '/scratch/x.zarr'
    >>> canonical_url("file://localhost/scratch/x.zarr")
    '/scratch/x.zarr'
    >>> canonical_url("s3://bucket/x.zarr")
    's3://bucket/x.zarr'
    """
    if isinstance(url, os.PathLike):
        url = os.fspath(url)
    if not isinstance(url, str) or not url.strip():
        raise InvalidParameter.of("url", url, "a path or a URL", 'For example "data/x.zarr" or "s3://bucket/x".')
    if url != url.strip():
        raise InvalidParameter.of("url", url, "without spaces and line ends around it")
    if _WINDOWS_PATH.match(url):
        raise InvalidParameter.of("url", url, "a POSIX path or a URL", "This is a path of Windows.")
    if _ONE_SLASH.match(url):
        hint = "pathlib.Path removes one of them, so give the URL as a string."
        raise InvalidParameter.of("url", url, "a path, or a URL with two slashes after the colon", hint)
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() != "file":
        if scheme.lower() == "nfs":
            hint = "Mount the export on all hosts (mount -t nfs SERVER:/EXPORT /MOUNT) and give the path below /MOUNT."
            raise InvalidParameter.of("url", url, "a path on a mounted NFS export", hint)
        if not rest.strip("/"):
            raise InvalidParameter.of("url", url, f"{scheme}:// followed by the location of the dataset")
        return f"{scheme.lower()}://{rest.rstrip('/')}"
    if not separator:
        return os.path.abspath(os.path.expanduser(url))
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost"):
        hint = f"It names the host {host!r}; the path of a file:// URL is absolute."
        raise InvalidParameter.of("url", url, "file:///PATH or file://localhost/PATH", hint)
    if not path:
        raise InvalidParameter.of("url", url, "file:///PATH")
    return os.path.abspath(slash + path)


def is_local(url: str) -> bool:
    """Whether a canonical URL is a path on this machine's file systems."""
    return "://" not in url


def is_memory(url: str) -> bool:
    """Whether a canonical URL exists in this process only."""
    return url.startswith("memory://")

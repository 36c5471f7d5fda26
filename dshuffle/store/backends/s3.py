"""``s3://bucket/prefix`` through obstore.

obstore takes 2-3 CPU seconds per GB and s3fs 6-9 (measured on one machine with Ceph's and other servers). Workers need
their processors for training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import S3Store
from zarr.storage import ObjectStore

from dshuffle.errors import InvalidParameter
from dshuffle.store.backends.patient_store import Patience
from dshuffle.store.backends.store_errors import SAME_ANSWER, explained

#: Option name in s3fs, fsspec or boto3 -> option name in obstore.
_OTHER_NAMES = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "endpoint_url": "endpoint",
    "aws_endpoint": "endpoint",
    "aws_endpoint_url": "endpoint",
    "region_name": "region",
    "aws_region": "region",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
}
_OWN_NAMES = (
    *("access_key_id", "secret_access_key", "session_token", "endpoint", "region", "default_region"),
    *("skip_signature", "virtual_hosted_style_request", "request_payer", "unsigned_payload", "s3_express"),
    *("checksum_algorithm", "disable_tagging", "role_arn", "role_session_name", "sts_endpoint"),
    *("web_identity_token_file", "metadata_endpoint", "imdsv1_fallback", "server_side_encryption", "sse_kms_key_id"),
    *("sse_bucket_key_enabled", "sse_customer_key_base64", "client_options"),
)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SECRET_NAMES = ("access_key_id", "secret_access_key", "session_token", "sse_customer_key_base64")
_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def open_s3(
    url: str, storage_options: Mapping[str, Any], patience: Patience, *, read_only: bool
) -> tuple[ObjectStore[S3Store], tuple[str, ...], str]:
    """Open the store at an ``s3://`` URL.

    Returns the store, the secrets that must not appear in its errors, and what an error says if access is refused.

    Missing options come from the usual environment variables (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ...), then from the role of the machine.

    Raises
    ------
    InvalidParameter
        If an option is unknown. The message never shows values.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket or "?" in url:
        raise InvalidParameter.of(
            "url", "s3://***", "s3://bucket/prefix", "Put credentials and options in storage_options."
        )
    options = _known(storage_options)
    secrets = tuple(str(options[name]) for name in _SECRET_NAMES if options.get(name))
    secrets += tuple(os.environ[name] for name in _SECRET_VARIABLES if os.environ.get(name))
    options.setdefault("endpoint", next((v for v in map(os.environ.get, _ENDPOINT_VARIABLES) if v), None))
    _check_endpoint(options["endpoint"])
    if options.get("region") is None and not any(map(os.environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION"))):
        options["region"] = options.get("default_region") or "us-east-1"
    client: Any = {
        # HTTP without TLS only if the endpoint says so.
        "allow_http": str(options["endpoint"] or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=min(10.0, patience.timeout)),
        # Time without data, not for the whole answer: a large chunk may take long over a slow link.
        "read_timeout": timedelta(seconds=patience.timeout),
        "timeout": timedelta(seconds=10 * patience.timeout),
        **options.pop("client_options", {}),
    }
    config: Any = {name: value for name, value in options.items() if value is not None}
    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            # PatientStore does that, and counts.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=patience.timeout)},
        )
    except (BaseError, TypeError, ValueError) as exc:
        raise InvalidParameter.because(
            "storage_options", f"obstore rejects {sorted(storage_options)} ({explained(exc, secrets)})"
        ) from None
    return ObjectStore(store, read_only=read_only), secrets, _access(options)


def _access(options: Mapping[str, Any]) -> str:
    """How access is tried, and what to do if it is refused."""
    anonymous = options.get("skip_signature")
    if anonymous is None:
        anonymous = os.environ.get("AWS_SKIP_SIGNATURE", "")
    if str(anonymous).lower() in ("1", "true", "on", "yes", "y"):
        hint = (
            "Access was tried without credentials (anon, skip_signature). Give credentials in storage_options (key and "
            "secret), or requester_pays=True with them, if the bucket asks for that"
        )
    else:
        source = "of this machine's role"
        if options.get("access_key_id"):
            source = "in storage_options"
        elif os.environ.get("AWS_ACCESS_KEY_ID"):
            source = "in AWS_ACCESS_KEY_ID"
        hint = (
            f"Access was tried with the credentials {source}. They lack the permission, or the bucket is public and "
            "needs anon=True, or its readers pay and it needs requester_pays=True"
        )
    return f"{hint}. {SAME_ANSWER}"


def _check_endpoint(endpoint: object) -> None:
    # obstore would panic later on an invalid endpoint.
    if endpoint is None:
        return
    if not isinstance(endpoint, str) or not endpoint.startswith(("http://", "https://")) or "@" in endpoint:
        raise InvalidParameter.of(
            "endpoint",
            "***" if "@" in str(endpoint) else endpoint,
            "http://HOST:PORT or https://HOST[:PORT]",
            "Give credentials as separate options.",
        )


def _known(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options to obstore's names."""
    flat = dict(storage_options)
    for name, value in dict(flat.pop("client_kwargs", None) or {}).items():
        flat.setdefault(name, value)
    translated: dict[str, Any] = {}
    for name, value in flat.items():
        own = _OTHER_NAMES.get(name, name)
        if own not in _OWN_NAMES:
            raise InvalidParameter.because(
                "storage_options",
                f"{name!r} is unknown",
                f"Known options are {', '.join(_OWN_NAMES)} (or s3fs's names), max_retries, timeout, connections.",
            )
        if own in translated and translated[own] != value:
            raise InvalidParameter.because(
                "storage_options", f"{own} is given twice with different values", "Give each option once."
            )
        translated[own] = value
    return translated

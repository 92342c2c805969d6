"""Checkpoints in a bucket of S3, or of a server that speaks its protocol."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from obstore.store import S3Store

from paceline.storage._bucket_by_obstore import BucketStorage, endpoint_of

_RENEW = "renew the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN)."


class S3Storage(BucketStorage):
    """Keep checkpoints as objects below a prefix of a bucket.

    Credentials, region and server are those of the environment: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL, else what the machine
    itself has been given by AWS, else, where boto3 is installed, what it finds.
    """

    scheme = "s3"
    _missing = "NoSuchBucket"
    _hints = {
        "ExpiredToken": _RENEW,
        "InvalidAccessKeyId": _RENEW,
        "SignatureDoesNotMatch": _RENEW,
        "AccessDenied": "the credentials must allow to list, read, write and delete there.",
        "NotImplemented": "AWS_CONDITIONAL_PUT=disabled is for servers without `If-None-Match`.",
    }
    _server_hint = "AWS_ENDPOINT_URL must name a server that answers."
    _credentials = "AWS_ENDPOINT_URL"
    _own_credentials = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

    def _make_client(self, options: Any) -> S3Store:
        endpoint = endpoint_of("AWS_ENDPOINT_URL_S3") or endpoint_of("AWS_ENDPOINT_URL")
        config: Any = {"endpoint": endpoint} if endpoint else {}
        # A server of one's own, as for tests, may have no certificate.
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        return S3Store(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            credential_provider=_credentials_of_boto3(os.environ),
            **options,
        )

    @property
    def _keeps_writers_apart(self) -> bool:
        return os.environ.get("AWS_CONDITIONAL_PUT") != "disabled"

    def _put_new(self, key: str, data: bytes) -> None:
        if self._keeps_writers_apart:
            super()._put_new(key, data)
        else:
            self._put_data(key, data)


def _credentials_of_boto3(environment: Mapping[str, str]) -> Any:
    """Return what finds credentials in profiles and the like, if boto3 is there and has some."""
    if "AWS_ACCESS_KEY_ID" in environment or importlib.util.find_spec("boto3") is None:
        return None
    from boto3 import Session  # type: ignore[import-untyped]
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() else None

"""Checkpoints in a bucket of Google Cloud Storage, reached by obstore: experimental."""

import logging
from functools import cache
from typing import Any

from obstore.store import GCSStore

from paceline.storage._bucket_storage import BucketStorage, endpoint_of

logger = logging.getLogger(__name__)

_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"


class GoogleStorage(BucketStorage):
    """Keep checkpoints as objects below a prefix of a bucket of Google Cloud Storage.

    Credentials come from the environment: GOOGLE_APPLICATION_CREDENTIALS or
    GOOGLE_SERVICE_ACCOUNT, the path of a file, or GOOGLE_SERVICE_ACCOUNT_KEY, its text; else from
    the machine's service account. GOOGLE_BASE_URL names a server of your own. It is experimental: a
    stand-in has run the contract suite, Google's server has not.
    """

    scheme = "gs"
    _missing = "NoSuchBucket"
    _hints = {
        "AccessDenied": "the account must be allowed to list, read, write and delete there.",
        "token request": f"{_CREDENTIALS} must name a file of credentials that are valid.",
    }
    _server_hint = "GOOGLE_BASE_URL must name a server that answers."
    _credentials = _own_credentials = _CREDENTIALS

    def _make_client(self, options: Any) -> GCSStore:
        _warn_experimental()
        endpoint = endpoint_of("GOOGLE_BASE_URL")
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        return GCSStore(self._bucket, prefix=self._prefix or None, **options)


@cache
def _warn_experimental() -> None:
    """Log the warning of the first use in this process."""
    logger.warning(
        "gs:// storages are experimental: they were tested against a stand-in for Google Cloud"
        " Storage, not against Google's server. Keep a copy of what you cannot lose."
    )

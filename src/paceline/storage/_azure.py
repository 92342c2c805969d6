"""Checkpoints in a container of Azure Blob Storage."""

from collections.abc import Sequence
from typing import Any

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import AzureStore

from paceline.storage._bucket_by_obstore import BucketStorage, endpoint_of

_CONFIGURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY must be those of the account"


class AzureStorage(BucketStorage):
    """Keep checkpoints as blobs below a prefix of a container.

    The account and credentials are those of the environment: AZURE_STORAGE_ACCOUNT_NAME and
    AZURE_STORAGE_ACCOUNT_KEY (or another credential that obstore reads there, such as
    AZURE_STORAGE_SAS_KEY), and AZURE_STORAGE_ENDPOINT for a server of one's own.
    """

    scheme = "az"
    _kind = "container"
    _missing = "ContainerNotFound"
    _hints = {
        "AuthenticationFailed": f"{_CONFIGURE}.",
        "AuthorizationFailure": f"{_CONFIGURE}.",
        "Account must be specified": f"{_CONFIGURE}.",
    }
    _server_hint = "AZURE_STORAGE_ENDPOINT must name a server that answers."
    _credentials = "AZURE_STORAGE_ACCOUNT_NAME"
    _own_credentials = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"

    def remove(self, keys: Sequence[str]) -> None:
        """Remove blobs, many at once."""
        with self._errors(f"{len(keys)} blobs must be removed", writes=True):
            try:
                if keys:
                    self._tried(lambda client: obstore.delete(client, list(keys)))
            except (NotFoundError, FileNotFoundError) as error:
                if self._missing in str(error):
                    raise
                # One of many was not there, which says nothing about those after it.
                for key in keys:
                    self._remove_one(key)

    def _remove_one(self, key: str) -> None:
        try:
            self._tried(lambda client: obstore.delete(client, key))
        except (NotFoundError, FileNotFoundError) as error:
            if self._missing in str(error):
                raise

    def _make_client(self, options: Any) -> AzureStore:
        endpoint = endpoint_of("AZURE_STORAGE_ENDPOINT")
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
        config: Any = {"endpoint": endpoint} if endpoint else {}
        return AzureStore(self._bucket, prefix=self._prefix or None, config=config, **options)

"""`S3Objects`: an `ObjectStore` in a bucket of MinIO, or of another S3 server."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from tunemq_shared.base.retrying import CancelToken, retried
from tunemq_shared.objects.object_client import ObjectClient, StoreRequestDenied
from tunemq_shared.objects.remote_object_store import CONNECTIONS, Reading, RemoteObjects
from tunemq_shared.objects.s3_address import S3Address, find_ca_file, find_keys
from tunemq_shared.objects.s3_client import S3Client


class S3Objects(RemoteObjects):
    """See `ObjectStore`; reads the credentials when it is made, and after a denied request.

    Args:
        address: The bucket, prefix and server.
        environ: Names credentials and certificates; see `tunemq_shared.objects.s3_address`.
        reading: A context in which key files are read.

    Raises:
        StoreError: There are no credentials.
        ConfigError: The file of certificates is invalid.
    """

    def __init__(
        self, address: S3Address, environ: Mapping[str, str], reading: Reading = nullcontext
    ) -> None:
        self._may_create = address.create_bucket
        ca_file = find_ca_file(address, environ)

        def connect(connect_s: float, read_s: float) -> S3Client:
            with reading():
                keys = find_keys(environ, address.profile)
            return S3Client(
                address, keys, ca_file, connect_s=connect_s, read_s=read_s, at_once=CONNECTIONS
            )

        super().__init__(f"{address.place} at {address.endpoint}", address.prefix, connect)

    def _prepare(
        self, rejection: StoreRequestDenied, client: ObjectClient, cancel: CancelToken
    ) -> bool:
        if rejection.code != "NoSuchBucket" or not self._may_create:
            return False
        assert isinstance(client, S3Client)  # of our own making
        try:
            retried(client.create, cancel)
        except StoreRequestDenied as error:
            # Another process made it first; the next try shows whether we may use it.
            if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise
        return True

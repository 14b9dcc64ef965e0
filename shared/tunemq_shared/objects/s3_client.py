"""`S3Client`: the operations of S3, without retries. The only module that imports ``minio``.

It does not use that client's retries and multipart upload: they restart a whole file, and cannot be
cancelled. It needs only PUT, GET, DELETE, ListV2 and multipart uploads, which every S3 server has.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from hashlib import sha256 as new_sha256
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError, fromstring

import urllib3
from minio import Minio
from minio.datatypes import Part
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.response import BaseHTTPResponse

from tunemq_shared.base.errors import StoreError
from tunemq_shared.objects import s3_errors
from tunemq_shared.objects.multipart import PartBody
from tunemq_shared.objects.object_client import IncompleteUpload, NoSuchUpload, StoreInternalError
from tunemq_shared.objects.object_store import (
    InvalidObjectName,
    NoSuchObject,
    ObjectInfo,
    ObjectSizeMismatch,
)
from tunemq_shared.objects.s3_address import S3Address, S3Credentials

#: Bytes per send or receive; a transfer can be cancelled in between.
BLOCK: Final = 2**18

_TYPE: Final = "application/octet-stream"
#: TLS errors that a retry does not fix.
_NO_TRUST: Final = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL")
#: Errors about one object's name: the server works, and a retry would fail too.
_INVALID_NAME: Final = ("KeyTooLongError", "XMinioInvalidObjectName")


class S3Content(NamedTuple):
    """See `ObjectContent`."""

    total: int
    response: BaseHTTPResponse

    def blocks(self) -> Iterator[bytes]:
        """See `ObjectContent.blocks`."""
        # As stored: its writer could name a compression, and so send any amount of bytes.
        yield from self.response.stream(BLOCK, decode_content=False)


class S3Client(Minio):
    """See `ObjectClient`; the place is one bucket of a server.

    Args:
        address: The bucket and its server.
        keys: The credentials.
        ca_file: Certificates to trust; empty for the default ones.
        connect_s: Seconds to connect, and to send one block: urllib3 has no separate limit for
            that.
        read_s: Seconds until the next bytes of an answer.
        at_once: How many connections are kept.
    """

    def __init__(
        self,
        address: S3Address,
        keys: S3Credentials,
        ca_file: str,
        *,
        connect_s: float,
        read_s: float,
        at_once: int,
    ) -> None:
        self._address = address
        self._bucket = address.bucket
        self._pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=connect_s, read=read_s),
            maxsize=at_once,
            retries=False,
            blocksize=BLOCK,
            cert_reqs="CERT_REQUIRED",
            ca_certs=ca_file or None,
        )
        parts = urlsplit(address.endpoint)
        super().__init__(
            parts.netloc,
            access_key=keys.access_key,
            secret_key=keys.secret_key,
            session_token=keys.session_token or None,
            secure=parts.scheme == "https",
            region=address.region,
            http_client=self._pool,
        )
        self._base_url.virtual_style_flag = not address.path_style

    def url(self, name: str = "") -> str:
        """The URL for requests about an object, or about the bucket; its host depends on both."""
        with self._asking("it has no address"):
            region = self._get_region(self._bucket)
            built = self._base_url.build(
                method="GET", region=region, bucket_name=self._bucket, object_name=name or None
            )
        return built.geturl()

    def create(self) -> None:
        """Make the bucket."""
        with self._asking("the bucket cannot be made"):
            self.make_bucket(self._bucket)

    def put(self, name: str, data: bytes | PartBody, action: str) -> None:
        """See `ObjectClient.put`."""
        with self._asking(action):
            self._put_object(self._bucket, name, _sendable(data), {"Content-Type": _TYPE})

    @contextlib.contextmanager
    def get(
        self, name: str, action: str, *, offset: int = 0, length: int = 0
    ) -> Iterator[S3Content]:
        """See `ObjectClient.get`."""
        with self._asking(action):
            response = self.get_object(self._bucket, name, offset=offset, length=length)
            try:
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                yield S3Content(
                    int(total or response.headers.get("Content-Length", "-1")), response
                )
            except BaseException:
                response.close()  # the rest will not be read
                raise
            finally:
                response.release_conn()

    def remove(self, name: str, action: str) -> None:
        """See `ObjectClient.remove`."""
        with contextlib.suppress(NoSuchObject), self._asking(action):
            self.remove_object(self._bucket, name)

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectClient.listed`."""
        with self._asking("it cannot be listed"):
            for found in self.list_objects(self._bucket, prefix=prefix, recursive=True):
                if found.object_name and not found.is_dir:
                    modified = found.last_modified.timestamp() if found.last_modified else 0.0
                    yield ObjectInfo(found.object_name, found.size or 0, modified)

    def create_upload(self, name: str, action: str) -> str:
        """See `ObjectClient.create_upload`."""
        with self._asking(action):
            return self._create_multipart_upload(self._bucket, name, {"Content-Type": _TYPE})

    def put_part(self, name: str, upload: str, number: int, body: PartBody, action: str) -> str:
        """See `ObjectClient.put_part`."""
        with self._asking(action):
            data = _sendable(body)
            return self._upload_part(self._bucket, name, data, None, upload, number)

    def complete_upload(self, name: str, upload: str, etags: Sequence[str], action: str) -> None:
        """See `ObjectClient.complete_upload`."""
        parts = [Part(number, etag) for number, etag in enumerate(etags, 1)]
        with self._asking(action):
            done = self._complete_multipart_upload(self._bucket, name, upload, parts)
        if not done.etag:  # an error with status 200, which S3 allows only for this request
            raise StoreInternalError(f"{self._address.place}: {action}: its parts were not joined.")

    def abort_upload(self, name: str, upload: str) -> None:
        """See `ObjectClient.abort_upload`."""
        with (
            contextlib.suppress(NoSuchUpload),
            self._asking(f"parts of {name} cannot be removed"),
        ):
            self._abort_multipart_upload(self._bucket, name, upload)

    def unfinished(self) -> Iterator[IncompleteUpload]:
        """See `ObjectClient.unfinished`.

        Lists the whole bucket: MinIO takes a prefix here for the name of one object.
        """
        marker = None
        while True:
            try:
                with self._asking("unfinished uploads cannot be listed"):
                    found = self._list_multipart_uploads(self._bucket, key_marker=marker)
            except NoSuchUpload:
                return  # rclone answers so if there are none
            for upload in found.uploads:
                yield IncompleteUpload(upload.object_name or "", upload.upload_id or "")
            marker = found.next_key_marker
            if not (found.is_truncated and marker):
                return

    def close(self) -> None:
        """See `ObjectClient.close`."""
        self._pool.clear()

    def _build_headers(
        self, host: str, headers: Any = None, body: Any = None, creds: Any = None
    ) -> Any:
        """Build the request's headers and check the hash that they sign; see `PartBody.check`."""
        built, date = super()._build_headers(host, headers, body, creds)
        if isinstance(body, PartBody) and body.sha256:
            found = str(built["x-amz-content-sha256"])
            # Over HTTPS the content is not signed.
            body.check(new_sha256(body).hexdigest() if found == "UNSIGNED-PAYLOAD" else found)
        return built, date

    @contextlib.contextmanager
    def _asking(self, action: str) -> Iterator[None]:
        """Convert every exception of the client to a StoreError that says what failed."""
        address = self._address
        try:
            yield
        except StoreError:
            raise
        except S3Error as error:
            status, message = error.response.status, error.message or ""
            raise self._rejection(error.code or "", message, status, action) from error
        except (InvalidResponseError, ServerError) as error:
            raise self._strange(error, action) from error
        except urllib3.exceptions.HTTPError as error:
            reason = _reason(error)
            if isinstance(reason, StoreError):
                raise reason from None  # our own body raised it during sending
            if isinstance(reason, ssl.SSLError) and reason.reason in _NO_TRUST:
                raise s3_errors.untrusted(address, action, str(reason)) from error
            raise s3_errors.unreachable(address, action, str(reason)) from error
        except (MinioException, ParseError, ValueError) as error:
            raise s3_errors.no_s3(address, action, str(error)) from error

    def _strange(self, error: InvalidResponseError | ServerError, action: str) -> StoreError:
        """Interpret an error answer with the content type ``text/xml``, as rclone sends it."""
        status = int(getattr(error, "_code", 0) or getattr(error, "status_code", 0))
        body: str = getattr(error, "_body", None) or ""
        try:
            tags = fromstring(body)  # noqa: S314 - as the client parses every other XML answer
            answer = {tag.tag.rpartition("}")[2]: tag.text or "" for tag in tags}
        except ParseError:
            answer = {}
        code = answer.get("Code", f"HTTP status {status}")
        if "Code" in answer or status >= 500 or status == 429:
            return self._rejection(code, answer.get("Message", ""), status, action)
        return s3_errors.no_s3(self._address, action, code)

    def _rejection(self, code: str, message: str, status: int, action: str) -> StoreError:
        where = f"{self._address.place} at {self._address.endpoint}"
        if code == "NoSuchKey":
            return NoSuchObject(f"{where}: {action}: there is no such object.")
        if code in _INVALID_NAME:
            return InvalidObjectName(
                f"{where}: {action}: the server takes no object of this name ({code}: {message})."
            )
        if code == "InvalidRange":
            return ObjectSizeMismatch(f"{where}: {action}: the object is cut short.", "fewer")
        if code == "NoSuchUpload":
            return NoSuchUpload(f"{where}: {action}: the server forgot the parts it had.")
        return s3_errors.rejected(self._address, action, code, status, message)


def _sendable(data: bytes | PartBody) -> bytes:
    # An empty file-like body would be sent in chunks, which S3 rejects.
    if not isinstance(data, PartBody):
        return data
    return data.rewound() if data else b""


def _reason(error: BaseException) -> BaseException:
    """The innermost exception of those that urllib3 wraps."""
    for inner in error.args:
        if isinstance(inner, BaseException):
            return _reason(inner)
    return error.__cause__ if isinstance(error.__cause__, OSError) else error

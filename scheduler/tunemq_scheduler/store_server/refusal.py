"""`Refusal`: a request that is not done, and why, in the terms of `tunemq_shared.http_wire`."""

from __future__ import annotations

import errno
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from tunemq_shared.http_wire import Code

_STATUS: Final = MappingProxyType(
    {
        Code.NO_SUCH_OBJECT: HTTPStatus.NOT_FOUND,
        Code.NO_SUCH_UPLOAD: HTTPStatus.NOT_FOUND,
        Code.CUT_SHORT: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        Code.DAMAGED: HTTPStatus.UNPROCESSABLE_ENTITY,
        Code.FULL: HTTPStatus.INSUFFICIENT_STORAGE,
        Code.BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
        Code.WRONG_TOKEN: HTTPStatus.UNAUTHORIZED,
        Code.TAKEN: HTTPStatus.CONFLICT,
        Code.BAD_REQUEST: HTTPStatus.BAD_REQUEST,
        Code.WRONG_HOST: HTTPStatus.BAD_REQUEST,
        Code.FROM_PAGE: HTTPStatus.FORBIDDEN,
        Code.FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
    }
)


class Refusal(Exception):
    """A request is not done."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def status(self) -> HTTPStatus:
        """HTTP's number for it."""
        return _STATUS[self.code]


def refusal_of(error: OSError, folder: str) -> Refusal:
    """What a failure of the disk means to the client."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return Refusal(Code.FULL, f"the disk of the served folder {folder} is full")
        case errno.ENAMETOOLONG | errno.EILSEQ | errno.EINVAL:
            return Refusal(Code.BAD_REQUEST, "the server's file system takes no such name")
        case _:
            return Refusal(Code.FAILED, f"the served folder {folder}: {error.strerror}")

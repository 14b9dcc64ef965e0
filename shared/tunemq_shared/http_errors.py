"""What a served folder's refusal means to the person who set it up: what is wrong, what to do."""

from __future__ import annotations

from tunemq_shared.errors import StoreError
from tunemq_shared.http_address import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, HttpAddress
from tunemq_shared.http_wire import Code, Problem
from tunemq_shared.object_client import Refused, UploadForgotten
from tunemq_shared.object_store import MissingObject, WrongSize
from tunemq_shared.retrying import StoreUnavailable


def refused(address: HttpAddress, doing: str, status: int, problem: Problem) -> StoreError:
    """The error for an answer; `StoreUnavailable` where another try may help.

    Args:
        doing: What was refused, as in ``a/b cannot be written``.
        status: HTTP's.
        problem: The server's words.
    """
    where, said = f"{address.place}: {doing}", problem.message.rstrip(".")
    match problem.code:
        case Code.NO_SUCH_OBJECT:
            return MissingObject(f"{where}: there is no such object.")
        case Code.NO_SUCH_UPLOAD:
            return UploadForgotten(f"{where}: the server forgot the parts it had.")
        case Code.CUT_SHORT:
            return WrongSize(f"{where}: the object is cut short.", "fewer")
        case Code.DAMAGED:
            return StoreUnavailable(f"{where}: it was damaged on its way ({said}).")
        case Code.FULL:
            return StoreUnavailable(f"{where}: {said}; make room there.")
        case Code.WRONG_TOKEN:
            return Refused(
                f"{where}: this is not the server's token; set {TOKEN_VARIABLE}, or the file that "
                f"{TOKEN_FILE_VARIABLE} names, to that of `tunemq store serve`.",
                problem.code,
            )
        case _:
            pass
    if status >= 500:
        return StoreUnavailable(f"{where}: the server cannot do it now ({said}).")
    return Refused(f"{where}: the server refused it ({said}).", problem.code)


def unreachable(address: HttpAddress, doing: str, reason: str) -> StoreUnavailable:
    """The error for a server that does not answer."""
    return StoreUnavailable(
        f"{address.place}: {doing}: the server cannot be reached ({reason}); check that `tunemq "
        "store serve` runs there, and host and port."
    )


def untrusted(address: HttpAddress, doing: str, reason: str) -> Refused:
    """The error for a TLS connection that could not be made."""
    return Refused(
        f"{address.place}: {doing}: no secure connection can be made ({reason}); check http or "
        "https in the address, and name its certificate with ca_file.",
        "",
    )


def no_store(address: HttpAddress, doing: str, reason: str) -> Refused:
    """The error for an answer that `tunemq store serve` does not give."""
    return Refused(
        f"{address.place}: {doing}: what answers there is no `tunemq store serve` ({reason}); "
        "check host, port, and http or https in the address.",
        "",
    )

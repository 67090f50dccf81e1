"""Statuses of calls, with one exception class for each."""

from __future__ import annotations

import enum
from typing import ClassVar, Dict, Optional, Type

from . import _abi as abi


class Status(enum.IntEnum):
    """gRPC's status codes, as in pqc_status."""

    OK = abi.PQC_OK
    CANCELLED = abi.PQC_CANCELLED
    UNKNOWN = abi.PQC_UNKNOWN
    INVALID_ARGUMENT = abi.PQC_INVALID_ARGUMENT
    DEADLINE_EXCEEDED = abi.PQC_DEADLINE_EXCEEDED
    NOT_FOUND = abi.PQC_NOT_FOUND
    ALREADY_EXISTS = abi.PQC_ALREADY_EXISTS
    PERMISSION_DENIED = abi.PQC_PERMISSION_DENIED
    RESOURCE_EXHAUSTED = abi.PQC_RESOURCE_EXHAUSTED
    FAILED_PRECONDITION = abi.PQC_FAILED_PRECONDITION
    ABORTED = abi.PQC_ABORTED
    OUT_OF_RANGE = abi.PQC_OUT_OF_RANGE
    UNIMPLEMENTED = abi.PQC_UNIMPLEMENTED
    INTERNAL = abi.PQC_INTERNAL
    UNAVAILABLE = abi.PQC_UNAVAILABLE
    DATA_LOSS = abi.PQC_DATA_LOSS
    UNAUTHENTICATED = abi.PQC_UNAUTHENTICATED


class Error(Exception):
    """A call failed and changed nothing.

    `status` is the code, `message` the readable reason with the field and its limit, `field` the path of the
    refused field ("selection.ratio", or ""), `retry_ms` the time in milliseconds after which a
    repetition may succeed (0: repeating the call is not worthwhile), and `retry_after` the same time
    in seconds (None: repeating is not worthwhile).
    """

    status: ClassVar[Status] = Status.UNKNOWN

    def __init__(self, message: str = "", field: str = "", retry_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_ms = retry_ms

    @property
    def retry_after(self) -> Optional[float]:
        return self.retry_ms / 1000 if self.retry_ms else None

    @classmethod
    def about(cls, field: str, text: str) -> Error:
        """An error of this package about an argument."""
        return cls(f"{field}: {text}", field)

    def __str__(self) -> str:
        return f"{self.status.name}: {self.message}"


class Cancelled(Error):
    """The caller ended the call, for example by a build's progress callback."""

    status = Status.CANCELLED


class Unknown(Error):
    """The status is not known to this version."""

    status = Status.UNKNOWN


class InvalidArgument(Error):
    """An argument is wrong, whatever the state of the sidecar."""

    status = Status.INVALID_ARGUMENT


class DeadlineExceeded(Error):
    """The call did not end within its time."""

    status = Status.DEADLINE_EXCEEDED


class NotFound(Error):
    """There is no such cache, sequence or layer, or it is another tenant's."""

    status = Status.NOT_FOUND


class AlreadyExists(Error):
    """The object exists already, for example an index that is built already."""

    status = Status.ALREADY_EXISTS


class PermissionDenied(Error):
    """The tenant or session must not do this."""

    status = Status.PERMISSION_DENIED


class ResourceExhausted(Error):
    """Memory or a limit is exhausted; the message gives the shortfall."""

    status = Status.RESOURCE_EXHAUSTED


class FailedPrecondition(Error):
    """The state does not permit the call: a closed handle, an index that is not built, a library
    that is not found.
    """

    status = Status.FAILED_PRECONDITION


class Aborted(Error):
    """Another call is changing the sequence; repeat later."""

    status = Status.ABORTED


class OutOfRange(Error):
    """A position is beyond the stored tokens, or the memory for the answer is too small."""

    status = Status.OUT_OF_RANGE


class Unimplemented(Error):
    """The interface defines this, but this version does not implement it, for example tensors on
    CUDA devices.
    """

    status = Status.UNIMPLEMENTED


class Internal(Error):
    """A defect of pqcached."""

    status = Status.INTERNAL


class Unavailable(Error):
    """The sidecar does not answer: repeat after `retry_ms`; when that is 0, open a new client."""

    status = Status.UNAVAILABLE


class DataLoss(Error):
    """Stored bytes are damaged."""

    status = Status.DATA_LOSS


class Unauthenticated(Error):
    """The session's token is missing or unknown."""

    status = Status.UNAUTHENTICATED


ERRORS: Dict[int, Type[Error]] = {
    int(error.status): error
    for error in (
        Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists, PermissionDenied,
        ResourceExhausted, FailedPrecondition, Aborted, OutOfRange, Unimplemented, Internal, Unavailable, DataLoss,
        Unauthenticated)
}

"""The client library: the search for it, and the errors of calls on it."""

from __future__ import annotations

import ctypes
import pathlib
import threading
from typing import Any, Optional, Tuple

from ._abi import PQC_ABI_VERSION, PROTOTYPES
from ._errors import ERRORS, Error, FailedPrecondition, Unknown

FILE_NAME = "libpqcached_client.so.1"
BUNDLED = pathlib.Path(__file__).resolve().parent / "lib" / FILE_NAME

_lock = threading.Lock()
_library: Optional[Any] = None


def _open(path: str) -> Any:
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise FailedPrecondition(
            f"{FILE_NAME} cannot be loaded: {error}. This package looks for it in {BUNDLED.parent} (a wheel "
            "of build_wheel.py has it, and so has an install with PQCACHED_LIBRARY_DIR=DIR in the environment of pip; DIR "
            "is a build folder or an installed prefix), and else where the loader looks: ld.so.conf, LD_LIBRARY_PATH"
        ) from None
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise FailedPrecondition(f"{path} has no {name}: it is older than this package; install those of one "
                                     "release") from None
        function.restype, function.argtypes = result, arguments
    version = library.pqc_abi_version()
    if version != PQC_ABI_VERSION:
        raise FailedPrecondition(f"{path} has ABI version {version}, this package {PQC_ABI_VERSION}; install those of one "
                                 "release")
    return library


def library() -> Any:
    """Returns the client library, loaded once. Raises FailedPrecondition, which lists the places
    that were searched.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _open(str(BUNDLED) if BUNDLED.exists() else FILE_NAME)
    return _library


# ---- Errors. The library keeps the error text of a thread's last call. The garbage collector may
# close a handle right after a failed call, and closing is such a call too: the text is then kept
# here.

_kept = threading.local()


def clear_error_text() -> None:
    """Before a call: what was kept before belongs to another one."""
    _kept.reason = None


def keep_error_text() -> None:
    """Before a handle is closed at an unknown time."""
    reason = _last_reason()
    if reason[0]:
        _kept.reason = reason


def _last_reason() -> Tuple[bytes, bytes, int]:
    loaded = library()
    return loaded.pqc_last_error(), loaded.pqc_last_error_field(), loaded.pqc_last_error_retry_ms()


def error_of(status: int) -> Error:
    """The exception of a call that failed, made by the thread that called."""
    reason = _last_reason()
    if not reason[0]:
        reason = getattr(_kept, "reason", None) or reason
    message, field = (text.decode("utf-8", "replace") for text in reason[:2])
    known = ERRORS.get(status)
    if known is None:
        return Unknown(f"status {status}: {message}", field, reason[2])
    return known(message, field, reason[2])


def check(status: int) -> None:
    if status:
        raise error_of(status)


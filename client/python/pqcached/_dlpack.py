"""DLPack: the memory of foreign arrays, by the capsules that they export, without copies."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, NamedTuple, Optional, Tuple

from ._enums import Device, DType
from ._errors import InvalidArgument


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor)]


CPU, CUDA, CUDA_HOST = 1, 2, 3
DEVICES = {CPU: Device.CPU, CUDA: Device.CUDA, CUDA_HOST: Device.CPU}  # the last is page-locked
INT, UINT, FLOAT, BFLOAT = 0, 1, 2, 4
# Code and bits -> dtype; None: 16 bits whose meaning the caller must give.
DTYPES: Dict[Tuple[int, int], Optional[DType]] = {
    (FLOAT, 16): DType.F16, (FLOAT, 32): DType.F32, (BFLOAT, 16): DType.BF16, (UINT, 16): None}
_VERSION = 1, 0
_READ_ONLY, _COPIED = 1, 2  # flags of a versioned tensor
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Borrowed(NamedTuple):
    """An exported tensor. `capsule` is not consumed: it keeps the tensor, and frees it with itself."""

    tensor: DLTensor
    capsule: Any
    writable: bool  # exporters without versions refuse to export what must not be written

    @property
    def shape(self) -> Tuple[int, ...]:
        return tuple(self.tensor.shape[i] for i in range(self.tensor.ndim))

    @property
    def strides(self) -> Optional[Tuple[int, ...]]:
        """In elements; None = contiguous."""
        return tuple(self.tensor.strides[i] for i in range(self.tensor.ndim)) if self.tensor.strides else None

    @property
    def address(self) -> int:
        return int(self.tensor.data or 0) + int(self.tensor.byte_offset)


def _opened(capsule: Any) -> Tuple[DLTensor, int]:
    """Returns the tensor of a capsule, and its flags."""
    if _is_valid(capsule, _NAME_VERSIONED):
        managed = DLManagedTensorVersioned.from_address(_pointer(capsule, _NAME_VERSIONED))
        if managed.major != _VERSION[0]:
            raise BufferError(f"version {managed.major} of DLPack, must be {_VERSION[0]}")
        return managed.tensor, int(managed.flags)
    return DLManagedTensor.from_address(_pointer(capsule, _NAME)).tensor, 0


def borrow(name: str, array: Any) -> Borrowed:
    """Raises TypeError for memory on another kind of device, InvalidArgument when the array is not
    exported, or only as a copy.
    """
    place = getattr(array, "__dlpack_device__", None)
    kind = int(place()[0]) if place is not None else CPU
    if kind not in DEVICES:
        raise TypeError(f"{name}: DLPack device {kind}; must be CPU or CUDA")
    try:
        try:
            capsule = array.__dlpack__(max_version=_VERSION, copy=False)
        except TypeError:  # an exporter that is older than versions
            capsule = array.__dlpack__()
        tensor, flags = _opened(capsule)
    except (BufferError, ValueError) as error:
        shape = f", of shape {tuple(array.shape)}" if hasattr(array, "shape") else ""
        raise InvalidArgument.about(name, f"{type(array).__name__}{shape}, is not exported by DLPack: {error}") from None
    if flags & _COPIED:
        raise InvalidArgument.about(name, "is exported by DLPack as a copy only; must be its own memory")
    if tensor.device_type not in DEVICES:
        raise TypeError(f"{name}: DLPack device {tensor.device_type}; must be CPU or CUDA")
    return Borrowed(tensor, capsule, not flags & _READ_ONLY)


def export(array: Any, as_bfloat16: bool, stream: Any, max_version: Optional[Tuple[int, int]],
           dl_device: Optional[Tuple[int, int]], copy: Optional[bool]) -> Any:
    """Returns the capsule of an array, whose 16-bit elements are exported as bfloat16 on demand:
    numpy has no such dtype.
    """
    wanted = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
    given = {name: value for name, value in wanted.items() if value is not None}
    if stream is not None:
        given["stream"] = stream
    try:
        capsule = array.__dlpack__(**given)
    except TypeError:  # an exporter that is older than versions
        if copy or (dl_device is not None and tuple(dl_device) != tuple(array.__dlpack_device__())):
            raise BufferError("this array is exported in place only") from None
        capsule = array.__dlpack__(**({} if stream is None else {"stream": stream}))
    if as_bfloat16:
        _opened(capsule)[0].code = BFLOAT
    return capsule

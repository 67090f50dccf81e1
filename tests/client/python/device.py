"""Arrays on a GPU for the tests: those of torch with the real libpqcached_gpu, else those of the emulation's library.

`DeviceArray(numpy_array)` copies to the device, `.numpy()` copies back; `stream()` returns a cudaStream_t as an int.
"""

import ctypes

import numpy as np

from daemon import BUILD  # noqa: F401  (finds the package)
from pqcached._dlpack import DLManagedTensor, DLTensor

KINDS = {"f": 2, "u": 1, "i": 0}  # DLPack's codes of types
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Emulation:
    def __init__(self, library):
        self._allocate, self.free = library.pqcached_emulated_allocate, library.pqcached_emulated_free
        self.copy, self.stream = library.pqcached_emulated_copy, library.pqcached_emulated_stream
        self._allocate.restype, self._allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self.free.restype, self.free.argtypes = None, [ctypes.c_void_p]
        self.copy.restype, self.copy.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.stream.restype = ctypes.c_void_p

    def array(self, array):
        return _EmulatedArray(self, array)

    def allocate(self, array):
        address = self._allocate(array.nbytes)
        self.copy(address, array.ctypes.data, array.nbytes)
        return address


class _EmulatedArray:
    def __init__(self, emulation, array):
        array = np.ascontiguousarray(array)
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self._emulation, self.address = emulation, emulation.allocate(array)
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._managed = DLManagedTensor(tensor=DLTensor(
            data=self.address, device_type=2, ndim=array.ndim, code=KINDS[array.dtype.kind], bits=8 * array.dtype.itemsize,
            lanes=1, shape=self._shape))

    def __del__(self):
        self._emulation.free(self.address)

    def __dlpack__(self, stream=None):
        return new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def numpy(self):
        array = np.empty(self.shape, self.dtype)
        self._emulation.copy(array.ctypes.data, self.address, self.nbytes)
        return array


class _Torch:
    def __init__(self, torch):
        self.torch = torch
        self._stream = torch.cuda.Stream()

    def array(self, array):
        return _TorchArray(self.torch, array)

    def stream(self):
        return self._stream.cuda_stream


class _TorchArray:
    """The tensor, and what the tests use of NumPy's arrays. It waits for the device before each copy."""

    def __init__(self, torch, array):
        self._torch = torch
        self.tensor = torch.from_numpy(np.array(array, order="C")).cuda()
        self.shape, self.dtype = array.shape, array.dtype
        torch.cuda.synchronize()

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__()

    def numpy(self):
        self._torch.cuda.synchronize()
        return self.tensor.cpu().numpy()


def open_device(path):
    """Returns the device of the library at `path`, with `.array(numpy_array)` and `.stream()`, and why there is none."""
    library = ctypes.CDLL(path)
    if hasattr(library, "pqcached_emulated_allocate"):
        return _Emulation(library), ""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    return (_Torch(torch), "") if torch.cuda.is_available() else (None, "torch found no GPU")

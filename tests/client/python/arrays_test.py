"""Arrays go in by address, with their strides, or are refused before the library is called. Usage: arrays_test.py BUILD"""

import ctypes
import unittest

import numpy as np

import daemon  # noqa: F401  (finds pqcached and skip)
import pqcached
from pqcached import DType, Tensor, merge
from pqcached._arrays import floats_to_write, integers, rows_to_write, tensor_to_fill
from pqcached._dlpack import DLManagedTensor, DLManagedTensorVersioned, DLTensor
from skip import skip_unless

try:
    import torch
except ImportError:
    torch = None

needs_torch = skip_unless("torch", torch is not None, "torch is not installed (Debian: python3-torch)")


def address_of(array):
    return array.__array_interface__["data"][0]


def what_c_sees(tensor):
    """The elements of a pqc_tensor, read through its pointer and strides as the library does."""
    c, width = tensor.c, 4 if tensor.dtype is DType.F32 else 2
    shape = [c.shape[i] for i in range(c.ndim)]
    strides = [c.strides[i] for i in range(c.ndim)] if c.strides else None
    if strides is None:
        strides, step = [], 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
    numbers = {2: np.uint16, 4: np.uint32}[width]
    out = np.empty(shape, numbers)
    for place in np.ndindex(*shape):
        offset = sum(i * stride for i, stride in zip(place, strides)) * width
        out[place] = int.from_bytes(ctypes.string_at(c.ptr + offset, width), "little")
    return out


class Dlpack:
    """A producer of DLPack capsules of any kind, with nothing else. What they point to lives as long as the tests."""

    kept = []

    def __init__(self, array, device=1, code=2, bits=None, strides=True, byte_offset=0, lanes=1, flags=None):
        self.array, self.deleted = array, 0
        self.flags = flags  # None: an exporter that is older than versions
        self.device, self.code, self.bits, self.lanes = device, code, bits or array.itemsize * 8, lanes
        self.strides, self.byte_offset = strides, byte_offset

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, stream=None, **versions):
        if versions and self.flags is None:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        array = self.array
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        held = DLTensor(data=address_of(array) - self.byte_offset, device_type=self.device, ndim=array.ndim,
                         code=self.code, bits=self.bits, lanes=self.lanes, shape=shape,
                         strides=strides if self.strides else None, byte_offset=self.byte_offset)
        self.held = (held, shape, strides)
        self.kept.append((array, self.held))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        if self.flags is None:
            managed = DLManagedTensor(tensor=held)
            self.kept.append(managed)
            return new(ctypes.addressof(managed), b"dltensor", None)
        managed = DLManagedTensorVersioned(major=1, flags=self.flags, tensor=held)
        self.kept.append(managed)
        return new(ctypes.addressof(managed), b"dltensor_versioned", None)


class NumpyTest(unittest.TestCase):
    def setUp(self):
        self.array = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)

    def check(self, view):
        tensor = Tensor(view)
        self.assertEqual(tensor.c.ptr, address_of(view))
        self.assertEqual(tensor.shape, view.shape)
        np.testing.assert_array_equal(what_c_sees(tensor), np.ascontiguousarray(view).view(np.uint32))
        return tensor

    def test_contiguous_arrays_have_no_strides(self):
        self.assertIsNone(self.check(self.array).strides)

    def test_views_pass_their_strides_and_nothing_is_copied(self):
        for view in (self.array.transpose(1, 0, 2), self.array[:, ::2], self.array[1:, :, 3:], self.array[::-1],
                     self.array[:, :, ::-2], np.broadcast_to(self.array[:1], (5, 3, 8)), self.array.T):
            with self.subTest(strides=view.strides):
                self.assertIs(view.base is not None, True)
                tensor = self.check(view)
                self.assertEqual(tensor.strides, tuple(stride // 4 for stride in view.strides))

    def test_changes_after_the_tensor_was_made_are_seen(self):
        tensor = Tensor(self.array.transpose(2, 0, 1))
        before = what_c_sees(tensor)
        self.array[...] = 1.5
        self.assertNotEqual(before[0, 0, 0], what_c_sees(tensor)[0, 0, 0])
        self.assertEqual(what_c_sees(tensor)[0, 0, 0], np.float32(1.5).view(np.uint32))

    def test_empty_and_read_only_arrays_may_be_read(self):
        self.array.flags.writeable = False
        self.check(self.array)
        self.assertEqual(Tensor(self.array[:0]).shape, (0, 3, 8))

    def test_dtypes_are_the_arrays_own(self):
        self.assertIs(Tensor(self.array).dtype, DType.F32)
        self.assertIs(Tensor(self.array.astype(np.float16)).dtype, DType.F16)
        self.assertIs(Tensor(self.array.astype(np.uint16), dtype=DType.BF16).dtype, DType.BF16)
        self.assertIs(Tensor(self.array, dtype=DType.F32).dtype, DType.F32)

    def test_other_dtypes_are_refused(self):
        for dtype in (np.float64, np.int32, np.complex64, ">f4", np.int16, object):
            with self.subTest(dtype=dtype), self.assertRaisesRegex(TypeError, "keys: dtype .*; must be float16"):
                Tensor(np.zeros((2, 2), dtype), name="keys")
        with self.assertRaisesRegex(TypeError, "16-bit integers"):
            Tensor(self.array.astype(np.uint16))
        with self.assertRaisesRegex(TypeError, "16-bit integers"):
            Tensor(self.array.astype(np.uint16), dtype=DType.F16)
        with self.assertRaisesRegex(TypeError, "dtype F32, but BF16 is said"):
            Tensor(self.array, dtype=DType.BF16)
        with self.assertRaises(pqcached.InvalidArgument):
            Tensor(self.array, dtype=9)

    def test_what_is_no_array_is_refused(self):
        for other in ([[1.0, 2.0]], 3.5, None, "keys", b"bytes", object()):
            with self.assertRaisesRegex(TypeError, "queries: .*; must be a numpy array"):
                Tensor(other, name="queries")

    def test_strides_must_be_whole_elements(self):
        packed = np.zeros(6, dtype=[("a", np.uint8), ("b", np.float32)])
        with self.assertRaisesRegex(pqcached.InvalidArgument, "keys.strides"):
            Tensor(packed["b"], name="keys")

    def test_more_than_four_dimensions_are_refused(self):
        with self.assertRaisesRegex(pqcached.InvalidArgument, "ndim: 5"):
            Tensor(np.zeros((1, 1, 1, 1, 1), np.float32))

    def test_objects_with_an_array_interface_are_viewed(self):
        class Holder:
            def __init__(self, array):
                self.__array_interface__ = array.__array_interface__

        view = self.array.transpose(1, 0, 2)
        tensor = Tensor(Holder(view))
        self.assertEqual((tensor.c.ptr, tensor.shape), (address_of(view), view.shape))
        np.testing.assert_array_equal(what_c_sees(tensor), np.ascontiguousarray(view).view(np.uint32))


class DlpackTest(unittest.TestCase):
    def setUp(self):
        self.array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def test_capsules_are_read_where_they_point(self):
        view = self.array.transpose(1, 0, 2)
        for producer in (Dlpack(view), Dlpack(view, byte_offset=64), Dlpack(view, device=3)):
            tensor = Tensor(producer)
            self.assertEqual((tensor.c.ptr, tensor.shape), (address_of(view), view.shape))
            np.testing.assert_array_equal(what_c_sees(tensor), np.ascontiguousarray(view).view(np.uint32))
        self.assertIsNone(Tensor(Dlpack(self.array, strides=False)).strides)

    def test_dtypes(self):
        half = self.array.astype(np.float16)
        self.assertIs(Tensor(Dlpack(half)).dtype, DType.F16)
        self.assertIs(Tensor(Dlpack(half, code=4)).dtype, DType.BF16)
        self.assertIs(Tensor(Dlpack(half, code=1), dtype=DType.BF16).dtype, DType.BF16)
        for code, bits, lanes in ((2, 64, 1), (0, 32, 1), (1, 8, 1), (2, 32, 4)):
            with self.assertRaisesRegex(TypeError, "of DLPack"):
                Tensor(Dlpack(self.array, code=code, bits=bits, lanes=lanes))

    def test_devices(self):
        self.assertIs(Tensor(Dlpack(self.array, device=2)).device, pqcached.Device.CUDA)
        with self.assertRaisesRegex(TypeError, "DLPack device 10"):
            Tensor(Dlpack(self.array, device=10))

    def test_a_device_is_refused_before_the_array_is_exported(self):
        producer = Dlpack(self.array, device=10)
        with self.assertRaisesRegex(TypeError, "keys: DLPack device 10"):
            Tensor(producer, name="keys")
        self.assertFalse(hasattr(producer, "held"))

    def test_what_is_written_is_the_arrays_own_memory(self):
        for flags in (None, 0):
            producer = Dlpack(self.array, flags=flags)
            self.assertEqual(floats_to_write("out", producer, (2, 3, 4)), address_of(self.array))
            target = tensor_to_fill("out", Dlpack(self.array[:, ::2], flags=flags))
            self.assertEqual((target.c.ptr, target.strides), (address_of(self.array), (12, 8, 1)))
        half = self.array.astype(np.float16)
        self.assertEqual(rows_to_write("out", Dlpack(half, code=4), DType.BF16, (2, 3, 4)), address_of(half))

    def test_what_must_not_be_written_or_is_a_copy_is_refused(self):
        read_only = Dlpack(self.array, flags=1)
        self.assertEqual(Tensor(read_only).c.ptr, address_of(self.array))  # it may be read
        for write in (lambda: floats_to_write("out", read_only, (2, 3, 4)), lambda: tensor_to_fill("out", read_only)):
            with self.assertRaisesRegex(pqcached.InvalidArgument, r"out: must be writable .* of shape \(2, 3, 4\)"):
                write()
        with self.assertRaisesRegex(pqcached.InvalidArgument, "keys: is exported by DLPack as a copy only"):
            Tensor(Dlpack(self.array, flags=2), name="keys")
        with self.assertRaisesRegex(pqcached.InvalidArgument, r"out.strides: \(0, 4, 1\) of shape \(5, 3, 4\), must not be 0"):
            tensor_to_fill("out", Dlpack(np.broadcast_to(self.array[:1], (5, 3, 4))))

        class Refuses(Dlpack):
            shape = (2, 3)

            def __dlpack__(self, **_):
                raise BufferError("it is sparse")

        with self.assertRaisesRegex(pqcached.InvalidArgument, r"keys: Refuses, of shape \(2, 3\), is not exported .*: it is sparse"):
            Tensor(Refuses(self.array), name="keys")

    def test_wrong_outputs_are_refused_with_shapes_and_dtypes(self):
        for producer, error, reason in (
                (Dlpack(self.array), pqcached.InvalidArgument, r"out.shape: \(2, 3, 4\), must be \(4, 3, 2\)"),
                (Dlpack(self.array.astype(np.float16)), TypeError, "out: dtype float16; must be float32"),
                (Dlpack(self.array.T), pqcached.InvalidArgument, r"out.strides: \(1, 4, 12\) of shape \(4, 3, 2\)"),
                (Dlpack(self.array, device=2), TypeError, "out: on a GPU; must be on cpu")):
            with self.subTest(reason=reason), self.assertRaisesRegex(error, reason):
                floats_to_write("out", producer, (4, 3, 2))

    def test_tensors_are_exported_in_place(self):
        view = self.array.transpose(1, 0, 2)
        back = np.from_dlpack(Tensor(view))
        self.assertEqual((address_of(back), back.shape, back.strides), (address_of(view), view.shape, view.strides))
        self.assertEqual(Tensor(view).__dlpack_device__(), (1, 0))
        again = Tensor(Tensor(view))  # through its own capsule, as any other array
        self.assertEqual((again.c.ptr, again.strides), (address_of(view), Tensor(view).strides))
        with self.assertRaises(BufferError):
            Tensor(view).__dlpack__(copy=True, dl_device=(2, 0))

    def test_bfloat16_is_exported_as_such(self):
        rows = self.array.astype(np.uint16)
        again = Tensor(Tensor(rows, DType.BF16))
        self.assertEqual((again.c.ptr, again.dtype), (address_of(rows), DType.BF16))
        self.assertIs(Tensor(Tensor(rows, DType.BF16)).dtype, DType.BF16)
        self.assertEqual(np.from_dlpack(rows).dtype, np.uint16)  # numpy's own export is as before

    def test_integers_are_read_in_place(self):
        slots = np.arange(6, dtype=np.int64)
        self.assertEqual(address_of(integers("slots", Dlpack(slots, code=0))), address_of(slots))
        paged = pqcached.PagedSlots(np.zeros((2, 16, 2, 64), np.float32), Dlpack(slots, code=0))
        self.assertEqual(ctypes.cast(paged.c.block_table.contents.slots, ctypes.c_void_p).value, address_of(slots))
        with self.assertRaisesRegex(TypeError, "slots: Dlpack is not exported by DLPack"):
            integers("slots", Dlpack(slots, code=0, device=2))

    def test_the_memory_lives_as_long_as_the_tensor(self):
        tensor = Tensor(np.arange(100000, dtype=np.float32).reshape(100, 1000))
        self.assertEqual(what_c_sees(tensor)[99, 999], np.float32(99999).view(np.uint32))


@needs_torch
class TorchTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.array = torch.randn(4, 3, 8)

    def check(self, view):
        tensor = Tensor(view)
        self.assertEqual(tensor.c.ptr, view.data_ptr())
        self.assertEqual(tensor.shape, tuple(view.shape))
        bits = view.detach().contiguous().view(torch.int16 if view.element_size() == 2 else torch.int32).numpy()
        np.testing.assert_array_equal(what_c_sees(tensor).view(bits.dtype), bits)
        return tensor

    def test_views_pass_their_strides_and_nothing_is_copied(self):
        self.assertIsNone(self.check(self.array).strides)
        for view in (self.array.transpose(0, 1), self.array[:, ::2], self.array[1:, :, 3:],
                     self.array[:1].expand(5, 3, 8), torch.nn.Parameter(self.array).transpose(1, 2)):
            with self.subTest(stride=view.stride()):
                self.assertEqual(self.check(view).strides, tuple(view.stride()))

    def test_dtypes_are_the_tensors_own(self):
        self.assertIs(self.check(self.array).dtype, DType.F32)
        self.assertIs(self.check(self.array.half()).dtype, DType.F16)
        self.assertIs(self.check(self.array.bfloat16().transpose(0, 1)).dtype, DType.BF16)
        for dtype in (torch.float64, torch.int16, torch.int32, torch.bool):
            with self.assertRaisesRegex(TypeError, "array: dtype torch"):
                Tensor(self.array.to(dtype))

    def test_other_layouts_and_devices_are_refused(self):
        with self.assertRaisesRegex(TypeError, "plain strided"):
            Tensor(self.array[0].to_sparse())
        with self.assertRaisesRegex(TypeError, "on device meta"):
            Tensor(torch.empty(2, 2, device="meta"))

    def test_outputs(self):
        self.assertEqual(floats_to_write("out", self.array, (4, 3, 8)), self.array.data_ptr())
        half = self.array.bfloat16()
        self.assertEqual(rows_to_write("out", half, DType.BF16, (4, 3, 8)), half.data_ptr())
        with self.assertRaisesRegex(TypeError, "must be float32"):
            floats_to_write("out", half, (4, 3, 8))
        with self.assertRaisesRegex(TypeError, "must be float16"):
            rows_to_write("out", half, DType.F16, (4, 3, 8))
        with self.assertRaisesRegex(TypeError, "on device meta"):
            floats_to_write("out", torch.empty(2, device="meta"), (2,))
        for wrong in (self.array.transpose(0, 1), torch.nn.Parameter(self.array)):
            with self.assertRaises(pqcached.InvalidArgument):
                floats_to_write("out", wrong, tuple(wrong.shape))


    def test_torch_reads_what_a_tensor_exports_in_place(self):
        rows = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
        shared = torch.from_dlpack(Tensor(rows, DType.BF16))
        self.assertEqual((shared.dtype, shared.data_ptr(), tuple(shared.shape)), (torch.bfloat16, address_of(rows), rows.shape))
        rows[...] = 0x3FC0
        self.assertEqual(float(shared[1, 2, 3]), 1.5)
        self.assertEqual(np.from_dlpack(Tensor(self.array)).__array_interface__["data"][0], self.array.data_ptr())


class OutputTest(unittest.TestCase):
    def test_outputs_are_checked_before_the_call(self):
        read_only = np.zeros((2, 3), np.float32)
        read_only.flags.writeable = False
        for array, error, reason in (
                (np.zeros((2, 3)), TypeError, "output: dtype float64; must be float32"),
                (np.zeros((2, 3), ">f4"), TypeError, "output: dtype >f4"),
                ([[0.0] * 3] * 2, TypeError, "output: list; must be a numpy array"),
                (np.zeros((3, 2), np.float32), pqcached.InvalidArgument, r"output.shape: \(3, 2\), must be \(2, 3\)"),
                (np.zeros((3, 2), np.float32).T, pqcached.InvalidArgument, r"output.strides: \(1, 2\) of shape \(2, 3\), must be contiguous"),
                (read_only, pqcached.InvalidArgument, "output: must be writable")):
            with self.assertRaisesRegex(error, reason):
                floats_to_write("output", array, (2, 3))


class MergeTest(unittest.TestCase):
    def partial(self, seed, rows=6, dim=5):
        random = np.random.default_rng(seed)
        return random.standard_normal((rows, dim)).astype(np.float32), random.standard_normal(rows).astype(np.float32)

    def check(self, wrap):
        (output_a, lse_a), (output_b, lse_b) = self.partial(1), self.partial(2)
        total = np.logaddexp(lse_a, lse_b)
        expected = output_a * np.exp(lse_a - total)[:, None] + output_b * np.exp(lse_b - total)[:, None]
        before = output_b.copy()
        merge(wrap(output_a), wrap(lse_a), wrap(output_b), wrap(lse_b))
        np.testing.assert_allclose(output_a, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse_a, total, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(output_b, before)

    def test_merges_in_place(self):
        self.check(lambda array: array)

    @needs_torch
    def test_merges_torch_tensors_in_place(self):
        self.check(torch.from_numpy if torch else None)

    def test_nothing_attended_changes_nothing(self):
        output, lse = self.partial(3)
        expected = output.copy(), lse.copy()
        merge(output, lse, np.zeros_like(output), np.full_like(lse, -np.inf))
        np.testing.assert_allclose(output, expected[0], rtol=1e-6)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-6)

    def test_shapes_must_fit(self):
        output, lse = self.partial(4)
        for arguments in ((output, lse[1:], output, lse), (output, lse, output[1:], lse), (output, lse, output, lse[1:]),
                          (output, lse, output.T, lse), (None, lse, output, lse)):
            with self.assertRaises(pqcached.InvalidArgument):
                merge(*arguments)
        with self.assertRaises(TypeError):
            merge(output, lse, output.astype(np.float16), lse)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""libpqcached_llama in real llama.cpp with a real sidecar: a restored prompt is the computed one, whatever happens to the sidecar.

application_test.py BUILD PLUGIN [unittest arguments]   PQCACHED_LLAMA_KILLS=N: kills in the test of killed workers (5), twice.
"""

import contextlib
import ctypes
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
import typing
import unittest

import numpy as np

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent.parent.parent)]
from sidecar_test import BUILD, Sidecars  # noqa: E402  (takes its argument)
from llama_test import PLUGIN, VOCABULARY, Folder, needs  # noqa: E402
import children  # noqa: E402
import engine  # noqa: E402
import gguf_model  # noqa: E402

KILLS = int(os.environ.get("PQCACHED_LLAMA_KILLS", "5"))
LIBRARIES = BUILD / "client"
STEP = 128
LENGTHS = (127, 128, 129, 1000)
CELLS = 4 * 1536  # of four sequences
NEAR = 1e-5
DEADLINE = "timeout=20000"  # the machine may be busy with other tests


def prompt(length, seed):
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def restorable(length):
    """How many tokens of a stored prompt are restored."""
    return min(length - length % STEP, length - 1)


class Answer(typing.NamedTuple):
    status: str
    count: int
    milliseconds: float
    message: str


class Application:
    """A running program `prompts` (prompts.cc)."""

    def __init__(self, version, program, words, plugin=None):
        self._process = subprocess.Popen(
            [program, *map(str, words)], env=engine.environment(plugin, "min_tokens=1" if plugin else None), cwd=engine.binaries(version),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=children.end_with_parent)
        self.opened = self._answer()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def send(self, *words):
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program has ended: {self._process.communicate()[1][-2000:]}")
        return line.rstrip("\n")

    def _answer(self, *words):
        line = self.send(*words) if words else self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the program has ended: {self._process.communicate()[1][-2000:]}")
        status, count, milliseconds, message = (line.rstrip("\n") + " ").split(" ", 3)
        return Answer(status, int(count), float(milliseconds), message.strip())

    def save(self, sequence, tokens):
        return self._answer("save", sequence, *tokens)

    def restore(self, sequence, tokens):
        return self._answer("restore", sequence, *tokens)

    def match(self, tokens):
        return self._answer("match", 0, *tokens)

    def compute(self, sequence, begin, tokens):
        """Decodes the tokens from `begin` on, and 64 more: these, and the logits of all 65."""
        with tempfile.NamedTemporaryFile() as file:
            answer = [int(word) for word in self.send("compute", sequence, begin, file.name, *tokens).split()]
            return answer, np.fromfile(file.name, np.float32).reshape(-1, VOCABULARY)

    def cells(self, sequence):
        return self.send("cells", sequence)

    def clear(self, sequence):
        self.send("clear", sequence)


class Applications(Sidecars, Folder):
    def start(self, *words, model=None, name="m", cells=CELLS, plugin=None):
        model = self.model(1) if model is None else model
        return Application(self.version, self.program(self.version, "application/prompts", LIBRARIES), [model, cells, f"unix://{self.socket}", name, DEADLINE, *words], plugin)

    def assert_same(self, computed, restored, near=NEAR):
        self.assertEqual(computed[0], restored[0])
        self.assertEqual(computed[1].shape, restored[1].shape)
        difference = np.abs(computed[1] - restored[1]).max()
        self.assertLessEqual(difference, near)
        return difference


class Prompts:
    version = None

    def compare(self, words, layers):
        """Computes and saves in one process, restores in another. Returns the largest difference of logits."""
        model, name = self.model(layers), f"{words}{layers}"
        computed = {}
        with self.start(*words, model=model, name=name) as first:
            for sequence, length in enumerate(LENGTHS):
                tokens = prompt(length, length)
                computed[length] = first.compute(sequence, 0, tokens)
                self.assertEqual(first.save(sequence, tokens)[:2], ("OK", length - length % STEP))
        differences = []
        with self.start(*words, model=model, name=name) as second:
            for sequence, length in enumerate(LENGTHS):
                tokens = prompt(length, length)
                self.assertEqual(second.match(tokens)[:2], ("OK", restorable(length)))
                answer = second.restore(sequence, tokens)
                self.assertEqual(answer, ("OK", restorable(length), answer.milliseconds, ""))
                differences.append(self.assert_same(computed[length], second.compute(sequence, answer.count, tokens)))
        return max(differences)

    def test_restored_prompts_are_the_computed_ones(self):
        self.daemon()
        for layers in (1, 3):
            for kind in ("f16", "bf16"):
                for kv in ("unified", "streams"):
                    with self.subTest(layers=layers, kind=kind, kv=kv):
                        difference = self.compare([kind, kv], layers)
                        print(f"{layers} layers, {kind}, {kv}: logits differ by {difference:g}")

    def test_kv_cache_of_f32(self):
        self.daemon()
        self.compare(["f32"], 1)

    def test_rows_of_several_requests(self):
        self.daemon()
        model = self.folder / "large.gguf"
        if not model.exists():  # 12 KiB of rows for each token
            shape = ["--layers", "3", "--kv-heads", "8", "--head-dim", "128", "--type", "f32"]
            gguf_model.random_model(model, gguf_model.arguments([str(model), *shape]))
        tokens = prompt(3000, 1)
        with self.start(model=model, cells=4 * 3200) as application:
            computed = application.compute(0, 0, tokens)
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 2944))
            self.assertEqual(application.restore(2, tokens)[:2], ("OK", 2944))
            self.assert_same(computed, application.compute(2, 2944, tokens))

    def test_prompts_share_their_beginning(self):
        self.daemon("--retain", "false")  # of sequences that do not ask for it
        beginning = prompt(300, 1)
        first, second = beginning + prompt(100, 2), beginning + prompt(333, 3)
        with self.start() as application:
            computed = application.compute(1, 0, second)
            application.compute(0, 0, first)
            self.assertEqual(application.save(0, first)[:2], ("OK", 384))
            application.clear(1)
            self.assertEqual(application.restore(1, second)[:2], ("OK", 256))
            self.assert_same(computed, application.compute(1, 256, second))
            # Then the rest is stored, too, and the second half of the first prompt stays.
            self.assertEqual(application.save(1, second)[:2], ("OK", 512 + STEP - STEP * (633 < 640)))
            self.assertEqual(application.match(second).count, 512)
            self.assertEqual(application.match(first).count, 384)

    def test_cells_in_another_order(self):
        """The sequence goes on in cells before its first ones, which another sequence has left. bf16: ggml adds up f16 in f16, so that
        another order of the cells makes a difference."""
        self.daemon()
        tokens, more = prompt(400, 1), prompt(200, 2)
        with self.start("unified", "bf16", cells=1280) as application:
            application.compute(1, 0, prompt(500, 3))
            computed = application.compute(0, 0, tokens)
            tokens += computed[0]
            application.clear(1)
            computed = application.compute(0, len(tokens), tokens + more)
            tokens += more
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 640))
        with self.start("unified", "bf16", cells=1280) as application:
            self.assertEqual(application.restore(2, tokens).count, 640)
            self.assert_same(computed, application.compute(2, 640, tokens), 1e-4)

    def test_other_names_and_shapes_find_nothing(self):
        self.daemon()
        tokens = prompt(300, 1)
        other = self.folder / "other.gguf"
        gguf_model.random_model(other, gguf_model.arguments([str(other), "--layers", "1", "--type", "f32", "--hidden", "512"]))
        with self.start() as application:
            application.compute(0, 0, tokens)
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 256))
        for words, changes, count in (([], {}, 256), ([], {"name": "n"}, 0), ([], {"model": self.model(3)}, 0), ([], {"model": other}, 0),
                                      (["bf16"], {}, 0)):
            with self.subTest(words=words, changes=changes), self.start(*words, **changes) as application:
                self.assertEqual(application.restore(0, tokens)[:2], ("OK", count))

    def test_states_that_cannot_be_stored_are_refused(self):
        self.daemon()
        tokens = prompt(300, 1)
        with self.start() as application:
            application.compute(0, 0, tokens)
            application.save(0, tokens)
        for words, status, message in ((["plain_attention"], "UNIMPLEMENTED", "V is transposed: "),
                                       (["q8_0"], "UNIMPLEMENTED", "type 8 of ggml, and only f16, bf16 and f32 can be stored"),
                                       (["bf16", "says_f16"], "FAILED_PRECONDITION", "is bf16, and the options say f16")):
            with self.subTest(words=words), self.start(*words) as application:
                answer = application.restore(0, tokens)
                self.assertEqual(answer[:2], ("FAILED_PRECONDITION", 0))
                self.assertIn("llama.cpp refuses the rows of 256 tokens", answer.message)
                self.assertEqual(application.cells(0), "-1 -1")
                own = [1, *tokens]
                application.compute(0, 0, own)
                answer = application.save(0, own)
                self.assertEqual(answer[:2], (status, 0))
                self.assertIn(message, answer.message)

    def test_wrong_arguments(self):
        self.daemon()
        tokens = prompt(300, 1)
        with self.start() as application:
            application.compute(0, 0, tokens)
            for answer, status, message in (
                    (application.save(4, tokens), "INVALID_ARGUMENT", "seq: 4, and the context has the sequences 0 to 3"),
                    (application.restore(-1, tokens), "INVALID_ARGUMENT", "seq: -1, "),
                    (application.save(0, [*tokens, -1]), "INVALID_ARGUMENT", "tokens[300]: -1 is no token's id"),
                    (application.save(0, prompt(500, 2)), "INVALID_ARGUMENT", "count: 500, and the sequence has 364 tokens"),
                    (application.save(1, tokens), "INVALID_ARGUMENT", "count: 300, and the sequence has 0 tokens"),
                    (application.restore(1, prompt(CELLS + 1, 2)), "INVALID_ARGUMENT", f"count: {CELLS + 1}, and the context has "),
                    (application.restore(0, tokens), "FAILED_PRECONDITION", "seq: sequence 0 is not empty"),
                    (application.restore(1, []), "OK", ""), (application.save(1, []), "OK", ""), (application.restore(1, [1]), "OK", "")):
                with self.subTest(message=message):
                    self.assertEqual(answer[:2], (status, 0))
                    self.assertTrue(answer.message.startswith(message), answer.message)
        with self.start() as application:
            for change in (("remove", 0, 100, 200), ("move", 0, 100, 7)):
                with self.subTest(change=change):
                    application.clear(0)
                    application.compute(0, 0, tokens)
                    application.send(*change)
                    answer = application.save(0, tokens)
                    self.assertEqual(answer.status, "FAILED_PRECONDITION")
                    self.assertRegex(answer.message, r"cells, and position \d+ is not one of 0 to n - 1")
        for name, status in (("", "INVALID_ARGUMENT"), ("n" * 96, "OK"), ("n" * 97, "INVALID_ARGUMENT")):
            with self.subTest(name=name), self.start(name=name) as application:
                self.assertEqual(application.opened.status, status, application.opened)
        with self.start(f"second={self.model(3)}") as application:
            self.assertIn("context: it is of another model", application.restore(0, tokens).message)

    def test_no_free_cells(self):
        """A prompt that is stored, and for which the context has no room, leaves the sequences as they are."""
        self.daemon()
        tokens = prompt(400, 1)
        with self.start("unified", cells=768) as application:
            application.compute(0, 0, tokens)
            application.save(0, tokens)
            answer = application.restore(1, tokens)
            self.assertEqual(answer[:2], ("FAILED_PRECONDITION", 0))
            self.assertIn("too few free cells", answer.message)
            self.assertEqual((application.cells(0), application.cells(1)), ("0 463", "-1 -1"))
        with self.start("streams", cells=4 * 256) as application:  # fewer than 384 in each
            self.assertEqual(application.restore(1, tokens)[:2], ("FAILED_PRECONDITION", 0))
            self.assertEqual(application.cells(1), "-1 -1")

    def test_restarted_daemon(self):
        """Without a pool directory its memory has gone, and calls go on with the new one."""
        first = self.daemon()
        tokens = prompt(300, 1)
        with self.start() as application:
            computed = application.compute(0, 0, tokens)
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 256))
            first.stop()
            self.daemon()
            application.clear(0)
            self.assertEqual(application.restore(0, tokens)[:2], ("OK", 0))
            self.assert_same(computed, application.compute(0, 0, tokens))
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 256))
            application.clear(0)
            self.assertEqual(application.restore(0, tokens)[:2], ("OK", 256))
            self.assert_same(computed, application.compute(0, 256, tokens))

    def test_restarted_daemon_with_a_pool_directory(self):
        pools = self.socket.parent / "pools"
        pools.mkdir()
        first = self.daemon("--pool-directory", pools)
        tokens = prompt(300, 1)
        with self.start() as application:
            computed = application.compute(0, 0, tokens)
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 256))
            first.stop()
            self.daemon("--pool-directory", pools)
            application.clear(0)
            self.assertEqual(application.restore(0, tokens)[:2], ("OK", 256))
            self.assert_same(computed, application.compute(0, 256, tokens))
        with self.start() as application:
            self.assertEqual(application.match(tokens)[:2], ("OK", 256))

    def test_absent_sidecar(self):
        tokens = prompt(300, 1)
        with self.start() as application:
            computed = application.compute(0, 0, tokens)
            answers = [application.save(0, tokens), application.match(tokens)]
            application.clear(0)
            answers.append(application.restore(0, tokens))
            for answer in answers:
                self.assertEqual(answer[:2], ("UNAVAILABLE", 0))
                self.assertLess(answer.milliseconds, 5000)  # it does not wait for the deadline
                self.assertNotEqual(answer.message, "")
            self.assert_same(computed, application.compute(0, 0, tokens))
            self.daemon()
            self.assertEqual(application.save(0, tokens)[:2], ("OK", 256))  # a late one is used

    def test_with_the_plugin(self):
        self.daemon()
        tokens = prompt(1000, 1)
        with self.start("bf16", plugin=PLUGIN) as application:
            computed = application.compute(0, 0, tokens)
            application.save(0, tokens)
        with self.start("bf16", plugin=PLUGIN) as application:
            self.assertEqual(application.restore(3, tokens).count, 896)
            self.assert_same(computed, application.compute(3, 896, tokens), 1e-4)


@needs(engine.TESTED[0])
class NewestVersion(Prompts, Applications):
    version = engine.TESTED[0]

    def test_frozen_sidecar(self):
        tokens = prompt(300, 1)
        daemon = self.daemon()
        with self.start("timeout=1000") as application:
            computed = application.compute(0, 0, tokens)
            self.assertEqual(self.until_ok(lambda: application.save(0, tokens)).count, 256)
            daemon.send(19)  # SIGSTOP
            application.clear(0)
            for _ in range(2):  # with and without a connection
                answer = application.restore(0, tokens)
                print(f"frozen sidecar, deadline 1 s: {answer.milliseconds:.0f} ms, {answer.status}: {answer.message}")
                self.assertIn(answer.status, ("DEADLINE_EXCEEDED", "UNAVAILABLE"))
                self.assertLess(answer.milliseconds, 5000)
                self.assertEqual(application.cells(0), "-1 -1")
            daemon.send(18)  # SIGCONT
            self.until_ok(lambda: application.restore(0, tokens))
            self.assert_same(computed, application.compute(0, 256, tokens))

    def test_full_sidecar(self):
        self.daemon("--max-pool-bytes", "4mib")
        with self.start() as application:
            statuses = set()
            for seed in range(20):
                tokens = prompt(1000, seed)
                computed = application.compute(0, 0, tokens)
                statuses.add(application.save(0, tokens).status)
                application.clear(0)
                answer = application.restore(0, tokens)
                self.assertEqual(answer.status, "OK", answer)
                self.assert_same(computed, application.compute(0, answer.count, tokens))
                application.clear(0)
            print(f"full sidecar: {sorted(statuses)}")
            self.assertLessEqual(statuses, {"OK", "RESOURCE_EXHAUSTED"})

    def until_ok(self, call):
        for _ in range(100):
            answer = call()
            if answer.status == "OK":
                return answer
            self.assertNotEqual(answer.message, "")
            time.sleep(0.1)
        self.fail(answer)

    def test_killed_workers_change_nothing(self):
        """The same sequence is saved under other ids in each round, so that every round stores all of its rows."""
        daemon = self.daemon()
        tokens = prompt(4000, 1)
        chance = random.Random(5)
        statuses = {}
        with self.start(model=self.model(3), cells=4 * 4352) as application:
            computed = application.compute(0, 0, tokens)
            self.assertEqual(application.save(0, tokens).status, "OK")
            longest = 1.5 * application.save(0, prompt(4000, 2)).milliseconds / 1000

            def with_kill(name, call):
                killer = threading.Timer(chance.uniform(0, longest), daemon.kill_worker)
                killer.start()
                answer = call()
                killer.join()
                statuses[name, answer.status] = statuses.get((name, answer.status), 0) + 1
                self.assertTrue(answer.status == "OK" or answer.message, answer)
                return answer

            for round_number in range(KILLS):
                named = prompt(4000, 1000 + round_number)
                if with_kill("save", lambda: application.save(0, named)).status == "OK":
                    self.assertEqual(self.until_ok(lambda: application.match(named)).count, 3968)
                self.until_ok(lambda: application.save(0, named))
                answer = with_kill("restore", lambda: application.restore(1, named))
                if answer.status != "OK":
                    self.assertEqual((answer.count, application.cells(1)), (0, "-1 -1"))
                    answer = self.until_ok(lambda: application.restore(1, named))
                self.assertIn(answer.count, (0, 3968))
                self.assertEqual(answer.count, 3968)
                self.assert_same(computed, application.compute(1, answer.count, tokens))
                application.clear(1)
        print(f"kills within {longest * 1000:.0f} ms: {statuses}")

    def test_killed_application_leaves_whole_steps(self):
        """What a process has stored before it is killed in the middle of a save is right, or not there."""
        self.daemon()
        tokens = prompt(4000, 1)
        chance = random.Random(6)
        found = []
        with self.start(model=self.model(3), cells=4 * 4352) as application:
            computed = application.compute(0, 0, tokens)
            application.save(0, tokens)
            longest = 1.5 * application.save(0, prompt(4000, 2)).milliseconds / 1000
            for round_number in range(5):
                name = f"killed {round_number}"
                with self.start(model=self.model(3), cells=4 * 4352, name=name) as other:
                    other.compute(0, 0, tokens)
                    threading.Timer(chance.uniform(0, longest), other._process.kill).start()
                    with contextlib.suppress(RuntimeError, BrokenPipeError):
                        other.save(0, tokens)
                with self.start(model=self.model(3), cells=4 * 4352, name=name) as other:
                    answer = other.restore(0, tokens)
                    self.assertEqual(answer.status, "OK", answer)
                    found.append(answer.count)
                    self.assert_same(computed, other.compute(0, answer.count, tokens))
        print(f"tokens that were found after the application was killed: {found}")


@needs(engine.TESTED[1])
class EarlierVersion(Prompts, Applications):
    version = engine.TESTED[1]


class WithoutLlama(unittest.TestCase):
    def test_a_process_without_llama_is_refused(self):
        library = ctypes.CDLL(str(LIBRARIES / "libpqcached_llama.so"))
        library.pqc_llama_last_error.restype = ctypes.c_char_p

        class Options(ctypes.Structure):
            _fields_ = [("struct_size", ctypes.c_size_t), ("endpoint", ctypes.c_char_p), ("model_name", ctypes.c_char_p),
                        ("tenant", ctypes.c_char_p), ("kv_dtype", ctypes.c_int), ("timeout_ms", ctypes.c_uint32),
                        ("thread_count", ctypes.c_uint32)]

        options = Options(ctypes.sizeof(Options), b"unix:///nowhere", b"m")
        cache = ctypes.c_void_p()
        status = library.pqc_llama_cache_open(ctypes.c_void_p(8), ctypes.byref(options), ctypes.byref(cache))
        self.assertEqual(status, 9)  # PQC_FAILED_PRECONDITION
        self.assertIn(b"the process has no function llama_model_meta_val_str: libllama.so is not loaded", library.pqc_llama_last_error())
        self.assertIsNone(cache.value)
        for field, value, message in (("endpoint", None, b"options.endpoint: none"), ("struct_size", 8, b"options.struct_size: 8, and"),
                                      ("kv_dtype", 4, b"options.kv_dtype: 4 is no pqc_dtype")):
            wrong = Options.from_buffer_copy(options)
            setattr(wrong, field, value)
            self.assertEqual(library.pqc_llama_cache_open(ctypes.c_void_p(8), ctypes.byref(wrong), ctypes.byref(cache)), 3)
            self.assertTrue(library.pqc_llama_last_error().startswith(message), library.pqc_llama_last_error())


if __name__ == "__main__":
    unittest.main()

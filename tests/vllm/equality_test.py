"""Tokens of vLLM with our plug-in and without it. Usage: equality_test.py BUILD

Greedy tokens in float32 of a random Llama, with the settings that vLLM has by default: prefix caching, chunked prefill. PQCACHED_VLLM_LONG=1
runs them with every known version of vLLM that is installed, and not only with the newest.
"""

import random
import unittest

import engines  # first
from engines import INSTALLED, IS_LONG, Engine, environment, needs_vllm

from daemon import running as daemon

VOCABULARY = 500


def mixed_requests(count=16, seed=1):
    """Requests of mixed lengths that come at different times; some begin alike, some are aborted."""
    made = random.Random(seed)

    def tokens(length):
        return [made.randrange(2, VOCABULARY) for _ in range(length)]

    shared, requests = tokens(300), []
    for number in range(count):
        ids = (shared if number % 3 == 0 else []) + tokens(made.choice((1, 20, 127, 128, 129, 260, 640)))
        requests.append({"ids": ids, "tokens": made.choice((4, 20, 45)), "at": made.choice((0, 0, 1, 3, 9)),
                         **({"abort": 3} if number % 7 == 5 else {})})
    return requests


def next_turns(requests, answers, seed=2):
    """Each request continued: its prompt, its reply and more."""
    made = random.Random(seed)
    return [{"ids": [*request["ids"], *answer["tokens"], *(made.randrange(2, VOCABULARY) for _ in range(30))], "tokens": 10}
            for request, answer in zip(requests, answers)]


def tokens_of(answer):
    return [each["tokens"] for each in answer["requests"]]


class Equality:
    """The tests, for one version."""

    version = None
    options = {"max_num_batched_tokens": 512}  # so that prompts come in chunks

    @classmethod
    def setUpClass(cls):
        cls.model = environment.tiny()
        context = daemon()
        cls.sidecar = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        cls.ours = {"endpoint": cls.sidecar.endpoint, "timeout_ms": 20000, "threads": 1}
        cls.requests = mixed_requests()
        with engines.running(cls.engine(None), cls.engine(cls.ours)) as (stock, ours):
            first = stock.run(cls.requests)
            cls.turns = next_turns(cls.requests, first["requests"])
            cls.expected = tokens_of(first), tokens_of(stock.run(cls.turns))
            cls.got = ours.run(cls.requests), ours.run(cls.turns)
            cls.lines = ours.lines()

    @classmethod
    def engine(cls, ours, **more):
        return Engine(cls.model, ours, cls.version, **{**cls.options, **more})

    def check(self, answer, turn=0):
        self.assertEqual(tokens_of(answer), self.expected[turn])
        self.assertEqual(answer["counts"]["failed_calls"], 0)

    def test_16_requests_and_their_second_turns_have_the_tokens_of_stock_vllm(self):
        for turn, answer in enumerate(self.got):
            self.check(answer, turn)
        self.assertGreater(self.got[0]["counts"]["steps"], 20)
        self.assertGreater(self.got[0]["counts"]["passed_tokens"], sum(len(request["ids"]) for request in self.requests) * 0.6)
        self.assertEqual(self.lines, [])

    def test_a_second_engine_loads_prompts_and_replies(self):
        with engines.running(self.engine(self.ours, enable_prefix_caching=False)) as (engine,):
            answer = engine.run(self.turns)
            self.check(answer, 1)
        whole = sum((len(request["ids"]) - 1) // 128 * 128 for request in self.turns)
        aborted = sum(len(request["ids"]) for request, turn in zip(self.requests, self.turns) if "abort" in request)
        self.assertGreaterEqual(answer["counts"]["loaded_tokens"], whole - aborted)

    def test_requests_that_are_preempted_have_the_same_tokens(self):
        with engines.running(self.engine({**self.ours, "cache": "preempted"}, num_gpu_blocks_override=12, max_model_len=1024)) as (engine,):
            answer = engine.run(self.requests)
            self.check(answer)
        self.assertGreater(answer["counts"]["beginnings"], len(self.requests))  # some were

    def test_a_small_block_size_is_served(self):
        with engines.running(self.engine({**self.ours, "cache": "blocks"}, block_size=32)) as (engine,):
            self.check(engine.run(self.requests))
            self.check(engine.run(self.turns), 1)

    def test_modes_without_steps_have_the_same_tokens(self):
        with engines.running(self.engine({**self.ours, "cache": "stored", "decode": "vllm"})) as (engine,):
            answer = engine.run(self.requests)
            self.check(answer)
        self.assertEqual(answer["counts"]["steps"], 0)


@needs_vllm
class NewestTest(Equality, unittest.TestCase):
    version = INSTALLED[0] if INSTALLED else None


@engines.skip_unless("vllm", IS_LONG and len(INSTALLED) > 1, "PQCACHED_VLLM_LONG=1 runs an earlier version too, after tests/vllm/environment.py")
class EarlierTest(Equality, unittest.TestCase):
    version = INSTALLED[-1] if INSTALLED else None


if __name__ == "__main__":
    unittest.main()

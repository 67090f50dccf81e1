"""vLLM with a selection of the tokens, beside pqcached.transformers with the same one. Usage: selection_test.py BUILD"""

import json
import os
import pathlib
import random
import subprocess
import unittest

import engines  # first
from engines import INSTALLED, SOURCE, Engine, environment, needs_vllm
from equality_test import VOCABULARY, tokens_of

from daemon import BUILD, running as daemon

SELECTION = {"ratio": 0.1, "sink_tokens": 4, "window_tokens": 16}


@needs_vllm
class SelectionTest(unittest.TestCase):
    def transformers_tokens(self, endpoint, requests):
        done = subprocess.run(
            [environment.folder(INSTALLED[0]) / "bin/python", pathlib.Path(__file__).with_name("peer.py"), endpoint, environment.tiny(),
             json.dumps(SELECTION)], input=json.dumps(requests), stdout=subprocess.PIPE, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE / "client/python"), "LD_LIBRARY_PATH": str(BUILD / "client"), "HF_HUB_OFFLINE": "1"})
        return json.loads(done.stdout.splitlines()[-1])

    def test_a_tenth_by_a_flat_index_has_the_tokens_of_the_transformers_module(self):
        made = random.Random(8)
        requests = [{"ids": [made.randrange(2, VOCABULARY) for _ in range(length)], "tokens": 32} for length in (400, 900, 1500)]
        with daemon() as sidecar:
            ours = {"endpoint": sidecar.endpoint, "timeout_ms": 20000, "threads": 1}
            with engines.running(Engine(environment.tiny(), {**ours, "decode": "select", "index": "flat", **SELECTION}),
                                 Engine(environment.tiny())) as (selecting, stock):
                got = [tokens_of(selecting.run([request]))[0] for request in requests]
                together = tokens_of(selecting.run(requests))
                exact = tokens_of(stock.run(requests))
            self.assertEqual(got, self.transformers_tokens(sidecar.endpoint, requests))
            self.assertEqual(together, got)
            self.assertNotEqual(got, exact)  # the selection matters


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""An engine of vLLM that runs the requests of another program, which has read "ready" from it.

engine.py MODEL OPTIONS

OPTIONS: JSON, arguments of vllm.LLM. Each line of stdin is a JSON object, and is answered by one line "answer JSON":

  requests  [{"ids": [...], "tokens": N, "at": PASS, "abort": M}]: each comes before pass number PASS (0) of those that follow, and is aborted
            when it has M tokens
  passes    passes of the model to make (null: until all requests have ended)
  abort     places of requests in the last answer: they are aborted before

The answer has the new tokens of all requests since the last ones had ended, with the seconds to their first token and between the others,
and the counts of our connector.
"""

import dataclasses
import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group  # noqa: E402


class Request:
    """A request and its new tokens, with their times."""

    def __init__(self, wanted):
        self.wanted, self.tokens, self.times = wanted, [], []

    def take(self, tokens):
        self.times += [time.perf_counter()] * (len(tokens) - len(self.tokens))
        self.tokens = list(tokens)

    def answer(self):
        return {"tokens": self.tokens, "first": self.times[1] - self.times[0] if len(self.times) > 1 else None,
                "between": [after - before for before, after in zip(self.times[1:], self.times[2:])]}


class Session:
    """Requests that run together."""

    def __init__(self, engine):
        self._engine, self._made = engine, 0
        self._requests, self._waiting = {}, {}

    def _begin(self, name):
        request = self._requests[name]
        request.times.append(time.perf_counter())
        self._engine.add_request(name, {"prompt_token_ids": request.wanted["ids"]}, SamplingParams(
            temperature=0, max_tokens=request.wanted["tokens"], ignore_eos=True, detokenize=False))

    def _step(self):
        for output in self._engine.step():
            name = output.request_id.split("-")[0]
            self._requests[name].take(output.outputs[0].token_ids)
            if len(self._requests[name].tokens) >= self._requests[name].wanted.get("abort", 1 << 30):
                self._engine.abort_request([name])

    def run(self, requests, passes, abort):
        """Returns what the answer has."""
        names = list(self._requests)
        self._engine.abort_request([names[place] for place in abort])
        if not self._engine.has_unfinished_requests():
            self._requests.clear()
        for wanted in requests:
            self._made += 1
            self._requests[str(self._made)] = Request(wanted)
            self._waiting[str(self._made)] = wanted.get("at", 0)
        number = 0
        while (self._waiting or self._engine.has_unfinished_requests()) and (passes is None or number < passes):
            for name in [name for name, at in self._waiting.items() if at <= number]:
                del self._waiting[name]
                self._begin(name)
            if self._engine.has_unfinished_requests():
                self._step()
            number += 1
        return {"requests": [each.answer() for each in self._requests.values()], "counts": counts()}


def counts():
    worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
    return dataclasses.asdict(worker.counts) if worker else {}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", **json.loads(sys.argv[2])}
    session = Session(LLM(model=sys.argv[1], **options).llm_engine)
    print("ready", file=answers)
    for line in sys.stdin:
        print("answer", json.dumps(session.run(**{"requests": [], "passes": None, "abort": [], **json.loads(line)})), file=answers)


if __name__ == "__main__":
    main()

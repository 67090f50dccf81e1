#!/usr/bin/env python3
"""An engine of vLLM that runs the requests of another program, which has read "ready" from it.

engine.py MODEL OPTIONS

OPTIONS: JSON, arguments of vllm.LLM. Each line of stdin is a JSON list of requests, and is answered by one line "answer JSON".
A request: {"ids": [...], "tokens": N, "at": PASS, "abort": M}: it comes before pass number PASS (0), and is aborted when it has M tokens. The
answer has the new tokens of each request with the seconds to its first token and between its last ones, and the counts of our connector.
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


def run(engine, requests):
    """Runs requests to their end; returns what the answer has."""
    waiting = {str(number): request for number, request in enumerate(requests)}
    tokens, times = {name: [] for name in waiting}, {name: [] for name in waiting}
    begun, number = set(), 0
    while len(begun) < len(waiting) or engine.has_unfinished_requests():
        for name, request in waiting.items():
            if name not in begun and request.get("at", 0) <= number:
                begun.add(name)
                times[name].append(time.perf_counter())
                engine.add_request(name, {"prompt_token_ids": request["ids"]}, SamplingParams(
                    temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False))
        if engine.has_unfinished_requests():
            for output in engine.step():
                name, found = output.request_id.split("-")[0], output.outputs[0].token_ids
                times[name] += [time.perf_counter()] * (len(found) - len(tokens[name]))
                tokens[name] = list(found)
                if len(found) >= waiting[name].get("abort", 1 << 30):
                    engine.abort_request([name])
        number += 1
    return {"counts": counts(), "requests": [{"tokens": tokens[name], "first": times[name][1] - times[name][0] if len(times[name]) > 1 else None,
             "between": [b - a for a, b in zip(times[name][1:], times[name][2:])]} for name in waiting]}


def counts():
    if not has_kv_transfer_group():
        return {}
    worker = getattr(get_kv_transfer_group(), "_worker", None)
    return dataclasses.asdict(worker.counts) if worker else {}


def main():
    if sys.argv[1:2] in ([], ["--help"]):
        sys.exit(__doc__)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", **json.loads(sys.argv[2])}
    engine = LLM(model=sys.argv[1], **options).llm_engine
    print("ready", file=answers)
    for line in sys.stdin:
        print("answer", json.dumps(run(engine, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()

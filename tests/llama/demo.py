#!/usr/bin/env python3
"""A llama-server without and with the plug-in answers the same question about documents of this project: deploy/demo_llama.sh."""

import argparse
import os
import pathlib
import sys
import textwrap

import engine
import server

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "quality"))
import pretrained  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ("service/README.md", "kvstore/README.md")  # about 6K tokens
QUESTION = "In two sentences: what do these documents describe?"
CONTEXT_TOKENS = 8192  # the most that the model was trained for


def answer(options, plugin):
    """The server's answer, and what the plug-in printed."""
    document = "\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    prompt = f"<|im_start|>user\n{document}\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    words = ["--ctx-size", CONTEXT_TOKENS, "--parallel", 1, "--threads", options.threads]
    with server.Server(engine.TESTED[0], pretrained.cache() / pretrained.FILE, words, plugin, options.settings) as running:
        answered = running.complete(prompt, options.tokens, ignore_eos=False)
    return answered, [line for line in running.messages.splitlines() if line.startswith("ggml-pqcached:")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plugin", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of the answer")
    parser.add_argument("--settings", default="exact", help="PQCACHED_LLAMA")
    options = parser.parse_args()
    speeds = {}
    for name, plugin in (("llama.cpp alone", None), (f"with pqcached ({options.settings})", options.plugin.resolve())):
        answered, messages = answer(options, plugin)
        timings = answered["timings"]
        speeds[name] = timings["predicted_per_second"]
        print(f"{name}: {timings['prompt_n']} tokens of prompt at {timings['prompt_per_second']:.1f} tokens/s, "
              f"{timings['predicted_n']} tokens of answer at {timings['predicted_per_second']:.1f} tokens/s")
        print(textwrap.fill(answered["content"].strip(), 98, initial_indent="    ", subsequent_indent="    "))
        for line in messages:
            print(f"  {line}")
    plain, ours = speeds.values()
    print(f"tokens/s of the answer: {plain:.1f} alone, {ours:.1f} with pqcached ({ours / plain:.2f} times)")


if __name__ == "__main__":
    main()

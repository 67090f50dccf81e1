#!/usr/bin/env python3
"""The perplexity of SmolLM2-135M behind 4K tokens, with the plug-in beside plain llama.cpp.

perplexity.py BUILD [PROMPT_TOKENS FOLLOWED_TOKENS]   prints the rows

The first tokens of this project's documents are the prompt, and the model predicts those behind it one by one. The divergence
(Kullback-Leibler, in nats a token) of the predictions from plain llama.cpp's varies less than the perplexity: a wrong prediction that is
better by chance counts, too.
"""

import math
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent), str(HERE.parent.parent / "quality")]

import numpy as np  # noqa: E402

import dialogue  # noqa: E402
import engine  # noqa: E402
import pretrained  # noqa: E402
from daemon import Daemon  # noqa: E402
from rows import row, selected  # noqa: E402

ROOT = HERE.parents[2]
TEXTS = ("README.md", "client/README.md", "client/INTEGRATE.md", "service/README.md", "tests/quality/FINDINGS.md", "kvstore/README.md")
PROMPT_TOKENS, FOLLOWED_TOKENS = 4096, 2048
INDEX_SECONDS = 300  # longest wait for the index
SETTINGS = {"exact": "exact", "k512": "k=512", "k1024": "k=1024", "k1024_tail": "k=1024,tail=1", "s10_no_tail": "ratio=0.1,tail=0",
            "s10": "ratio=0.1", "s10_rerank2": "ratio=0.1,rerank=2"}
WITH_TAIL = ("k1024_tail", "s10", "s10_rerank2")


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def divergence(logits, others):
    """The mean over tokens of the Kullback-Leibler divergence of the second predictions from the first ones."""
    found = []
    for one, other in zip(logits, others):
        own, theirs = log_softmax(one), log_softmax(other)
        found.append(float((np.exp(own) * (own - theirs)).sum()))
    return sum(found) / len(found)


def compared(plain, own, expected, logits):
    differences = plain - own
    ratio = math.exp(differences.mean())
    error = 1.96 * differences.std() / math.sqrt(len(differences)) * ratio
    return math.exp(-own.mean()), ratio, error, divergence(expected, logits)


class Perplexity:
    def __init__(self, build, folder, prompt_tokens=PROMPT_TOKENS, followed_tokens=FOLLOWED_TOKENS):
        self._version = engine.TESTED[0]
        engine.build(self._version)
        self._plugin = build / "client/libggml-pqcached.so"
        self._folder = pathlib.Path(folder)
        self._program = engine.compile_program(self._version, "dialogue", folder)
        self._model = pretrained.cache() / pretrained.FILE
        self._prompt_tokens = prompt_tokens
        text = self._folder / "text"
        text.write_text("\n".join((ROOT / name).read_text() for name in TEXTS))
        with self._dialogue(256) as opened:
            self._tokens = opened.text(prompt_tokens + followed_tokens, text)

    def _dialogue(self, tokens, settings=None, words=()):
        return dialogue.Dialogue(self._version, self._program, [self._model, tokens, *words], self._plugin if settings else None, settings)

    def run(self, settings=None, selects=False, words=()):
        """The logarithms of the tokens' probabilities, the logits [tokens, vocabulary], and what the plug-in did."""
        followed = self._tokens[self._prompt_tokens:]
        file = self._folder / "logits"
        with self._dialogue(len(self._tokens) + 64, settings, words) as run:
            run.prefill(self._tokens[:self._prompt_tokens])
            if selects:
                run.follow(followed[:4])  # begins to store the rows
                run.rewind()
                time.sleep(min(INDEX_SECONDS, 5 + self._prompt_tokens / 100))
            vocabulary = run.keep_logits(file)
            _, logarithms = run.follow(followed)
            messages = run.messages()
        logits = np.fromfile(file, dtype=np.float32).reshape(len(followed), vocabulary)
        return np.array(logarithms), logits, selected(messages) if settings else None

    def ratios(self, daemon, names=SETTINGS):
        """For each setting: the perplexity, its ratio to plain llama.cpp's, half the width of that ratio's 95 % interval, and the
        divergence from plain llama.cpp's predictions.

        Plain llama.cpp is that without flash attention, which adds up in fp32. With flash attention, ggml adds up values in f16, and
        8K of them make an error of some percent of the perplexity: the second setting.
        """
        plain, expected, _ = self.run(words=["off"])
        with_flash, logits, _ = self.run()
        found = {"plain": (math.exp(-plain.mean()), 1.0, 0.0, 0.0), "plain_flash": compared(plain, with_flash, expected, logits)}
        for name in names:
            selects = name != "exact"
            own, logits, (nodes, with_selection, _, with_tail) = self.run(
                f"{SETTINGS[name]},min_tokens=256,endpoint={daemon.endpoint}", selects)
            found[name] = value, ratio, error, nats = compared(plain, own, expected, logits)
            print(f"perplexity {name}: {value:.4f}, {ratio:.5f} +- {error:.5f} of plain, divergence {nats:.5f}; selected in "
                  f"{with_selection} of {nodes} nodes, with a tail estimate in {with_tail}", file=sys.stderr, flush=True)
            if selects and with_selection < nodes / 2:
                raise RuntimeError(f"{name}: tokens were selected in {with_selection} of {nodes} nodes")
            if (with_tail > 0.9 * with_selection) != (name in WITH_TAIL):
                raise RuntimeError(f"{name}: {with_tail} of {with_selection} selections had a tail estimate")
        return found


def measure(build, folder, *sizes):
    with Daemon(build, pathlib.Path(folder, "p")) as daemon:
        return Perplexity(build, folder, *sizes).ratios(daemon)


def perplexity_rows(build, folder, *sizes):
    against = (f"plain llama.cpp without flash attention: SmolLM2-135M of 4 bits, {sizes[1] if sizes else FOLLOWED_TOKENS} predictions after "
               f"{sizes[0] if sizes else PROMPT_TOKENS} tokens")
    rows = []
    for name, (perplexity, ratio, error, nats) in measure(build, folder, *sizes).items():
        if name != "plain":
            index = "; index pq m=4 b=8" if name in SETTINGS and name != "exact" else ""
            if name in SETTINGS:
                index += f", {SETTINGS[name]}{', with a tail estimate' if name in WITH_TAIL else ''}"
            goal = {"exact": 1.001, "s10": 1.01}.get(name)
            against_what = f"{against}{index}; perplexity {perplexity:.3f}, ratio +-{error:.4f} (95 %), divergence {nats:.4f} nats"
            rows.append(row(f"llama_smollm2_ppl_ratio_{name}", ratio, goal, against_what, "ratio", "lower"))
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as holder:
        for each in perplexity_rows(pathlib.Path(sys.argv[1]).resolve(), holder, *map(int, sys.argv[2:])):
            print(each["name"], each["value"], "goal", each["goal"], each["against"])

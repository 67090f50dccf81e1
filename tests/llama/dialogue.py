"""A running program `dialogue` (dialogue.cc): a model in llama.cpp that is fed with tokens."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import engine

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from children import end_with_parent  # noqa: E402

COMPUTED = re.compile(r"ggml-pqcached: computed (\d+) attention nodes, and left (\d+) to llama.cpp")


@dataclasses.dataclass(frozen=True)
class Token:
    token: int
    margin: float  # distance to the logit of the second best token


class Dialogue:
    def __init__(self, version, program, words, plugin=None, settings=None):
        self._process = subprocess.Popen([program, *map(str, words)], env=engine.environment(plugin, settings), cwd=engine.binaries(version),
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                         preexec_fn=end_with_parent)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def _send(self, *words):
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the program has ended: {self._process.communicate()[1][-2000:]}")
        return answer.split()

    def text(self, count, path):
        return [int(word) for word in self._send("text", count, path)]

    def prefill(self, tokens):
        self._send("prefill", *tokens)

    def ask(self, count, tokens=()):
        answers = [word.split(":") for word in self._send("ask", count, *tokens)]
        return [Token(int(token), float(margin)) for token, margin in answers]

    def rewind(self):
        self._send("rewind")

    def follow(self, tokens):
        """Feeds tokens: the best one in the place of each, and the logarithms of the probabilities of those that were fed."""
        answers = [word.split(":") for word in self._send("follow", *tokens)]
        return [Token(int(best), float(margin)) for best, margin, _ in answers], [float(logarithm) for *_, logarithm in answers]

    def keep_logits(self, path):
        """Has `follow` write the logits of each token to a file from now on, as floats. Returns how many a token has."""
        return int(self._send("logits", path)[0])

    def messages(self):
        """Ends the program; returns what it printed."""
        _, messages = self._process.communicate()
        if self._process.returncode != 0:
            raise RuntimeError(messages[-2000:])
        return messages

    def end(self):
        """Ends the program; returns how many attention nodes the plug-in has computed."""
        found = COMPUTED.search(self.messages())
        return int(found[1]) if found else 0

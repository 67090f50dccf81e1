"""A running llama-server, which listens on a free port of 127.0.0.1."""

import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import engine

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from children import end_with_parent  # noqa: E402

START_SECONDS = 120
ANSWER_SECONDS = 3600
COMPUTED = re.compile(r"ggml-pqcached: computed (\d+) attention nodes")
# Never a proxy: the server is on this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """Ends with the block that it is opened for. Afterwards `messages` is what it printed."""

    def __init__(self, version, model, words=(), plugin=None, settings=None, binaries=None, variables=None):
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = tempfile.TemporaryFile("w+")
        binaries = binaries or engine.binaries(version)
        self._process = subprocess.Popen(
            [binaries / "llama-server", "--model", model, "--host", "127.0.0.1", "--port", str(port), "--offline", *map(str, words)],
            env={**engine.environment(plugin, settings), **(variables or {})}, cwd=binaries, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=subprocess.STDOUT, preexec_fn=end_with_parent)
        self.messages = ""

    def __enter__(self):
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read()
        self._log.close()

    def _read(self):
        self._log.seek(0)
        self.messages = self._log.read()

    def _wait(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                self._read()
                raise RuntimeError(f"llama-server has ended: {self.messages[-2000:]}")
            try:
                with OPENER.open(f"{self._url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):  # not listening yet, or loading the model
                time.sleep(0.1)
        raise RuntimeError("llama-server did not start")

    def post(self, path, **body):
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return OPENER.open(request, timeout=ANSWER_SECONDS)

    def tokens_of(self, text):
        with self.post("/tokenize", content=text) as answer:
            return json.load(answer)["tokens"]

    def stream(self, prompt, tokens, **options):
        """As `complete` does: the seconds, by time.monotonic(), at which the tokens of the continuation came."""
        times = []
        with self.post("/completion", prompt=prompt, n_predict=tokens, temperature=0, ignore_eos=True, stream=True, **options) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not json.loads(line[len(b"data: "):])["stop"]:
                    times.append(time.monotonic())
        return times

    def complete(self, prompt, tokens, **options):
        """The greedy continuation of a prompt: the server's whole answer, with `content` and `timings`."""
        with self.post("/completion", prompt=prompt, n_predict=tokens, temperature=0, ignore_eos=True, **options) as answer:
            return json.load(answer)

    def computed(self):
        """How many attention nodes the plug-in has computed, once the server has ended."""
        return sum(map(int, COMPUTED.findall(self.messages)))

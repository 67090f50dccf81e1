"""Ways to choose the middle tokens of a step, side by side on the same rows.

A further method is a subclass of Method: `choose`, and what it costs. What lives in the sidecar is a subclass of
Sidecar that names its index.
"""

import ctypes
import dataclasses
import pathlib
import sys
import time

import numpy as np

SINK, WINDOW = 16, 64
ELEMENT_BYTES = 2  # of the stored rows: fp16


@dataclasses.dataclass(frozen=True)
class Step:
    """One query of a problem. The middle is [SINK, end); `shares` is what a method may not look at, but exact ones."""

    turn: object
    number: int  # of the step within the turn
    query: np.ndarray  # [query_heads, dim]
    position: int
    end: int
    shares: np.ndarray  # [kv_heads, tokens]: sum over the group of softmax over all tokens


class Method:
    name = ""

    def prepare(self, problem):
        """Before the first step: builds what there is to build."""
        self.problem, self.build_seconds, self.index_bytes = problem, 0.0, 0  # index_bytes of all kv heads

    def begin_turn(self, turn):
        """The turn's rows are there now."""

    def end_turn(self):
        """They are gone again."""

    def choose(self, step, count):
        """Positions of the middle, [kv_heads, count] at most, any order."""
        raise NotImplementedError

    def scanned(self, step):
        """Tokens whose keys or codes are looked at, per kv head."""
        return 0

    def scan_bytes(self, step):
        """What choosing reads, per kv head; the rows that are attended come on top."""
        return 0

    def close(self):
        pass


class Full(Method):
    """All of the middle, whatever the budget."""

    name = "full"

    def choose(self, step, count):
        return np.tile(np.arange(SINK, step.end), (self.problem.kv_heads, 1))


class Oracle(Method):
    """Exact top-k of the attention shares: nothing of the same size covers more of the group's attention."""

    name = "oracle"

    def choose(self, step, count):
        middle = step.shares[:, SINK:step.end]
        return SINK + np.argpartition(-middle, count - 1, axis=1)[:, :count] if count else np.empty((len(middle), 0), int)

    def scanned(self, step):
        return step.end - SINK

    def scan_bytes(self, step):
        return self.scanned(step) * self.problem.dim * ELEMENT_BYTES


class Window(Method):
    """The latest tokens."""

    name = "window"

    def choose(self, step, count):
        return np.tile(np.arange(step.end - count, step.end), (self.problem.kv_heads, 1))


class Random(Method):
    name = "random"

    def choose(self, step, count):
        random = np.random.default_rng([step.position, step.number])
        return np.array([SINK + random.choice(step.end - SINK, count, replace=False)
                         for _ in range(self.problem.kv_heads)])


def load_client(build):
    """The Python package of this tree, on the client library of this build."""
    library = pathlib.Path(build, "client/libpqcached_client.so.1").resolve()
    ctypes.CDLL(str(library))  # what has this name from now on
    package = str(pathlib.Path(__file__).resolve().parents[2] / "client/python")
    if package not in sys.path:
        sys.path.insert(0, package)
    import pqcached
    return pqcached


class Rows:
    """A problem's rows in a daemon, shared by the methods that ask it: one sequence, many indexes."""

    def __init__(self, pqcached, endpoint, problem):
        self.pqcached, self.problem = pqcached, problem
        self.client = pqcached.Client(endpoint, client_name="judge", timeout_ms=120000)
        group = pqcached.LayerGroup(layers=[0], kv_heads=problem.kv_heads, query_heads=problem.query_heads,
                                    key_dim=problem.dim, value_dim=problem.dim, softmax_scale=problem.scale,
                                    rope_layout=pqcached.RopeLayout.HALF if problem.rotary_dim else pqcached.RopeLayout.UNKNOWN,
                                    rotary_dim=problem.rotary_dim)
        shape = f"{problem.kv_heads}-{problem.query_heads}-{problem.dim}-{problem.rotary_dim}-{problem.scale:.4f}"
        self.cache = self.client.open_cache(f"judge-{shape}", model_fingerprint="judge", groups=[group],
                                            capacity_bytes=1 << 30, default_index=pqcached.Index.flat())
        self.sequence = self.cache.create_sequence()
        self.turn = None
        self.store(*(np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (problem.keys, problem.values)))

    def store(self, keys, values):
        """The prefill, [tokens, kv_heads, dim]."""
        self.sequence.ingest(0, 0, keys, values)
        if self.problem.samples:
            self.sequence.add_query_samples(0, *self.problem.samples)

    def build(self, index, iterations):
        before, start = self.sequence.describe(), time.perf_counter()
        self.sequence.build_index(index, iterations=iterations, sink_tokens=SINK)
        seconds, after = time.perf_counter() - start, self.sequence.describe()
        grown = lambda name: getattr(after, name) - getattr(before, name)
        return seconds, grown("index_bytes"), grown("codebook_bytes")

    def begin_turn(self, turn):
        if self.turn is turn:
            return
        self.end_turn()
        self.turn = turn
        keys, values = (x.transpose(1, 0, 2) for x in (turn.keys, turn.values))
        for first in range(0, len(keys), 512):
            self.sequence.append(self.problem.tokens + first,
                                 {0: (keys[first:first + 512], values[first:first + 512])})

    def end_turn(self):
        if self.turn is not None and self.turn.keys.shape[1] and self.turn.keys.shape[1] < 512:
            self.sequence.truncate(self.problem.tokens)
        self.turn = None

    def close(self):
        self.sequence.close()
        self.cache.close()
        self.client.close()


class Sidecar(Method):
    """An index of the sidecar, asked through its client."""

    def __init__(self, rows):
        self.rows = rows

    rerank_factor = 0  # off

    def index(self):
        raise NotImplementedError

    def begin_turn(self, turn):
        self.rows.begin_turn(turn)

    def choose(self, step, count):
        if count == 0:
            return np.empty((self.problem.kv_heads, 0), int)
        ends = SINK + step.position + 1 - step.end
        selection = self.rows.pqcached.Selection(token_count=ends + count, sink_tokens=SINK, window_tokens=WINDOW,
                                                 index=self.index(), rerank_factor=self.rerank_factor)
        return self.rows.sequence.topk(0, step.position, step.query, selection).positions

    def scanned(self, step):
        return step.end - SINK


class Flat(Sidecar):
    """The sidecar's exact scores; its softmax runs over the middle alone, the oracle's over all tokens."""

    name = "flat"

    def index(self):
        return self.rows.pqcached.Index.flat()

    def scan_bytes(self, step):
        return self.scanned(step) * self.problem.dim * ELEMENT_BYTES


class Pq(Sidecar):
    """Product quantization; layout: a name of SubspaceLayout in lower case."""

    def __init__(self, rows, subspaces, bits, iterations=0, layout="pairs"):
        super().__init__(rows)
        self.subspaces, self.bits, self.iterations, self.layout = subspaces, bits, iterations, layout
        self.name = f"pq{subspaces}x{bits}" + ("" if layout == "pairs" else f" {layout}")

    def index(self):
        return self.rows.pqcached.Index.pq(self.subspaces, self.bits, self.rows.pqcached.SubspaceLayout[self.layout.upper()])

    def prepare(self, problem):
        super().prepare(problem)
        self.build_seconds, codes, self.codebook_bytes = self.rows.build(self.index(), self.iterations)
        self.index_bytes = codes + self.codebook_bytes

    def scan_bytes(self, step):
        return self.scanned(step) * code_bytes(self.subspaces, self.bits) + self.codebook_bytes / self.problem.kv_heads


class Reranked(Sidecar):
    """The best of what another method's index proposes, by their exact scores. That method prepares the index."""

    def __init__(self, pq, factor):
        super().__init__(pq.rows)
        self.pq, self.rerank_factor, self.name = pq, factor, f"{pq.name} re-ranked {factor:g}"

    def index(self):
        return self.pq.index()

    def scan_bytes(self, step):
        return self.pq.scan_bytes(step)  # and rerank_factor times the selected keys


def code_bytes(subspaces, bits):
    """Of one token and kv head as the sidecar lays them out: a byte per sub-space, nibbles in pairs when b = 4."""
    return subspaces / 2 if bits == 4 and subspaces % 2 == 0 else subspaces

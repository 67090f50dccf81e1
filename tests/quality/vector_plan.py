"""Which vectors are tried with which methods: captured ones, generated ones, the grid of indexes, k-means, accounting."""

import dataclasses

import numpy as np

import sidecar
from generators import Setting, generate
from methods import ELEMENT_BYTES, Flat, Full, Oracle, Pq, Random, Rows, Window
from problems import captured
from vector_study import BUDGETS, study

# m x b as far as this version goes (b in 4..8); the paper's Figure 10b has products of about 12 to 16 and 8 x 2.
GRID = [(m, b) for m in (1, 2, 4, 8, 16) for b in (4, 5, 6, 7, 8)]
QUICK_GRID = [(2, 6), (4, 6), (4, 8)]
INDEXES_PER_SEQUENCE = 4  # the sidecar's limit
SEEDS = [1, 2, 3]  # of generated problems
ITERATIONS = [1, 2, 3, 4, 5, 7, 10, 15, 20, 30]
RETRIEVAL_LAYER = 1  # of the trained model: a hundredth of the keys holds nine tenths of the attention


def with_rows(build, problem, pqcached, endpoint, make, budgets):
    rows = Rows(pqcached, endpoint, problem)
    try:
        return study(problem, make(rows), budgets)
    finally:
        rows.close()


def standard(rows):
    return [Full(), Oracle(), Flat(rows), Pq(rows, 4, 8), Pq(rows, 2, 6), Window(), Random()]


def portions(grid):
    return [grid[first:first + INDEXES_PER_SEQUENCE] for first in range(0, len(grid), INDEXES_PER_SEQUENCE)]


class Plan:
    def __init__(self, build, data, pqcached, endpoint, full, say=print):
        self.build, self.data, self.pqcached, self.endpoint = build, data, pqcached, endpoint
        self.full, self.say = full, say
        self.kept = {}

    def study(self, problem, make, budgets):
        self.say(f"vectors: {problem.name}")
        return with_rows(self.build, problem, self.pqcached, self.endpoint, make, budgets)

    def capture(self, task, length, context):
        """Of both layers; 4 questions, at most 6 steps of each."""
        key = task, length, context
        if key not in self.kept:
            self.kept[key] = captured(self.build, self.data, task, length, context, 4, steps=6)
        return self.kept[key]

    def retrieval_problems(self):
        """Of the retrieval layer and retrieval tasks: what the grid and k-means are judged on."""
        where = [(task, length, context) for task in ("niah", "mq") for length in (8192, 32768) for context in (0, 1)
                 ] + [("niah", 16384, 1), ("mq", 16384, 1)] if self.full else [("niah", 4096, 0), ("niah", 4096, 1)]
        return [problem for place in where for problem in self.capture(*place)
                if problem.facts["layer"] == RETRIEVAL_LAYER]

    def captured(self):
        files = {"niah": [1024, 4096, 8192, 16384, 32768], "mq": [1024, 4096, 8192, 16384, 32768],
                 "var": [1024, 4096, 8192, 16384], "kv": [1024], "freq": [4096]} if self.full else {
                     "niah": [4096], "freq": [4096]}
        rows = []
        for task, lengths in files.items():
            for length in lengths:
                # freq has one question per context.
                contexts = (6 if task == "freq" else 3 if length < 16384 else 2) if self.full else 2
                for context in range(contexts):
                    for problem in self.capture(task, length, context):
                        rows += self.study(problem, standard, BUDGETS if self.full else ["1/10", "256"])
        return rows

    def grid(self):
        rows = []
        for problem in self.retrieval_problems():
            for indexes in portions(GRID if self.full else QUICK_GRID):
                rows += self.study(problem, lambda sidecar_rows: [Pq(sidecar_rows, m, b) for m, b in indexes],
                                   ["1/10", "256"])
        return rows

    def iterations(self):
        rows = []
        for problem in self.retrieval_problems():
            for count in ITERATIONS if self.full else [1, 3, 10]:
                found = self.study(problem, lambda sidecar_rows: [
                    Pq(sidecar_rows, 4, 8, count), Pq(sidecar_rows, 2, 6, count)], ["1/10"])
                rows += [{**row, "iterations": count} for row in found]
        return rows

    def generated(self):
        rows = []
        budgets = ["1/10", "256"] if self.full else ["1/10"]
        for axis, value, setting in scenarios(self.full):
            for seed in SEEDS if self.full else SEEDS[:1]:
                problem = generate(f"{axis} {value}, seed {seed}", dataclasses.replace(setting, seed=seed))
                rows += [{"axis": axis, "at": value, **row} for row in self.study(problem, standard, budgets)]
        return rows


def scenarios(full):
    """(axis, value, setting): one thing changes along an axis, the rest is the setting's default."""
    if not full:
        small = {"tokens": 4096, "steps": 8}
        return [("RoPE", "half 5e5", Setting(**small)), ("duplicates", 256, Setting(
                    distinct=256, rope="none", needle_margin=1.0, effective_tokens=1024, **small)),
                ("drift", 1, Setting(generated=1024, drift=1, **small))]
    made = [("RoPE", "none", Setting(rope="none"))]
    made += [("RoPE", f"{name} {base}", Setting(rope=layout, theta=float(base)))
             for name, layout in (("half", "half"), ("interl.", "interleaved")) for base in ("1e4", "5e5")]
    made += [("effective tokens", n, Setting(effective_tokens=n)) for n in (4, 16, 64, 256, 1024, 4096)]
    made += [("outlier channels", x, Setting(outliers=x)) for x in (0, 4, 16, 64)]
    made += [("sinks", on, Setting(sinks=bool(on))) for on in (0, 1)]
    made += [("topic run", n, Setting(run_tokens=n)) for n in (1, 16, 64)]
    made += [("query distance", x, Setting(distance=x)) for x in (0, 100, 200, 400, 800)]
    made += [("drift", f"{x:g}{', rebuilt' if rebuilt else ''}", Setting(tokens=12288, generated=4096, drift=x, rebuilt=rebuilt))
             for x in (0, 0.5, 1) for rebuilt in (False, True)]
    made += [("duplicates", f"{n or 'none'}, {rope}", Setting(distinct=n, rope=rope, needle_margin=1.0,
                                                                effective_tokens=1024))
             for rope in ("none", "half") for n in (64, 1024, 0)]
    made += [("needle margin", x, Setting(needle_margin=float(x))) for x in (0, 1, 2, 4)]
    made += [("length", n, Setting(tokens=n, kv_heads=1)) for n in (4096, 16384, 65536)]
    return made


def accounting(build, pqcached, tokens=131072, dim=128, epochs=(32768, 65536, 131072), grid=None, say=print):
    """What the sidecar stores for `tokens` tokens of one kv head: rows by (m, b, epoch length). One k-means round is
    enough to have the bytes."""
    random = np.random.default_rng(5)
    keys = random.standard_normal((tokens, 1, dim), dtype=np.float32)
    group = pqcached.LayerGroup(layers=[0], kv_heads=1, query_heads=1, key_dim=dim, value_dim=dim)
    rows = []
    for epoch in epochs:
        with sidecar.running(build, "--codebook-tokens", str(epoch)) as endpoint:
            with pqcached.Client(endpoint, timeout_ms=120000) as client:
                cache = client.open_cache("accounting", model_fingerprint="judge", groups=[group],
                                          capacity_bytes=1 << 30, default_index=pqcached.Index.flat())
                for indexes in portions(grid or GRID):
                    say(f"accounting: epoch {epoch}, m x b = {indexes}")
                    with cache.create_sequence() as sequence:
                        sequence.ingest(0, 0, keys, keys)
                        for m, b in indexes:
                            before = sequence.describe()
                            sequence.build_index(pqcached.Index.pq(m, b), iterations=1, train_tokens=2048, sink_tokens=16)
                            after = sequence.describe()
                            codes = after.index_bytes - before.index_bytes
                            codebooks = after.codebook_bytes - before.codebook_bytes
                            rows.append({"subspaces": m, "bits": b, "codebook_tokens": epoch, "tokens": tokens, "dim": dim,
                                         "code_bytes": codes, "codebook_bytes": codebooks,
                                         "index_over_keys": (codes + codebooks) / (tokens * dim * ELEMENT_BYTES)})
                cache.close()
    return rows


def epoch_study(build, pqcached, tokens=131072, epochs=(32768, 131072), say=print):
    """Does one codebook for all tokens lose against one per 32K? Generated keys, 128K tokens."""
    problem = generate("128K tokens", Setting(tokens=tokens, steps=8, kv_heads=1))
    rows = []
    for epoch in epochs:
        say(f"epoch study: {epoch}")
        with sidecar.running(build, "--codebook-tokens", str(epoch)) as endpoint:
            found = with_rows(build, problem, pqcached, endpoint,
                              lambda sidecar_rows: [Oracle(), Pq(sidecar_rows, 4, 8), Pq(sidecar_rows, 4, 6),
                                                    Pq(sidecar_rows, 2, 6)], ["1/10", "1/20", "256"])
            rows += [{**row, "codebook_tokens": epoch} for row in found]
    return rows

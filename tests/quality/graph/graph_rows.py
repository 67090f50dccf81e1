#!/usr/bin/env python3
"""The graph index beside exact search, IVF and HNSW, on queries and keys of SmolLM2-135M.

graph_rows.py BUILD --json FILE [--curves FILE] [--head-stride N]
graph_rows.py --fetch

The keys of the context without sinks and window are indexed, one graph per query head; the tests are queries of tokens after the
context, whose exact best keys are known. A key is scanned when it is scored, and a centroid of IVF counts as a key. Recalls and shares
are means over 8 layers and the query heads taken. Curves: recall over the share of keys scanned, for all methods.

Rows of the area systems:
    ra_recall_at_scanned_2pct   = recall@100 with 2 % of the keys scanned
    ra_scanned_over_hnsw_at_r90 = share of keys scanned at recall@100 of 0.9, over that of HNSW of the same degree
    ra_build_vs_hnswlib         = seconds of a build over those of hnswlib's with the same degree and threads, both with -march=native;
                                  of 1 and 2 threads the worse

--fetch downloads hnswlib's headers with pip (a source package; nothing is installed) into the cache of pretrained.py.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/quality"))
import pretrained
from pretrained_rows import TEXTS, TOKENS

LAYERS = [1, 5, 9, 13, 17, 21, 25, 29]
CONTEXT = 7680
HNSWLIB = "hnswlib==0.8.0"
GRAPH, SEEDED, PEER = "graph", "graph, seeded", "hnsw"
RECALL = {"name": "ra_recall_at_scanned_2pct", "unit": "recall@100", "better": "higher", "goal": 0.9}
SCANNED = {"name": "ra_scanned_over_hnsw_at_r90", "unit": "ratio", "better": "lower", "goal": 0.2}
BUILD = {"name": "ra_build_vs_hnswlib", "unit": "ratio", "better": "lower", "goal": 1}


def headers():
    """The include path of hnswlib, in the cache."""
    return pretrained.cache() / HNSWLIB.replace("==", "-")


def fetch():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", HNSWLIB,
                        "-d", folder], check=True)
        (source,) = pathlib.Path(folder).glob("hnswlib-*.tar.gz")
        with tarfile.open(source) as archive:
            for member in archive.getmembers():
                path = pathlib.PurePosixPath(member.name)
                if member.isfile() and path.parent.name == "hnswlib" and path.suffix == ".h":
                    target = headers() / "hnswlib" / path.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.extractfile(member).read())
    print(headers())


def absent():
    """Why the comparison cannot run here, or None. Nothing is fetched for a figure."""
    if not pretrained.is_fetched():
        return "SmolLM2-135M is not there: tests/quality/pretrained.py fetches it"
    if not (headers() / "hnswlib/hnswlib.h").exists():
        return "hnswlib is not there: tests/quality/graph/graph_rows.py --fetch fetches it"
    return None


def captured(folder):
    """Writes the queries and keys of all tokens, and returns the query heads, kv heads, tokens and dimensions."""
    text = folder / "text.md"
    text.write_text("\n".join((ROOT / name).read_text() for name in TEXTS))
    subprocess.run([sys.executable, ROOT / "tests/quality/capture.py", text, "--out", folder, "--tokens", str(TOKENS), "--layers",
                    ",".join(map(str, LAYERS)), "--queries", str(TOKENS)], check=True)
    for layer in LAYERS:
        for name in "qk":
            values = np.load(folder / f"layer{layer}_{name}.npy")
            values.astype("<f4").tofile(folder / f"layer{layer}_{name}.bin")
            if name == "q":
                query_heads = len(values)
    return query_heads, *values.shape


def compared(build, folder, head_stride):
    """All measurements of graph_compare.cc, as dicts."""
    program = folder / "graph_compare"
    subprocess.run(["c++", "-O3", "-march=native", "-std=c++20", "-I", ROOT, "-isystem", headers(), ROOT / "tests/quality/graph/graph_compare.cc",
                    build / "kernels/libpqcached_kernels.a", "-lpthread", "-o", program], check=True)
    shape = captured(folder)
    found = []
    for layer in LAYERS:
        run = subprocess.run([program, folder / f"layer{layer}_q.bin", folder / f"layer{layer}_k.bin", *map(str, shape), str(CONTEXT),
                              str(head_stride)], check=True, capture_output=True, text=True)
        found += [{**json.loads(line), "layer": layer} for line in run.stdout.splitlines()]
        print(f"layer {layer} compared", file=sys.stderr, flush=True)
    return found


def curves(found):
    """Means over layers and heads: {(method, queries): [(scanned, recall@100, recall@10)]}, ascending."""
    points = collections.defaultdict(list)
    for row in found:
        if "method" in row:
            points[row["method"], row["queries"], row["param"]].append((row["scanned"], row["recall100"], row["recall10"]))
    means = collections.defaultdict(list)
    for (method, queries, _), values in points.items():
        means[method, queries].append(tuple(float(np.mean(each)) for each in zip(*values)))
    return {key: sorted(values) for key, values in means.items()}


def scanned_at(curve, recall):
    """The share of keys scanned at a recall@100, between measurements; the largest measured share if the recall is not reached."""
    scanned, reached, _ = zip(*curve)
    return float(np.interp(recall, reached, scanned))


def build_ratios(found):
    """The ratio of the mean seconds by number of threads, and the means themselves."""
    seconds = collections.defaultdict(list)
    for row in found:
        if "build" in row:
            seconds[row["build"], row["threads"]].append(row["seconds"])
    means = {key: float(np.mean(values)) for key, values in seconds.items()}
    return {threads: means[GRAPH, threads] / means[PEER, threads] for threads in (1, 2)}, means


def rows(found):
    by_method = curves(found)
    fresh = by_method[GRAPH, "fresh"]
    scanned, recall, recall10 = zip(*fresh)
    at = lambda share, values, of=scanned: float(np.interp(share, of, values))
    heads = len({(row["layer"], row["head"]) for row in found})
    seeded = list(zip(*by_method[SEEDED, "fresh"]))
    sampled = list(zip(*by_method[GRAPH, "sampled"]))
    where = f"{heads} query heads of {len(LAYERS)} layers, {CONTEXT} tokens"
    ratios, seconds = build_ratios(found)
    worst = max(ratios, key=ratios.get)
    ours, peer = scanned_at(fresh, 0.9), scanned_at(by_method[PEER, "fresh"], 0.9)
    ivf = min(scanned_at(curve, 0.9) for (method, _), curve in by_method.items() if method.startswith("ivf"))
    published = list(zip(*by_method["as published", "fresh"]))
    return [
        {**RECALL, "value": at(0.02, recall),
         "against": f"queries that were not sampled; recall@10 {at(0.02, recall10):.3f}; with the results of the token before as seeds "
                    f"{at(0.02, seeded[1], seeded[0]):.3f} and {at(0.02, seeded[2], seeded[0]):.3f}; sampled queries "
                    f"{at(0.02, sampled[1], sampled[0]):.3f}; the graph as published {at(0.02, published[1], published[0]):.3f}; {where}"},
        {**SCANNED, "value": ours / peer,
         "against": f"hnswlib, which scans {peer:.3f} of the keys for recall@100 of 0.9, the graph {ours:.3f}, IVF {ivf:.3f}; {where}"},
        {**BUILD, "value": ratios[worst],
         "against": f"hnswlib, {seconds[PEER, worst]:.3f} s per query head and the graph {seconds[GRAPH, worst]:.3f} s with {worst} "
                    f"thread(s); {where}"},
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, nargs="?")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--curves", type=pathlib.Path)
    parser.add_argument("--head-stride", type=int, default=4, help="takes every N-th query head; default 4")
    parser.add_argument("--fetch", action="store_true")
    arguments = parser.parse_args()
    if arguments.fetch:
        return fetch()
    if arguments.build is None or arguments.json is None:
        parser.error("BUILD and --json are needed")
    common = {"area": "systems", "samples": None, "spread": None}
    reason = absent()
    if reason:
        found = [{**row, "value": None, "against": reason} for row in (RECALL, SCANNED, BUILD)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            measured = compared(arguments.build.resolve(), pathlib.Path(folder), arguments.head_stride)
        found = rows(measured)
        if arguments.curves:
            lines = {", ".join(key): values for key, values in curves(measured).items()}
            arguments.curves.write_text(json.dumps(lines, indent=1))
    arguments.json.write_text(json.dumps([{**common, **row} for row in found], indent=1))


if __name__ == "__main__":
    main()

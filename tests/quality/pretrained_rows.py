"""What choices of the index gain on a pretrained model: the attention mass that the selected tokens cover.

pretrained_rows.py BUILD AREA --json FILE: SmolLM2-135M (pretrained.py) reads 8K tokens of this project's documentation; in LAYERS, a
tenth of the context is selected for every 16th of the last 512 tokens. About a minute on 2 cores.

Rows of the area engine:
    rerank2_mass_gain_m2b6_r10_smollm2 = share of the mass of exact top-k that the selected tokens cover under PQ m=2 b=6, with
                                         rerank_factor 2 minus without
Rows of the area systems:
    pair_layout_mass_gain_*_smollm2    = attention mass that sink, window and selected tokens cover, with sub-spaces that keep rotary
                                         pairs together minus contiguous ones
    query_weighted_mass_gain_*_smollm2 = the same mass, with keys rotated by samples of the prompt's queries (its last 64 and 512 before
                                         them) minus the better of the two layouts above
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import pretrained
import sidecar
from methods import Pq, Reranked, Rows, load_client
from problems import Problem, Turn, stored
from vector_study import study

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = ["README.md", "client/README.md", "client/INTEGRATE.md", "service/README.md", "tests/quality/FINDINGS.md", "kvstore/README.md",
         "proto/GLOSSARY.md"]
LAYERS = {"engine": [2, 10, 18, 26], "systems": [1, 5, 9, 13, 17, 21, 25, 29]}
TOKENS, QUERIES, STRIDE = 8192, 512, 16
RERANK = {"area": "engine", "name": "rerank2_mass_gain_m2b6_r10_smollm2", "unit": "share of mass", "better": "higher", "goal": 0.02}
PAIRS = {"area": "systems", "unit": "share of mass", "better": "higher"}
LAYOUTS = [(2, 6, {"name": "pair_layout_mass_gain_m2b6_smollm2", "goal": 0.004}),
           (4, 4, {"name": "pair_layout_mass_gain_m4b4_smollm2", "goal": 0.015})]
WEIGHTED = [(4, 4, {"name": "query_weighted_mass_gain_m4b4_smollm2", "goal": 0.015}),
            (4, 8, {"name": "query_weighted_mass_gain_m4b8_smollm2", "goal": 0.001})]
SAMPLE_WINDOW, SAMPLES = 64, 512


def captured(folder, layers):
    """One problem per layer: the context is all but the last QUERIES tokens, which are appended."""
    text = folder / "text.md"
    text.write_text("\n".join((ROOT / name).read_text() for name in TEXTS))
    subprocess.run([sys.executable, ROOT / "tests/quality/capture.py", text, "--out", folder, "--tokens", str(TOKENS),
                    "--layers", ",".join(map(str, layers)), "--queries", str(TOKENS)], check=True)
    meta = json.loads((folder / "meta.json").read_text())
    count = len(meta["tokens"])
    chosen = np.arange(STRIDE - 1, QUERIES, STRIDE)
    first = count - QUERIES
    sampled = np.union1d(np.arange(0, first, -(-first // SAMPLES)), np.arange(first - SAMPLE_WINDOW, first))
    for layer in layers:
        q, k, v = (np.load(folder / f"layer{layer}_{name}.npy") for name in "qkv")
        queries = q.transpose(1, 0, 2)
        turn = Turn(stored(k[:, first:]), stored(v[:, first:]), np.ascontiguousarray(queries[first + chosen]), first + chosen)
        yield Problem(f"SmolLM2 layer {layer}", {"layer": layer}, stored(k[:, :first]), stored(v[:, :first]), [turn], meta["scale"],
                      rotary_dim=k.shape[2], samples=(sampled.tolist(), np.ascontiguousarray(queries[sampled])))


def means(problem, methods, key):
    """The mean of a metric over the steps and kv heads, by method."""
    found = study(problem, methods, ["1/10"])
    return {method.name: float(np.mean([row[key] for row in found if row["method"] == method.name])) for method in methods}


def gain(row, pairs, against):
    """The row of the mean gain of pairs (without, with)."""
    gains = [after - before for before, after in pairs]
    without, reached = np.mean(pairs, axis=0)
    return {**row, "value": reached - without, "samples": len(pairs), "spread": float(np.subtract(*np.quantile(gains, [0.75, 0.25]))),
            "against": against.format(without=without, reached=reached, where=f"{len(pairs)} layers, {TOKENS} tokens")}


def rerank_rows(problems, rows_of):
    found = []
    for problem in problems:
        with rows_of(problem) as rows:
            plain = Pq(rows, 2, 6)
            reranked = Reranked(plain, 2)
            mean = means(problem, [plain, reranked], "middle_mass_vs_oracle")
        found.append((mean[plain.name], mean[reranked.name]))
        print(f"{problem.name}: {found[-1][0]:.3f} of exact top-k's mass, {found[-1][1]:.3f} re-ranked", flush=True)
    return [gain(RERANK, found, "no re-ranking, which covers {without:.3f} of the mass of exact top-k; re-ranked {reached:.3f}; {where}")]


def layout_rows(problems, rows_of):
    masses = {}  # by (m, b): of the layouts, per problem
    for problem in problems:
        for m, b in sorted({(m, b) for m, b, _ in LAYOUTS + WEIGHTED}):
            with rows_of(problem) as rows:  # a sequence has few indexes
                methods = [Pq(rows, m, b, layout=layout) for layout in ("contiguous", "pairs", "weighted")]
                mean = means(problem, methods, "mass")
            masses.setdefault((m, b), []).append([mean[method.name] for method in methods])
            print(f"{problem.name}:", ", ".join(f"{method.name} {mean[method.name]:.4f}" for method in methods), flush=True)
    pairs = [gain({**PAIRS, **row}, [(of[0], of[1]) for of in masses[m, b]],
                  "contiguous sub-spaces, which cover {without:.4f} of the attention; pairs {reached:.4f}; {where}")
             for m, b, row in LAYOUTS]
    weighted = []
    for m, b, row in WEIGHTED:
        best = int(np.argmax(np.mean(masses[m, b], axis=0)[:2]))
        weighted.append(gain({**PAIRS, **row}, [(of[best], of[2]) for of in masses[m, b]],
                             ("contiguous sub-spaces", "rotary pairs")[best] +
                             ", which cover {without:.4f} of the attention; weighted {reached:.4f}; {where}"))
    return pairs + weighted


def measured(build, area):
    pqcached = load_client(build)
    with tempfile.TemporaryDirectory() as folder, sidecar.running(build) as endpoint:
        rows_of = lambda problem: contextlib.closing(Rows(pqcached, endpoint, problem))
        return (rerank_rows if area == "engine" else layout_rows)(captured(pathlib.Path(folder), LAYERS[area]), rows_of)


def absent():
    """Why the model cannot run here, or None. Nothing is fetched for a figure."""
    if not pretrained.is_fetched():
        return "SmolLM2-135M is not there: tests/quality/pretrained.py fetches it"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("area", choices=["engine", "systems"])
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    reason = absent()
    if reason:
        named = [RERANK] if arguments.area == "engine" else [{**PAIRS, **row} for *_, row in LAYOUTS + WEIGHTED]
        rows = [{**row, "value": None, "samples": None, "spread": None, "against": reason} for row in named]
    else:
        rows = measured(arguments.build.resolve(), arguments.area)
    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

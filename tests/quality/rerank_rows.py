"""What exact re-ranking gains on a pretrained model: the attention mass that the selected tokens cover.

rerank_rows.py BUILD --json FILE: SmolLM2-135M (pretrained.py) reads 8K tokens of this project's documentation; in LAYERS, a tenth of
the context is selected by PQ m=2 b=6 for every 16th of the last 512 tokens. About a minute on 2 cores.

Row: rerank2_mass_gain_m2b6_r10_smollm2 = share of the mass of exact top-k that the selected tokens cover, with rerank_factor 2
minus without.
"""

import argparse
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
LAYERS = [2, 10, 18, 26]
TOKENS, QUERIES, STRIDE = 8192, 512, 16
ROW = {"area": "engine", "name": "rerank2_mass_gain_m2b6_r10_smollm2", "unit": "share of mass", "better": "higher", "goal": 0.02}


def captured(folder):
    """One problem per layer: the context is all but the last QUERIES tokens, which are appended."""
    text = folder / "text.md"
    text.write_text("\n".join((ROOT / name).read_text() for name in TEXTS))
    subprocess.run([sys.executable, ROOT / "tests/quality/capture.py", text, "--out", folder, "--tokens", str(TOKENS),
                    "--layers", ",".join(map(str, LAYERS)), "--queries", str(QUERIES)], check=True)
    meta = json.loads((folder / "meta.json").read_text())
    count = len(meta["tokens"])
    chosen = np.arange(STRIDE - 1, QUERIES, STRIDE)
    for layer in LAYERS:
        q, k, v = (np.load(folder / f"layer{layer}_{name}.npy") for name in "qkv")
        first = count - QUERIES
        turn = Turn(stored(k[:, first:]), stored(v[:, first:]), np.ascontiguousarray(q[:, chosen].transpose(1, 0, 2)), first + chosen)
        yield Problem(f"SmolLM2 layer {layer}", {"layer": layer}, stored(k[:, :first]), stored(v[:, :first]), [turn], meta["scale"])


def shares(build, problem, pqcached, endpoint):
    """The selected tokens' share of the mass of exact top-k, without re-ranking and with factor 2."""
    rows = Rows(pqcached, endpoint, problem)
    try:
        plain = Pq(rows, 2, 6)
        found = study(problem, [plain, Reranked(plain, 2)], ["1/10"])
    finally:
        rows.close()
    mean = lambda name: float(np.mean([row["middle_mass_vs_oracle"] for row in found if row["method"] == name]))
    return mean("pq2x6"), mean("pq2x6 re-ranked 2")


def measured(build):
    pqcached = load_client(build)
    with tempfile.TemporaryDirectory() as folder, sidecar.running(build) as endpoint:
        found = []
        for problem in captured(pathlib.Path(folder)):
            found.append(shares(build, problem, pqcached, endpoint))
            print(f"{problem.name}: {found[-1][0]:.3f} of exact top-k's mass, {found[-1][1]:.3f} re-ranked", flush=True)
    without, reranked = np.mean(found, axis=0)
    gains = [each[1] - each[0] for each in found]
    return {**ROW, "value": reranked - without, "samples": len(found), "spread": float(np.subtract(*np.quantile(gains, [0.75, 0.25]))),
            "against": f"no re-ranking, which covers {without:.3f} of the mass of exact top-k; re-ranked {reranked:.3f}; "
                       f"{len(LAYERS)} layers, {TOKENS} tokens"}


def absent():
    """Why the model cannot run here, or None. Nothing is fetched for a figure."""
    if not pretrained.is_fetched():
        return "SmolLM2-135M is not there: tests/quality/pretrained.py fetches it"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    reason = absent()
    row = {**ROW, "value": None, "samples": None, "spread": None, "against": reason} if reason else measured(arguments.build.resolve())
    arguments.json.write_text(json.dumps([row], indent=1))


if __name__ == "__main__":
    main()

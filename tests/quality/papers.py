"""What the papers report, quoted as context for the judge's report; and the report's words. Never mixed with our numbers:
other models, other tasks."""

PQCACHE = "PQCache, SIGMOD 2025 (arXiv 2407.12820)"

# Table 2, averages; Llama-3.1-8B on LongBench, extra communication of 1/128 of the keys.
LONGBENCH = [
    ["1/5", "47.37", "47.40", "45.31", "46.45", "46.48", "39.95", "44.24", "47.29"],
    ["1/10", "47.37", "47.52", "43.75", "45.42", "45.39", "34.36", "42.21", "47.19"],
]
# Table 4, averages; InfiniteBench, extra communication of 1/64.
INFINITEBENCH = [
    ["1/5", "47.63", "47.56", "41.80", "46.33", "46.61", "28.17", "40.72", "47.31"],
    ["1/10", "47.63", "47.60", "39.53", "44.71", "44.74", "39.19", "39.78", "46.80"],
]
METHODS = ["tokens", "full", "oracle", "H2O", "SnapKV", "PyramidKV", "InfLLM", "SPARQ", "PQCache"]
# Table 3; questions before the context, 1/10 of the tokens.
QUESTION_FIRST = [
    ["NarrativeQA", "19.39", "19.35", "18.82"], ["Qasper", "18.70", "17.60", "25.76"],
    ["MultiFieldQA", "43.48", "44.07", "47.99"], ["HotpotQA", "42.93", "42.55", "43.28"],
    ["2WikiMQA", "36.36", "35.04", "36.48"], ["Musique", "20.86", "21.19", "22.29"], ["Average", "30.29", "29.97", "32.44"],
]
# RetrievalAttention (arXiv 2409.10516), RULER averages on Llama-3-8B over 4K..128K.
RETRIEVAL_ATTENTION = [["86.54", "84.66", "83.20", "84.70", "73.78", "43.74", "15.80"]]

WORDS = [
    "<b>budget</b>: all tokens that a step attends to: the first 16 (sink), the last 64 (window), and the selected ones.",
    "<b>exact top-k</b> (oracle): the tokens with the largest sum over the query heads of a group of softmax over all tokens, summed in "
    "double precision; nothing of the same size covers more of the group's attention.",
    "<b>flat</b>: the daemon's exact scores. Its softmax runs over the middle alone, so heads weigh a little differently.",
    "<b>mass / exact top-k</b>: attention held by the attended tokens, relative to what the oracle's hold. Above 1 is impossible at "
    "the same budget.",
    "<b>recall</b>: share of the oracle's tokens that were chosen; ties count as found. Per query head: of each head's own top-k.",
    "<b>output error</b>: norm of the difference from full attention's output, relative to its norm, mean over query heads.",
    "<b>effective tokens</b>: exp of the entropy of the attention over the middle.",
    "<b>bytes read</b>: codes and centroids, or keys, that choosing looks at, and the rows that are attended; per step and kv head, "
    "by accounting.",
    "<b>index bytes</b>: codes, centroids, counts, offsets and permutations, as the daemon reports them.",
]


def markup(table):
    return ("<div class='paper'><p>Quoted for context. Their models have billions of parameters and their tasks are others; no number here "
            "may be compared with ours one to one. What can be compared is the shape: PQ close to exact top-k, both close to full attention.</p>"
            f"<h3>{PQCACHE}: LongBench average, Table 2</h3>" + table(METHODS, LONGBENCH)
            + f"<h3>{PQCACHE}: InfiniteBench average, Table 4</h3>" + table(METHODS, INFINITEBENCH)
            + f"<h3>{PQCACHE}: questions before the context, Table 3</h3>"
            + table(["data set", "SnapKV", "PyramidKV", "PQCache"], QUESTION_FIRST)
            + "<h3>RetrievalAttention (arXiv 2409.10516): RULER average</h3>"
            + table(["full", "flat", "IVF", "RetrievalAttention", "SnapKV", "InfLLM", "StreamingLLM"], RETRIEVAL_ATTENTION)
            + "<p>Figures 9 (needles over length and depth), 10b (m × b on HotPotQA and Qasper) and 12c (score against k-means "
            "rounds on HotPotQA) of PQCache exist as pictures without numbers; the charts above ask the same questions. The text says: all "
            "m × b work well but 8 × 2 on Qasper, 2 × 6 is best (b below 4 is not in this version); needles are found in "
            "most cases at 1/10; more rounds generally help.</p></div>")

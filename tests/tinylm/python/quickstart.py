"""The quickstart from Python: a trained model answers questions about a long context while its KV
is stored in pqcached.

    quickstart.py --endpoint unix:///tmp/pqcached.sock [--length 8192] [--tasks mq,niah]
                  [--contexts 2] [--questions 5]

Prints the table of deploy/quickstart.sh for one length: right answers, tokens attended to,
milliseconds per token. The model runs in numpy (tinylm.py), so prefill and full attention are
slower than in the C++ engine; the sidecar does the same work.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import pqcached
from pqcached import Index, Selection
from tinylm import TinyLM, attend

HERE = pathlib.Path(__file__).resolve().parent
SINK, WINDOW = 16, 64
M4, M2 = Index.pq(4, 8), Index.pq(2, 6)
METHODS = [("full attention", None, None), ("exact top-k, 1/5", Index.flat(), 0.2),
           ("exact top-k, 1/10", Index.flat(), 0.1), ("pqcached m=4 b=8, 1/5", M4, 0.2),
           ("pqcached m=4 b=8, 1/10", M4, 0.1), ("pqcached m=2 b=6, 1/5", M2, 0.2),
           ("pqcached m=2 b=6, 1/10", M2, 0.1), ("sink + window only", None, 0.0)]


class Remembering:
    """The engine's part: sends rows to the sidecar, and keeps sink and window as well."""

    def __init__(self, sequence, model):
        self.sequence, self.model = sequence, model
        # (keys, values) [tokens, kv_heads, dim] by chunk
        self.rows = {layer: [] for layer in model.full_layers}
        # all rows, for the comparison with full attention
        self.prefilled, self.now, self.new = {}, {}, {}
        self.selected = 0  # in the last step, per kv head

    def ingest(self, layer, first, keys, values):
        self.sequence.ingest(layer, first, keys, values)
        self.rows[layer].append((keys, values))

    def end_prefill(self):
        for layer, chunks in self.rows.items():
            keys, values = (np.concatenate(part).transpose(1, 0, 2) for part in zip(*chunks))
            self.prefilled[layer] = np.ascontiguousarray(keys), np.ascontiguousarray(values)
        for index in (M4, M2):
            self.sequence.build_index(index, sink_tokens=SINK)
        self.begin()

    def begin(self):
        self.now, self.new = dict(self.prefilled), {}

    def attend(self, index, ratio):
        """Returns the attention function of this method for TinyLM.decode."""
        selection = None if index is None else Selection(ratio=ratio, sink_tokens=SINK, window_tokens=WINDOW, index=index)

        def attend_full(layer, position, queries, keys, values):
            self.new[layer] = keys[None], values[None]
            all_keys, all_values = (np.concatenate([rows, row[:, None]], axis=1)
                                    for rows, row in zip(self.now[layer], (keys, values)))
            self.now[layer] = all_keys, all_values
            self.selected = position + 1
            if index is None and ratio is None:
                return attend(queries[:, None], all_keys, all_values)[0][:, 0]
            ends = np.r_[0:SINK, position + 1 - WINDOW:position + 1]
            output, lse = attend(queries[:, None], all_keys[:, ends], all_values[:, ends])
            self.selected = 0
            if index is None:
                return output[:, 0]
            attention = self.sequence.attend(layer, position, queries, selection)
            self.selected = attention.selected.count
            attention.merge(np.ascontiguousarray(output[:, 0]), np.ascontiguousarray(lse[:, 0]))
            return attention.output

        return attend_full

    def end_step(self, position):
        self.sequence.append(position, self.new)
        self.new = {}


def ask(model, memory, question, index, ratio):
    """Asks one question, greedily; returns if all of its answer is right, and the seconds per
    token.
    """
    attend_full, logits, right, steps, start = memory.attend(index, ratio), None, True, 0, time.perf_counter()

    def feed(token):
        nonlocal steps
        steps += 1
        position = model.position
        answer = model.decode(token, attend_full)
        memory.end_step(position)
        return answer

    for number, segment in enumerate(question["segments"]):
        for token in segment["input"]:
            logits = feed(token)
        for place, expected in enumerate(segment["answer"]):
            chosen = int(np.argmax(logits))
            right = right and chosen == expected
            if (number, place) != (len(question["segments"]) - 1, len(segment["answer"]) - 1):
                logits = feed(chosen)
    seconds = (time.perf_counter() - start) / steps
    model.rewind()
    memory.sequence.truncate(model.position)
    memory.begin()
    return right, seconds


def ask_all(arguments, cache, model):
    """Returns {(method, task): [(right, seconds, selected)]}, and the seconds of each prefill."""
    outcomes, prefills = {}, []
    for task in arguments.tasks.split(","):
        path = pathlib.Path(arguments.data, "prompts_dev", f"{task}_{arguments.length}.jsonl")
        for line in path.read_text().splitlines()[:arguments.contexts]:
            prompt = json.loads(line)
            with cache.create_sequence() as sequence:
                start = time.perf_counter()
                memory = Remembering(sequence, model)
                model.prefill(prompt["context"], memory.ingest)
                memory.end_prefill()
                prefills.append(time.perf_counter() - start)
                for name, index, ratio in METHODS:
                    for question in prompt["questions"][:arguments.questions]:
                        right, seconds = ask(model, memory, question, index, ratio)
                        outcomes.setdefault((name, task), []).append((right, seconds, memory.selected))
    return outcomes, prefills


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--data", default=HERE.parent, help="folder with model/ and prompts_dev/")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--tasks", default="mq,niah")
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--questions", type=int, default=5)
    arguments = parser.parse_args()

    model = TinyLM(pathlib.Path(arguments.data, "model"))
    group = pqcached.LayerGroup(model.full_layers, model.kv_heads, model.heads, model.dim, model.dim,
                                pqcached.DType.F16, softmax_scale=1.0, rope_layout=pqcached.RopeLayout.NONE)
    with pqcached.Client(arguments.endpoint, client_name="quickstart.py") as client:
        cache = client.open_cache("quickstart.py", model_fingerprint="tinylm in numpy", groups=[group],
                                  capacity_bytes=256 << 20, default_index=Index.flat())
        outcomes, prefills = ask_all(arguments, cache, model)

    tasks = arguments.tasks.split(",")
    print(f"Contexts of {arguments.length} tokens: right answers of all\n{'':24}" + "".join(f"{t:>8}" for t in tasks) +
          f"{'sink+window+selected':>26}{'ms/token':>9}")
    for name, index, ratio in METHODS:
        per_task = [outcomes[name, task] for task in tasks]
        right = "".join(f"{sum(r for r, _, _ in o)}/{len(o)}".rjust(8) for o in per_task)
        every = [outcome for o in per_task for outcome in o]
        ends = (0, 0) if index is None and ratio is None else (SINK, WINDOW)
        print(f"{name:24}{right}{ends[0]:>13}+{ends[1]:>3}+{max(s for _, _, s in every):>6}  "
              f"{1000 * np.median([s for _, s, _ in every]):>9.2f}")
    print(f"prefill, ingest and index builds: {np.mean(prefills):.1f} s per context")


if __name__ == "__main__":
    main()

"""Tutorial: a model of Hugging Face Transformers whose keys and values are in pqcached.

    python3 client/python/tutorial.py BUILD [--model DIRECTORY_OR_GGUF] [--tokens N] [--html FILE]

It attaches the model to a sidecar, compares speed, memory and predictions of several methods, and
writes a page that shows which tokens of a text each layer and head has retrieved.

Editors that know `# %%` show this file as a notebook. It needs torch and transformers, for a GGUF
file gguf and accelerate as well. In this project's tree, tests/quality/pretrained.py --packages
installs them and prints their Python, and --model fetches SmolLM2 and prints its file. Without a
model, one with random weights runs: it shows the calls, but its text and choices mean nothing.
"""

# %% [markdown]
# ## Settings
#
# BUILD is a build folder, whose daemon is started for this run. A daemon that runs already is named
# by `--endpoint`. As a notebook, the program takes its arguments from `NOTEBOOK`.

# %%
from __future__ import annotations

import argparse
import atexit
import ctypes
import dataclasses
import gc
import hashlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers

import pqcached
from pqcached import html
from pqcached.transformers import PqcCache, PqcLayer, attention_forward, register

NOTEBOOK = ["build/release"]
HERE = pathlib.Path(globals().get("__file__", "tutorial.py")).resolve()
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("build", nargs="?", type=pathlib.Path, help="build folder, which has service/pqcached")
parser.add_argument("--endpoint", help="of a daemon that runs, for example unix:///run/pqcached/pqcached.sock")
parser.add_argument("--model", type=pathlib.Path, help="directory or GGUF file; default: random weights")
parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt, at least 1024")
parser.add_argument("--html", type=pathlib.Path, default=pathlib.Path("selected.html"), help="page to write")
options = parser.parse_args(NOTEBOOK if "ipykernel" in sys.modules else None)
if (options.build is None) == (options.endpoint is None):
    parser.error("give either BUILD or --endpoint")
if options.tokens < 1024:
    parser.error("--tokens: must be at least 1024; a tenth of less is hardly more than sink and window")

DECODED = 64  # tokens that each method decodes
SINK, WINDOW = 16, 64  # tokens that are always attended to: the first ones and the last ones
torch.set_num_threads(1)  # one thread on both sides, so that times can be compared
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# Older versions know no other name.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")

# %% [markdown]
# ## The sidecar
#
# In production it is a service of its own (`deploy/`). Here it listens on a unix socket in a
# temporary folder, and ends with this program.


# %%
def start_sidecar(build: pathlib.Path) -> str:
    """Starts a daemon, and returns its endpoint."""
    library = build / "client/libpqcached_client.so.1"
    if library.exists():  # the package finds a library that is loaded; a wheel brings its own one
        ctypes.CDLL(str(library.resolve()))
    folder = tempfile.TemporaryDirectory()
    endpoint, log = f"unix://{folder.name}/socket", pathlib.Path(folder.name, "log")
    with log.open("w") as output:
        daemon = subprocess.Popen([build / "service/pqcached", "--listen", endpoint], stdin=subprocess.DEVNULL,
                                  stdout=output, stderr=output)

    def stop() -> None:
        daemon.terminate()
        daemon.wait()
        folder.cleanup()

    atexit.register(stop)
    while "event=ready" not in log.read_text():
        if daemon.poll() is not None:
            sys.exit(f"the daemon has ended with {daemon.returncode}:\n{log.read_text()}")
        time.sleep(0.01)
    return endpoint


client = pqcached.Client(options.endpoint or start_sidecar(options.build), timeout_ms=60000, thread_count=1)
atexit.register(client.close)

# %% [markdown]
# ## A model and a text
#
# Nothing about the model is special. The text is this project's documents.


# %%
def random_model(text: str) -> Tuple[Any, List[int], List[str]]:
    """A small Llama, the text's tokens and the text of each; words are tokens."""
    texts = re.findall(r"\w+|\s+|[^\w\s]", text)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(texts))}
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(numbers), hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=16384, bos_token_id=None, eos_token_id=None))
    for name, weight in made.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.mul_(3)  # uneven attention, so that it matters which tokens are selected
    return made, [numbers[word] for word in texts], texts


def trained_model(path: pathlib.Path, text: str) -> Tuple[Any, List[int], List[str]]:
    folder, named = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **named)
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named)
    numbers = tokenizer(text, verbose=False)["input_ids"]
    return made, numbers, [tokenizer.decode([number]) for number in numbers]


root = HERE.parents[2]
text = "\n".join((root / name).read_text() for name in ("README.md", "client/README.md", "client/INTEGRATE.md"))
model, numbers, texts = trained_model(options.model, text) if options.model else random_model(text)
model.eval()
if len(numbers) <= options.tokens + DECODED:
    parser.error(f"--tokens: the text has {len(numbers)} tokens, so the prompt at most {len(numbers) - DECODED - 1}")
ids = torch.tensor([numbers[:options.tokens + DECODED + 1]])
prompt = ids[:, :options.tokens]
weights = hashlib.sha256()
for parameter in model.parameters():
    weights.update(parameter.numpy())
print(f"{model.config.num_hidden_layers} layers, {options.tokens} tokens of text, then {DECODED} one by one\n")

# %% [markdown]
# ## Attach
#
# `register()` makes an attention implementation known to Transformers, and a `PqcCache` takes the
# place of its cache. All else stays: `generate` does not know of it. `ratio=1` attends to all
# tokens, so the tokens that it gives are those of the model's own cache.

# %%
register()
model.set_attn_implementation("sdpa")
start = {"input_ids": prompt[:, :128], "attention_mask": torch.ones(1, 128, dtype=torch.long)}
expected = model.generate(**start, max_new_tokens=16, do_sample=False)

model.set_attn_implementation("pqcached")
with PqcCache(client, model.config, selection=pqcached.Selection(ratio=1, window_tokens=WINDOW)) as cache:
    generated = model.generate(**start, max_new_tokens=16, do_sample=False, past_key_values=cache)
print(f"generate() gives the same 16 tokens: {'yes' if torch.equal(generated, expected) else 'no'}\n")

# %% [markdown]
# ## Methods to compare
#
# A selection says how many tokens a layer attends to; an index says how they are found. `flat`
# reads all keys and finds the exact best ones. `pq` reads codes: m=4 b=8 is 4 bytes for each key,
# m=2 b=6 is 2 bytes.

# %%
ALL = pqcached.Selection(ratio=1, sink_tokens=SINK, window_tokens=WINDOW)
TENTH = pqcached.Selection(ratio=0.1, sink_tokens=SINK, window_tokens=WINDOW)
METHODS = {
    "exact": (ALL, pqcached.Index.flat()),
    "flat 1/10": (TENTH, pqcached.Index.flat()),
    "pq m=4 b=8 1/10": (TENTH, pqcached.Index.pq(4, 8)),
    "pq m=2 b=6 1/10": (TENTH, pqcached.Index.pq(2, 6)),
}


def cache_of(method: str) -> PqcCache:
    """A cache that shares prompts with others of the same fingerprint: only the first one computes them.

    Stored prompts keep their indexes. So that the bytes of indexes can be compared, methods with
    different ones share no prompt here.
    """
    selection, index = METHODS[method]
    return PqcCache(client, model.config, selection=selection, index=index, index_tokens=128, wait_for_index=True,
                    model_fingerprint=f"{weights.hexdigest()}, {index}", dtype=torch.float32)


# %% [markdown]
# ## Watch memory, speed and predictions
#
# Every method reads the same text token by token. Its logits show how far it is from the model's
# own cache, and the perplexity how well it predicts the text; that of so few tokens is rough.


# %%
def torch_bytes() -> int:
    """Bytes behind all tensors of this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def forward(cache: Any, tokens: Any) -> Any:
    """Logits of the last token."""
    logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float().numpy().copy()  # a copy, so that torch has no memory of it


@dataclasses.dataclass
class Run:
    logits: Any  # [DECODED, vocabulary]
    ready_seconds: float  # until the prompt and the first token are done, and the index is built
    token_ms: float
    torch_bytes: int  # that the cache holds at the end
    growth: int  # of them, bytes for the tokens after the first one
    row_bytes: int = 0  # in the sidecar
    index_bytes: int = 0

    @property
    def perplexity(self) -> float:
        targets = ids[0, options.tokens + 1:].numpy()
        logits = self.logits.astype(np.float64)
        chosen = np.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - np.logaddexp.reduce(logits, axis=1)
        return float(np.exp(-chosen.mean()))


def run(cache: Any) -> Run:
    before, begin = torch_bytes(), time.perf_counter()
    # The stored part of the prompt is not computed again.
    stored = cache.begin(prompt) if isinstance(cache, PqcCache) else 0
    forward(cache, prompt[:, stored:])
    first, *others = ids[:, options.tokens:-1].split(1, dim=1)
    logits, times = [forward(cache, first)], []
    ready, after_first = time.perf_counter() - begin, torch_bytes()
    for token in others:
        began = time.perf_counter()
        logits.append(forward(cache, token))
        times.append(time.perf_counter() - began)
    end = torch_bytes()
    made = Run(np.stack(logits), ready, statistics.median(times) * 1000, end - before, end - after_first)
    if isinstance(cache, PqcCache):
        sequence = cache.sequences[0]
        assert sequence is not None
        sequence.flush()
        info = sequence.describe()
        made.row_bytes, made.index_bytes = info.row_bytes, info.index_bytes + info.codebook_bytes
    return made


model.set_attn_implementation("sdpa")
runs = {"stock": run(transformers.DynamicCache(config=model.config))}
model.set_attn_implementation("pqcached")
for method in METHODS:
    with cache_of(method) as cache:
        runs[method] = run(cache)

# %% [markdown]
# - *same*: share of positions at which the most likely next token is that of the model's own cache
# - *logit diff*: largest difference of a logit
# - *ready s*: seconds until the first token is decoded; those with an index wait for it. `flat`
#   does not compute the prompt, if the sidecar still has it from `exact`.
# - *ms/token*: median; a text must be long before reading less of it is faster
# - *torch*: bytes that the cache holds in torch; *growth*: those of the tokens after the first
# - *rows*, *index*: bytes in the sidecar; centroids are most of the index while a text is short

# %%
print(f"{'cache':17}{'same':>6}{'logit diff':>12}{'perplexity':>12}{'ready s':>9}{'ms/token':>10}{'torch':>13}{'growth':>11}"
      f"{'rows':>13}{'index':>11}")
for name, one in runs.items():
    difference = np.abs(one.logits - runs["stock"].logits).max()
    same = (one.logits.argmax(1) == runs["stock"].logits.argmax(1)).mean()
    print(f"{name:17}{same:6.2f}{difference:12.1e}{one.perplexity:12.3f}{one.ready_seconds:9.2f}{one.token_ms:10.2f}"
          f"{one.torch_bytes:13,}{one.growth:11,}{one.row_bytes:13,}{one.index_bytes:11,}")

# %% [markdown]
# ## Look at the selected tokens
#
# An attention implementation of our own keeps the queries of the last decoded token, and passes
# everything on. With a layer's query, `Sequence.topk` gives the positions that an index selects. A
# decoding step makes the same selection, but does not report it.

# %%
queries: Dict[int, Any] = {}


def watched(module: Any, query: Any, *arguments: Any, **named: Any) -> Tuple[Any, Optional[Any]]:
    if query.shape[2] == 1:
        queries[module.layer_idx] = query[0, :, 0].clone()  # [query_heads, head_dim]
    return attention_forward(module, query, *arguments, **named)


register("watched")  # with the package's attention, which the next line replaces, and its mask
transformers.AttentionInterface.register("watched", watched)
model.set_attn_implementation("watched")

Positions = Dict[Tuple[int, int], Any]  # (layer, kv head) -> positions


def selected_at(method: str) -> Tuple[Positions, Positions]:
    """Positions that the method and an exact search select for the token behind the prompt."""
    selection, index = METHODS[method]
    with cache_of(method) as cache:
        forward(cache, prompt[:, cache.begin(prompt):])
        forward(cache, ids[:, options.tokens:options.tokens + 1])
        sequence = cache.sequences[0]
        assert sequence is not None
        sequence.flush()  # now the token's own row is stored, too
        found: Tuple[Positions, Positions] = ({}, {})
        for layer, query in sorted(queries.items()):
            if not isinstance(cache.layers[layer], PqcLayer):
                continue  # a layer of another kind, whose rows are not in the sidecar
            for positions, searched in zip(found, (index, pqcached.Index.flat())):
                chosen = sequence.topk(layer, options.tokens, query, dataclasses.replace(selection, index=searched))
                assert chosen.positions is not None
                positions.update({(layer, head): row for head, row in enumerate(chosen.positions)})
    return found


print()
for method in ("pq m=2 b=6 1/10", "pq m=4 b=8 1/10"):
    selected, best = selected_at(method)
    shares = [np.isin(best[place], selected[place]).mean() for place in best]
    print(f"{method} finds {np.mean(shares):.3f} of the exact best tokens, {min(shares):.3f} at the worst head")

# %% [markdown]
# The page has the text once for each layer and head, and marks the tokens of the last method: those
# that were found, those that an exact search finds and the index has missed, and sink and window.

# %%
count = options.tokens + 1
html.write_selected(options.html, texts[:count], selected, best, always=[*range(SINK), *range(count - WINDOW, count)],
                    title=f"Tokens that {method} selects for {texts[options.tokens]!r}")
print(f"page: {options.html.resolve()}")

"""Random models of Transformers, and the same passes with the engine's own cache and with ours.

Import it first: it starts the program again in the environment of tests/quality/pretrained.py, if this Python has no transformers.
"""

import copy
import importlib.util
import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("client/python", "quality", ".")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pretrained  # noqa: E402
from skip import skip_unless  # noqa: E402


def is_installed():
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


if not is_installed() and pretrained.is_installed():
    pretrained.run_in_environment()
needs_transformers = skip_unless("transformers", is_installed(), "torch and transformers are not installed: tests/quality/pretrained.py --packages")

from daemon import DaemonTest  # noqa: E402

import pqcached  # noqa: E402
from pqcached import Index, Selection  # noqa: E402

if is_installed():
    import torch
    import transformers
    import pqcached.transformers as hf

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
else:
    torch = transformers = hf = None

VOCABULARY = 97
# All candidates of an index: what ratio=1 selects without one.
ALL_BY_INDEX = {"retrieved_tokens": 1 << 20}
TOLERANCE = 1e-4  # of logits, in float32


def select(sink=4, window=8, **budget):
    return Selection(sink_tokens=sink, window_tokens=window, **(budget or {"ratio": 1.0}))


def spread(model, factor=3.0):
    """Makes attention uneven: otherwise it hardly matters which tokens are attended to."""
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.mul_(factor)
        if name.endswith("sinks"):
            weight.copy_(torch.linspace(-1, 2, weight.numel()))
    return model.eval()


def random_model(config, dtype=None):
    torch.manual_seed(0)
    model = spread(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    return model if dtype is None else model.to(dtype)


SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "max_position_embeddings": 16384, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": VOCABULARY}  # so that no token ends a generation


def llama(layers=3, **more):
    return random_model(transformers.LlamaConfig(num_hidden_layers=layers, **{**SHAPE, **more}))


def with_implementation(model, name):
    """Another model with the same weights and a configuration of its own."""
    made = copy.deepcopy(model)
    made.set_attn_implementation(name)
    return made


def tokens(*shape, seed=1):
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def torch_bytes(*roots):
    """Bytes of the memory behind all tensors that are reachable from objects of this package and of Transformers."""
    seen, memory, waiting = set(), {}, list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
        elif type(one).__module__.split(".")[0] in ("pqcached", "transformers") and not isinstance(one, transformers.PretrainedConfig):
            waiting += getattr(one, "__dict__", {}).values()
            waiting += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    return sum(memory.values())


class HfTest(DaemonTest):
    """A model with the engine's attention, `stock`, and one with ours."""

    stock_implementation = "sdpa"

    @classmethod
    def make_model(cls):
        return llama()

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        hf.register()
        made = cls.make_model()
        cls.stock, cls.ours = with_implementation(made, cls.stock_implementation), with_implementation(made, hf.NAME)

    def pqc_cache(self, selection=None, model=None, **named):
        cache = hf.PqcCache(self.client, (model or self.ours).config, selection=selection or select(), **named)
        self.addCleanup(cache.close)
        return cache

    def stock_cache(self):
        return transformers.DynamicCache(config=self.stock.config)

    @staticmethod
    def run_pass(model, cache, ids, mask=None):
        """Logits of a pass, [batch, tokens, vocabulary]."""
        named = {} if mask is None else {"attention_mask": mask}
        if mask is not None:  # as generate() does
            positions = mask.long().cumsum(-1).sub(1).clamp(min=0)
            named["position_ids"] = positions[:, -ids.shape[1]:]
        return model(ids, past_key_values=cache, use_cache=True, **named).logits.float()

    def passes(self, model, cache, chunks, mask=None):
        """Logits of each pass."""
        result, end = [], cache.get_seq_length()
        for chunk in chunks:
            end += chunk.shape[1]
            result.append(self.run_pass(model, cache, chunk, None if mask is None else mask[:, :end]))
        return result

    def assert_equal(self, got, expected, tolerance=TOLERANCE, mask=None):
        """That logits are equal, those of padding left out. Returns the largest difference."""
        largest = 0.0
        for place, (own, other) in enumerate(zip(got, expected, strict=True)):
            difference = (own - other).abs()
            if mask is not None and place == 0:
                difference = difference * mask[:, :own.shape[1], None]
            worst = float(difference.max())
            self.assertLessEqual(worst, tolerance, f"pass {place} of {len(expected)}")
            largest = max(largest, worst)
        return largest

    def compare(self, chunks, cache=None, mask=None, tolerance=TOLERANCE):
        """Runs the same passes with both, and returns our cache."""
        cache = cache or self.pqc_cache()
        expected = self.passes(self.stock, self.stock_cache(), chunks, mask)
        self.largest = self.assert_equal(self.passes(self.ours, cache, chunks, mask), expected, tolerance, mask)
        return cache


def one_by_one(ids):
    return list(ids.split(1, dim=1))

"""Trained models in Transformers: SmolLM2, Gemma 3, and the test engine's small model with rotary keys."""

import json
import sys

import models  # first
from models import TESTS

import pretrained

if models.is_installed():
    import torch
    import transformers

sys.path.append(str(TESTS / "llama"))
import tinylm_gguf  # noqa: E402

SMOLLM2 = pretrained.cache() / pretrained.FILE
GEMMA = pretrained.cache() / pretrained.GEMMA_FILE
# A text of about 20,000 tokens that every clone has.
TEXTS = ("README.md", "client/README.md", "client/INTEGRATE.md", "service/README.md", "tests/quality/FINDINGS.md", "kvstore/README.md")


def load(file):
    """A model of a GGUF file, in float32, and its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), tokenizer


def text_tokens(tokenizer, count):
    """The first tokens of the text, [1, count]."""
    text = "\n".join((TESTS.parent / name).read_text() for name in TEXTS)
    return torch.tensor([tokenizer(text, verbose=False)["input_ids"][:count]])


def tiny_rope():
    """The test engine's model as LlamaForCausalLM."""
    stored = json.loads((tinylm_gguf.FOLDER / "model/config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    rope = {"rope_theta": stored["rope_theta"], "rope_type": "default"}
    config = transformers.LlamaConfig(**{name: stored[name] for name in names}, rope_parameters=rope, rope_theta=stored["rope_theta"])
    model = transformers.LlamaForCausalLM(config)
    weights = tinylm_gguf.read_safetensors(tinylm_gguf.FOLDER / "model/model.safetensors")
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(each) for name, each in weights.items()}, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(task, length, lines=None):
    """For each line: its context, and for each question the inputs of its segments and the answers of the reference."""
    prompts = lines_of(tinylm_gguf.FOLDER / f"prompts_dev/{task}_{length}.jsonl")
    references = lines_of(tinylm_gguf.FOLDER / f"reference_dev/{task}_{length}.ref.jsonl")
    for line, prompt in enumerate(prompts[:lines]):
        asked = [([segment["input"] for segment in prompt["questions"][each["question"]]["segments"]], each["outputs"])
                 for each in references if each["line"] == line]
        yield prompt["context"], asked


def answer(model, cache, segments, lengths):
    """Greedy answers to the segments of a question; the cache has the context, and is rolled back to it."""
    begin, answers = cache.get_seq_length(), []
    for segment, length in zip(segments, lengths):
        given, tokens = torch.tensor([segment]), []
        for _ in range(length):
            logits = model(given, past_key_values=cache, use_cache=True).logits
            given = logits[:, -1:].argmax(-1)
            tokens.append(int(given))
        model(given, past_key_values=cache, use_cache=True)  # the last token of an answer is part of the context, too
        answers.append(tokens)
    cache.crop(begin - cache.get_seq_length())
    return answers

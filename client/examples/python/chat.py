"""Two turns of a conversation with complete attention. Usage: chat.py ENDPOINT CONFIG, where CONFIG
is a model's config.json. The second turn computes only what the first has not stored."""

import sys

import numpy as np
import pqcached

SELECTION = pqcached.Selection(ratio=0.1, sink_tokens=16, window_tokens=64)


def project(tokens, layer, heads, dim):
    """Stands for a model: returns the rows [tokens, heads, dim] of these tokens in a layer."""
    token, column = np.asarray(tokens)[:, None], np.arange(heads * dim)[None]
    return np.sin((token * 31 + column * 7 + layer) % 997).astype(np.float32).reshape(-1, heads, dim)


def answer(cache, group, prompt, length):
    """Prefills what is not stored of a prompt, and returns it with `length` more tokens."""
    tokens, kv, q = list(prompt), (group.kv_heads, group.key_dim), (group.query_heads, group.key_dim)
    with cache.create_sequence(prompt, live_index=True, sink_tokens=16) as sequence, sequence.decoder(SELECTION) as decoder:
        stored = min(sequence.shared_tokens, len(prompt) - 1)
        sequence.truncate(stored)  # the last token of a prompt is decoded, even when it is stored
        for layer in group.layers:
            decoder.prefill(layer, project(prompt[stored:-1], layer, *kv), project(prompt[stored:-1], layer, *kv))
        for _ in range(length):
            for layer in group.layers:
                query, row = project(tokens[-1:], layer, *q)[0], project(tokens[-1:], layer, *kv)[0]
                attention = decoder.decode(layer, query, row, row, names=pqcached.TokenNames(len(tokens) - 1, tokens[-1:]))
            tokens.append((tokens[-1] * 5 + 1) % 997)  # a model samples it from its logits
        sequence.flush()  # else the end of the sequence discards rows that are still being sent
    print(f"{stored} of {len(prompt)} tokens were stored; attention[0] = {attention[0, 0]:.3f}")
    return tokens


with pqcached.Client(sys.argv[1]) as client:
    groups = pqcached.groups_of(sys.argv[2])
    with client.open_cache("chat", model_fingerprint="chat-1", groups=groups, capacity_bytes=64 << 20) as chat:
        first = answer(chat, groups[0], [i * i % 997 for i in range(600)], 60)
        answer(chat, groups[0], first + [i * i % 997 for i in range(100)], 60)

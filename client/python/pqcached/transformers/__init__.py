"""Attention and cache "pqcached" for unmodified models of Hugging Face Transformers: the keys and
values of layers with full attention are in the sidecar, and decoding attends to a selection of them.

    import pqcached
    from pqcached.transformers import PqcCache, register

    register()
    model.set_attn_implementation("pqcached")
    with pqcached.Client(endpoint) as client, PqcCache(
            client, model.config, index=pqcached.Index.pq(4, 8),
            selection=pqcached.Selection(ratio=0.1, sink_tokens=16, window_tokens=64, rerank_factor=2,
                                         tail_estimate=True)) as cache:
        model.generate(**inputs, past_key_values=cache)

rerank_factor and tail_estimate take about a twentieth of the time of a token, and bring the result
near that of full attention.

Each row of a batch is a sequence of its own; the left padding of a row is not stored. A pass computes
the attention of its tokens in one of three ways:

    first pass       exact (SDPA); the rows are ingested layer by layer
    1 to 8 tokens    one step for the batch: sink, selected tokens and window (Step.decode), no RPC
    more tokens      exact: the new tokens in torch, the stored ones by Sequence.attend_range

torch keeps no rows, whatever the length. A model that has another cache, or none, computes exact
attention under this implementation, too.

Works with prefill in chunks, further turns, assisted decoding and roll-back (crop), beam search,
learned attention sinks, softcap, and layers of other kinds beside those with full attention, which
stay the engine's. Refused, by the name of the argument: static caches, continuous batching,
torch.compile, cross attention, layers that share keys and values, padding that is not on the left,
masks that are not causal, dropout. Needs Transformers 4.57, or 5.4 or later.
"""

from ._cache import PqcCache
from ._hooks import NAME, attention_forward, causal_mask, register
from ._layer import PqcLayer

__all__ = ["NAME", "PqcCache", "PqcLayer", "attention_forward", "causal_mask", "register"]

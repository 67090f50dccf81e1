"""Exact attention in torch that also gives the log-sum-exp, which SDPA does not.

Serves what is merged with stored tokens, and layers with learned sinks or a softcap.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

BLOCK = 256  # query tokens whose logits are in memory at once


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, *,
              softcap: Optional[float] = None, visible: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns output [tokens, query_heads, value_dim] and lse [tokens, query_heads], float32.

    query [query_heads, tokens, dim]; key, value [kv_heads, keys, dim]. visible: bool [tokens, keys];
    None: the queries are the last tokens, and causal. A query that sees no key gets 0 and -inf.
    """
    heads, tokens, dim = query.shape
    kv_heads, count = key.shape[:2]
    grouped = query.float().reshape(kv_heads, heads // kv_heads, tokens, dim)
    keys, values = key.float().transpose(1, 2).unsqueeze(1), value.float().unsqueeze(1)
    output = torch.empty(tokens, heads, value.shape[-1], device=query.device)
    lse = torch.empty(tokens, heads, device=query.device)
    for begin in range(0, tokens, BLOCK):
        end = min(begin + BLOCK, tokens)
        seen = count if visible is not None else count - tokens + end
        logits = torch.matmul(grouped[:, :, begin:end], keys[..., :seen]) * scaling
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if visible is None:
            hidden = torch.ones(end - begin, seen, dtype=torch.bool, device=query.device).triu(count - tokens + begin + 1)
        else:
            hidden = ~visible[begin:end]
        logits.masked_fill_(hidden, float("-inf"))
        sums = torch.logsumexp(logits, -1)
        # A query without keys has no weights.
        weights = torch.exp(logits - sums.unsqueeze(-1)).nan_to_num_(0.0)
        part = torch.matmul(weights, values[:, :, :seen])
        output[begin:end] = part.permute(2, 0, 1, 3).reshape(end - begin, heads, -1)
        lse[begin:end] = sums.permute(2, 0, 1).reshape(end - begin, heads)
    return output, lse


def with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: Optional[torch.Tensor]) -> torch.Tensor:
    """Returns the output with the learned sinks [query_heads] in the denominators of the softmax."""
    if sinks is None:
        return output
    return output * torch.sigmoid(lse - sinks.float().to(lse.device)).unsqueeze(-1)


def _visible(mask: Optional[torch.Tensor], row: int, keys: int) -> Optional[torch.Tensor]:
    if mask is None:
        return None
    part = mask[min(row, mask.shape[0] - 1), 0, :, :keys]
    return part if part.dtype == torch.bool else part == 0


def batch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor],
                    scaling: float, softcap: Optional[float], sinks: Optional[torch.Tensor]) -> torch.Tensor:
    """Returns the attention of a batch as an attention function of Transformers does, [batch, tokens,
    query_heads, value_dim]. mask: of sdpa_mask; None = causal.
    """
    rows = []
    for row in range(query.shape[0]):
        visible = _visible(mask, row, key.shape[2])
        output, lse = attention(query[row], key[row], value[row], scaling, softcap=softcap, visible=visible)
        rows.append(with_sinks(output, lse, sinks))
    return torch.stack(rows).to(query.dtype)


def sdpa(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor],
         **arguments: Any) -> torch.Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(module, query, key, value, mask, **arguments)
    return output

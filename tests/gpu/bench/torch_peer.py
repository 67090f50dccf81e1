"""What PyTorch needs for the same work as a kernel of ours, timed when asked: torch_peer.py select|sdpa TOKENS.

Says "ready", or why it cannot; then for each line on stdin the seconds of device time of one piece of work.
8 kv heads, 32 query heads, head dim 128, batch 1; select: m=2 b=6, k = 2048.
"""

import sys

KV_HEADS, GROUP, DIM = 8, 4, 128


def make_select(torch, tokens):
    m, bits, k = 2, 6, 2048
    codes = torch.randint(0, 1 << bits, (KV_HEADS, m, tokens), device="cuda")
    tables = torch.randn(KV_HEADS, GROUP, m, 1 << bits, device="cuda", dtype=torch.float16)
    index = codes[:, None].expand(KV_HEADS, GROUP, m, tokens)

    def work():
        logits = torch.gather(tables, 3, index).sum(2)
        return torch.softmax(logits.float(), -1).sum(1).topk(k, -1).indices

    return work


def make_sdpa(torch, tokens):
    query = torch.randn(1, KV_HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.float16)
    key = torch.randn(1, KV_HEADS, tokens, DIM, device="cuda", dtype=torch.float16)
    value = torch.randn_like(key)
    attention = torch.nn.functional.scaled_dot_product_attention

    def grouped():
        return attention(query, key, value, enable_gqa=True)

    # The heads of a group as queries of one kv head: every backend takes that, and reads each key once.
    folded = query.view(1, KV_HEADS, GROUP, DIM)

    def as_queries():
        return attention(folded, key, value)

    try:
        grouped()
    except TypeError:  # older versions do not know enable_gqa
        return as_queries
    return min((grouped, as_queries), key=lambda work: seconds_of(torch, work))


def seconds_of(torch, work, repetitions=10):
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repetitions):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / repetitions


def main():
    kind, tokens = sys.argv[1], int(sys.argv[2])
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed", flush=True)
        return
    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA device", flush=True)
        return
    with torch.inference_mode():
        work = {"select": make_select, "sdpa": make_sdpa}[kind](torch, tokens)
        work()
        print("ready", flush=True)
        for _ in sys.stdin:
            print(seconds_of(torch, work), flush=True)


if __name__ == "__main__":
    main()

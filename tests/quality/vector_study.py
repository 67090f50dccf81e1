"""Methods on problems: what they find, what they miss, what they read."""

import math
import time

import numpy as np

from methods import ELEMENT_BYTES, SINK, WINDOW, Step

BUDGETS = ["1/5", "1/10", "1/20", "1024", "256"]


def attended_tokens(budget, tokens):
    """All that a step attends to, sink and window included."""
    return math.floor(tokens / int(budget[2:])) if budget.startswith("1/") else min(int(budget), tokens)


def select_count(budget, tokens):
    ends = min(tokens, SINK + WINDOW)
    return max(0, min(attended_tokens(budget, tokens), tokens) - ends)


class Exact:
    """What full attention does in one step: the reference of all metrics. [kv_heads, group, tokens]"""

    def __init__(self, problem, turn, number):
        query, position = turn.queries[number], int(turn.positions[number])
        seen = position + 1
        keys = np.concatenate([problem.keys, turn.keys], axis=1)[:, :seen] if turn.keys.shape[1] else problem.keys[:, :seen]
        self.values = (np.concatenate([problem.values, turn.values], axis=1)[:, :seen]
                       if turn.values.shape[1] else problem.values[:, :seen])
        grouped = query.reshape(problem.kv_heads, -1, problem.dim) * problem.scale
        logits = np.matmul(grouped, keys.transpose(0, 2, 1)).astype(np.float64)
        self.logits = logits
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        self.p = weights / weights.sum(axis=2, keepdims=True)
        self.output = np.matmul(self.p, self.values)
        shares = self.p.sum(axis=1)
        end = seen - WINDOW
        self.step = Step(turn, number, query, position, end, shares)
        middle = self.p[:, :, SINK:end]
        total = middle.sum(axis=2, keepdims=True)
        q = middle / np.maximum(total, 1e-300)
        self.entropy = -(q * np.log(np.maximum(q, 1e-300))).sum(axis=2).mean(axis=1)  # [kv_heads], of the middle
        self.middle_mass = total[:, :, 0].mean(axis=1)
        self.best = {}

    def oracle(self, count):
        """Per kv head what exact top-k covers: the threshold of the group's shares, of each head's, and mass."""
        if count not in self.best:
            middle = slice(SINK, self.step.end)
            shares, p = self.step.shares[:, middle], self.p[:, :, middle]
            size = shares.shape[1]
            order = np.argpartition(-shares, count - 1, axis=1)[:, :count]
            threshold = np.take_along_axis(shares, order, axis=1).min(axis=1)
            own = np.partition(p, size - count, axis=2)[:, :, size - count]
            mass = np.take_along_axis(shares, order, axis=1).sum(axis=1) / p.shape[1]
            self.best[count] = threshold, own, mass
        return self.best[count]


def measure(exact, positions, count, target):
    """Metrics per kv head of one choice; lists [kv_heads]."""
    step, p, group = exact.step, exact.p, exact.p.shape[1]
    threshold, own, best_mass = exact.oracle(count)
    ends = [*range(min(SINK, step.position + 1)), *range(max(SINK, step.end), step.position + 1)]
    rows = []
    for head in range(p.shape[0]):
        chosen = np.asarray(positions[head], int)
        attended = np.concatenate([chosen, ends])
        if len(np.unique(attended)) != len(attended) or chosen.min() < SINK or chosen.max() >= step.end:
            raise AssertionError("a choice has a token twice, or one outside the middle")
        # Ties count as found: a token that is as good as the oracle's last one.
        slack = 1 - 1e-6
        ends_mass = p[head][:, ends].sum() / group
        chosen_mass = step.shares[head, chosen].sum() / group
        inside = exact.logits[head][:, attended]
        weights = np.exp(inside - inside.max(axis=1, keepdims=True))
        output = weights / weights.sum(axis=1, keepdims=True) @ exact.values[head][attended]
        error = np.linalg.norm(output - exact.output[head], axis=1) / np.linalg.norm(exact.output[head], axis=1)
        rows.append({
            "recall": min(1.0, (step.shares[head, chosen] >= threshold[head] * slack).sum() / count),
            "recall_per_query_head": float(np.minimum(1, (p[head][:, chosen] >= own[head][:, None] * slack).sum(axis=1)
                                                      / count).mean()),
            "mass": ends_mass + chosen_mass,
            "mass_vs_oracle": (ends_mass + chosen_mass) / (ends_mass + best_mass[head]),
            "middle_mass_vs_oracle": chosen_mass / max(best_mass[head], 1e-12),
            "output_error": float(error.mean()),
            "effective_tokens": math.exp(exact.entropy[head]),
            "middle_mass": float(exact.middle_mass[head]),
            "found": None if target is None else float(target[head] in attended),
        })
    return rows


def study(problem, methods, budgets):
    """Rows, one per method, budget and kv head, averaged over all steps of the problem."""
    for method in methods:
        method.prepare(problem)
    collected = {}
    for turn in problem.turns:
        for method in methods:
            method.begin_turn(turn)
        for number in range(len(turn.queries)):
            exact = Exact(problem, turn, number)
            target = None if turn.targets is None else turn.targets[number]
            seen = exact.step.position + 1
            for budget in budgets:
                count = select_count(budget, seen)
                if count == 0 or count >= exact.step.end - SINK:
                    continue
                for method in methods:
                    start = time.perf_counter()
                    positions = method.choose(exact.step, count)
                    seconds = time.perf_counter() - start
                    took = np.asarray(positions).shape[1]
                    row_bytes = 2 * problem.dim * ELEMENT_BYTES
                    costs = {
                        "attended": SINK + WINDOW + took, "select_ms": 1e3 * seconds,
                        "scanned": method.scanned(exact.step),
                        "bytes": method.scan_bytes(exact.step) + (SINK + WINDOW + took) * row_bytes,
                    }
                    for head, row in enumerate(measure(exact, positions, count, target)):
                        collected.setdefault((method, budget, head), []).append({**row, **costs})
        for method in methods:
            method.end_turn()
    return [summary(problem, method, budget, head, rows) for (method, budget, head), rows in collected.items()]


def summary(problem, method, budget, head, rows):
    mean = {}
    for key in rows[0]:
        values = [row[key] for row in rows if row[key] is not None]
        mean[key] = float(np.mean(values)) if values else None
    return {"problem": problem.name, **problem.facts, "kv_head": head, "method": method.name, "budget": budget,
            "steps": len(rows), **mean, "build_seconds": method.build_seconds,
            "index_bytes": method.index_bytes / problem.kv_heads,
            "index_over_keys": method.index_bytes / problem.kv_heads / (problem.tokens * problem.dim * ELEMENT_BYTES)}

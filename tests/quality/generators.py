"""Keys and queries with known statistics, for what one trained model cannot show.

The recipe of one kv head. Content of a token = common mean + coefficients of a few *features* + noise. Coefficients
have exponential tails, so that softmax over them is a power law of rank; a *topic* adds to them for a run of tokens.
Keys are the content turned by RoPE. A query looks for two features; its length is set by bisection so that the
attention over the middle has the entropy that was asked for. Everything is deterministic by seed.
"""

import dataclasses

import numpy as np

from problems import Problem, Turn, stored

FEATURES, TOPICS, SINKS, WINDOW = 24, 48, 4, 64


@dataclasses.dataclass(frozen=True)
class Setting:
    tokens: int = 16384
    steps: int = 16
    kv_heads: int = 2
    group: int = 4
    dim: int = 128
    rope: str = "half"  # none, half (pairs i, i + dim / 2), interleaved (pairs 2 i, 2 i + 1)
    theta: float = 5e5
    effective_tokens: float = 64  # exp(entropy) of attention over the middle
    run_tokens: int = 32  # mean length of a topic's run; 1 = none
    outliers: float = 0  # added to four slow channels, in standard deviations of a channel
    sinks: bool = True  # the first tokens attract every query
    distance: float = 0  # of the queries from the keys (Mahalanobis); 0 = as it comes
    drift: float = 0  # 0..1: how foreign the features of the rows after the prefill are
    generated: int = 0  # rows after the prefill, which the queries then look for
    rebuilt: bool = False  # they stand in the prefill, as after a rebuild of the index
    theme_tokens: int = 0  # so often features, topics and mean of the prefill are replaced; 0 = never
    distinct: int = 0  # contents that repeat, as in a repeated haystack; 0 = all differ
    needle_margin: float = None  # one key per query this many standard deviations above the largest logit
    seed: int = 1


def rotated(x, positions, layout, theta):
    """x [tokens, dim] turned by RoPE at the given positions."""
    if layout == "none":
        return x
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angle), np.sin(angle)
    a, b = (x[:, :half], x[:, half:]) if layout == "half" else (x[:, 0::2], x[:, 1::2])
    out = np.empty_like(x)
    first, second = (slice(None, half), slice(half, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    out[:, first], out[:, second] = a * c - b * s, b * c + a * s
    return out


def slowness(setting):
    """Per channel 0 (turns fastest) .. 1 (slowest)."""
    half = setting.dim // 2
    rank = np.arange(half) / (half - 1)
    return np.concatenate([rank, rank]) if setting.rope != "interleaved" else np.repeat(rank, 2)


def orthonormal(random, count, weights):
    return np.linalg.qr((random.standard_normal((count, len(weights))) * weights).T)[0].T


def softmax_entropy(logits):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return float(-(p * np.log(np.maximum(p, 1e-30))).sum())


def bisect(function, target, low, high, steps=40):
    """x with function(x) = target, for a function that falls with x; geometric."""
    for _ in range(steps):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if function(middle) > target else (low, middle)
    return np.sqrt(low * high)


class Head:
    """One kv head: contents, then keys, then queries."""

    def __init__(self, setting, random):
        self.setting, self.random = setting, random
        self.weights = 0.3 + 1.7 * slowness(setting)  # as in trained models, meaning sits in slow channels
        self.features = orthonormal(random, FEATURES, self.weights)
        foreign = orthonormal(random, FEATURES, self.weights)
        g = setting.drift
        self.later_features = np.sqrt(1 - g * g) * self.features + g * foreign
        self.mean = random.standard_normal(setting.dim) * 0.3
        self.mean_shift = g * random.standard_normal(setting.dim) * 0.3
        self.topics = random.laplace(size=(TOPICS, FEATURES)) * 0.7

    def contents(self):
        """Of the prefill, theme after theme. A query looks for features of any of them."""
        s = self.setting
        if not s.theme_tokens:
            return self.content(s.tokens, self.features, self.mean)
        self.themes, parts = [], []
        for first in range(0, s.tokens, s.theme_tokens):
            self.features = orthonormal(self.random, FEATURES, self.weights)
            self.topics = self.random.laplace(size=(TOPICS, FEATURES)) * 0.7
            mean = self.random.standard_normal(s.dim) * 0.3
            parts.append(self.content(min(s.theme_tokens, s.tokens - first), self.features, mean))
            self.themes.append(self.features)
        return np.concatenate(parts)

    def content(self, count, features, mean):
        s, r = self.setting, self.random
        coefficients = r.laplace(size=(count, FEATURES)) / np.sqrt(1 + np.arange(FEATURES) / 4)
        if s.run_tokens > 1:
            lengths = r.integers(s.run_tokens // 2, 2 * s.run_tokens, size=2 * count // s.run_tokens + 2)
            topic = np.repeat(r.integers(TOPICS, size=len(lengths)), lengths)[:count]
            coefficients = coefficients + self.topics[np.resize(topic, count)]
        content = mean + coefficients @ features + 0.25 * r.standard_normal((count, s.dim))
        slow = np.argsort(-slowness(s), kind="stable")[:4]
        content[:, slow] += s.outliers * 0.4 * np.array([1, -1, 1, -1])
        return content

    def keys(self):
        s = self.setting
        content = self.contents()
        if s.distinct:
            content = content[np.arange(s.tokens) % s.distinct]
        later = self.content(s.generated, self.later_features, self.mean + self.mean_shift)
        keys = rotated(np.concatenate([content, later]), np.arange(s.tokens + s.generated), s.rope, s.theta)
        self.attraction = orthonormal(self.random, 1, slowness(s) ** 8)[0]
        if s.sinks:
            keys[:SINKS] = 6 * self.attraction + 0.1 * keys[:SINKS]
        return keys

    def query_group(self, keys, position):
        """[group, dim], turned, of the asked entropy over the middle."""
        s, r = self.setting, self.random
        features = self.later_features if s.generated else self.features
        if s.theme_tokens:
            features = self.themes[r.integers(len(self.themes))]
        base = r.choice([-1, 1], 2) @ features[r.choice(FEATURES, 2, replace=False)] / np.sqrt(2)
        out = []
        for _ in range(s.group):
            direction = base + 0.25 * orthonormal(r, 1, self.weights)[0] + (0.15 * self.attraction if s.sinks else 0)
            query = rotated(direction[None], np.array([position]), s.rope, s.theta)[0]
            raw = keys[SINKS:position + 1 - WINDOW] @ query / np.sqrt(s.dim)
            length = bisect(lambda x: softmax_entropy(raw * x), np.log(s.effective_tokens), 1e-2, 1e4)
            out.append(query * length)
        return np.array(out)


def mahalanobis(queries, keys):
    """Mean distance of queries [n, dim] from the distribution of the keys."""
    centred = keys - keys.mean(axis=0)
    inverse = np.linalg.inv(centred.T @ centred / len(keys) + 1e-6 * np.eye(keys.shape[1]))
    away = queries - keys.mean(axis=0)
    return float(np.sqrt(np.einsum("nd,de,ne->n", away, inverse, away)).mean())


def moved_away(queries, keys, target):
    """Adds to all queries what keys vary least along, until their mean distance is the target."""
    centred = keys - keys.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    away = vectors[:, :16].sum(axis=1) / 4
    if mahalanobis(queries, keys) >= target:
        return queries
    amount = bisect(lambda x: -mahalanobis(queries + x * away, keys), -target, 1e-3, 1e4)
    return queries + amount * away


def generate(name, setting):
    random = np.random.default_rng(setting.seed)
    s, heads = setting, [Head(setting, random) for _ in range(setting.kv_heads)]
    total = s.tokens + s.generated
    keys = np.array([head.keys() for head in heads])
    values = random.standard_normal(keys.shape) + random.standard_normal((s.kv_heads, TOPICS, s.dim))[
        :, np.arange(total) // 32 % TOPICS]
    positions = np.full(s.steps, total - 1)  # every query is that of the last stored token
    queries = np.array([[head.query_group(keys[h], position) for h, head in enumerate(heads)]
                        for position in positions])  # [steps, kv_heads, group, dim]
    distances = []
    for h in range(s.kv_heads):
        if s.distance:
            flat = queries[:, h].reshape(-1, s.dim)
            queries[:, h] = moved_away(flat, keys[h], s.distance).reshape(queries[:, h].shape)
        distances.append(mahalanobis(queries[:, h].reshape(-1, s.dim), keys[h]))
    targets = None
    if s.needle_margin is not None:
        targets = plant(random, s, keys, queries)
    keys, values = stored(keys), stored(values)
    facts = {"source": "generated", "context": s.seed, "measured_distance": round(float(np.mean(distances)), 2),
             **{field.name: getattr(s, field.name) for field in dataclasses.fields(s)}}
    prefill = total if s.rebuilt else s.tokens
    turn = Turn(keys[:, prefill:], values[:, prefill:],
                queries.reshape(s.steps, -1, s.dim).astype(np.float32), positions, targets)
    return Problem(name, facts, np.ascontiguousarray(keys[:, :prefill]), np.ascontiguousarray(values[:, :prefill]),
                   [turn], scale=1 / np.sqrt(s.dim))


def plant(random, s, keys, queries):
    """Moves one key per query along the group's mean query, to the margin above all other logits; returns where."""
    places = random.permutation(np.arange(256, s.tokens - 256))[:s.steps * s.kv_heads].reshape(s.steps, s.kv_heads)
    for step in range(s.steps):
        for h in range(s.kv_heads):
            query, place = queries[step, h].mean(axis=0), places[step, h]
            logits = keys[h] @ query
            background = np.delete(logits, [*range(SINKS), *places[:, h]])
            wanted = background.max() + s.needle_margin * background.std()
            keys[h, place] += query * (wanted - logits[place]) / (query @ query)
    return places

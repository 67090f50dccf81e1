"""Paired differences of two methods over the same questions, with a 95 % interval.

Questions of one context share it, so they are no independent samples: the interval is that of the mean over clustered
differences (sandwich variance over contexts, with the usual factor for few clusters).
"""

import collections
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Difference:
    mean: float
    half_width: float  # of the 95 % interval
    question_count: int
    context_count: int


def paired_difference(outcomes, method, against):
    """outcomes: dicts with task, length, context, question, method, right. Mean of right(method) - right(against)."""
    right = {}
    for outcome in outcomes:
        if outcome["method"] in (method, against):
            question = (outcome["task"], outcome["length"], outcome["context"], outcome["question"])
            right[outcome["method"], question] = bool(outcome["right"])
    questions = [question for (name, question) in right if name == method]
    if not questions:
        raise ValueError(f"no outcome of {method}")
    differences = {}
    for question in questions:
        if (against, question) not in right:
            raise ValueError(f"{question} was not asked of {against}")
        differences[question] = right[method, question] - right[against, question]

    count = len(differences)
    mean = sum(differences.values()) / count
    residuals = collections.defaultdict(float)
    for question, difference in differences.items():
        residuals[question[:3]] += difference - mean
    clusters = len(residuals)
    if clusters < 2:
        return Difference(mean, math.inf, count, clusters)
    variance = sum(r * r for r in residuals.values()) / count**2 * clusters / (clusters - 1)
    return Difference(mean, 1.96 * math.sqrt(variance), count, clusters)

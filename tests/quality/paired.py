"""Paired differences of two methods over the same questions, with a 95 % interval.

Questions of one context share it, so they are no independent samples: the interval is that of the mean over clustered
differences (sandwich variance over contexts, with the usual factor for few clusters), with Student's quantile for as many
degrees of freedom as there are contexts but one. Where all differences are equal it has no width: it says nothing then about
questions that were not asked.
"""

import collections
import dataclasses
import math


# 97.5 % quantiles of Student's distribution for 1.. degrees of freedom.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
           2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]


def student(freedom):
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.4 / freedom


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
    return Difference(mean, student(clusters - 1) * math.sqrt(variance), count, clusters)


def mean_of_contexts(values):
    """values: (context, number) pairs. The mean of the contexts' means and its 95 % half width (infinite for one)."""
    by_context = collections.defaultdict(list)
    for context, value in values:
        by_context[context].append(value)
    means = [sum(v) / len(v) for v in by_context.values()]
    count = len(means)
    mean = sum(means) / count
    if count < 2:
        return mean, math.inf
    variance = sum((m - mean) ** 2 for m in means) / (count - 1) / count
    return mean, student(count - 1) * math.sqrt(variance)

"""Rows of the area `llama`, and what their measurements share."""

import re

SELECTED = re.compile(r"computed (\d+) attention nodes.*?(?:; selected tokens in (\d+); the longest wait was ([\d.]+) ms(?:; estimated the rest in (\d+))?)?$",
                      re.MULTILINE)


def row(name, value, goal, against, unit="x", better="higher", ratios=()):
    spread = round(max(ratios) - min(ratios), 4) if len(ratios) > 1 else None
    return {"area": "llama", "name": name, "value": value if value is None else round(value, 4), "unit": unit, "better": better,
            "goal": goal, "against": against, "samples": len(ratios) or None, "spread": spread}


def selected(messages):
    """Of what a plug-in has printed: nodes that it computed, those with selected tokens, the longest wait in milliseconds, and the nodes
    that estimated the other tokens."""
    found = SELECTED.search(messages)
    if found is None:
        raise RuntimeError(f"the plug-in computed nothing: {messages[-2000:]}")
    return int(found[1]), int(found[2] or 0), float(found[3] or 0), int(found[4] or 0)

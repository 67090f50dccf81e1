"""A page that shows which tokens of a text were selected: one self-contained HTML file.

    from pqcached import html

    html.write_selected("selected.html", texts, {(layer, head): positions}, exact={(layer, head): best})

The page has the text once for each layer and head. Each token is marked: *found* (selected, and
among the exact top-k), *missed* (among the exact top-k only), *extra* (selected only). Tokens that
are always attended to (sink and window) can be marked too.
"""

from __future__ import annotations

import html as _escaping
import os
from typing import AbstractSet, Any, Dict, FrozenSet, Iterable, List, Mapping, Sequence, Tuple, Union

from ._arrays import integers
from ._errors import InvalidArgument

__all__ = ["page_of_selected", "write_selected"]

Positions = Mapping[Tuple[int, int], Any]  # (layer, head) -> integers

_STYLE = """
body { font: 15px/1.7 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.7 monospace; }
.found { background: #b7e4c7; } .missed { background: #ffb3b3; text-decoration: underline; }
.extra { background: #fff3b0; } .always { background: #dbe7ff; }
summary { cursor: pointer; } table { border-collapse: collapse; } td, th { padding: 0 .8em; text-align: right; }
"""
_KINDS = (("found", "selected, and among the exact top-k"), ("missed", "among the exact top-k, not selected"),
          ("extra", "selected, not among the exact top-k"), ("always", "sink and window, always attended to"))


def _chosen(name: str, positions: Any, token_count: int) -> FrozenSet[int]:
    array = integers(name, positions).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: dtype {array.dtype}; must be integers")
    numbers = frozenset(int(number) for number in array)
    wrong = [number for number in numbers if not 0 <= number < token_count]
    if wrong:
        raise InvalidArgument.about(name, f"{min(wrong)}, must be 0 to {token_count - 1}, the positions of `texts`")
    return numbers


def _text_of(texts: Sequence[str], kinds: Mapping[int, str]) -> str:
    parts: List[str] = []
    for position, text in enumerate(texts):
        shown, kind = _escaping.escape(text), kinds.get(position)
        parts.append(f'<span class="{kind}" title="{position}">{shown}</span>' if kind else shown)
    return "".join(parts)


def _kinds_of(selected: AbstractSet[int], exact: AbstractSet[int], always: AbstractSet[int]) -> Dict[int, str]:
    kinds = {position: "always" for position in always}
    kinds.update((position, "extra") for position in selected - exact)
    kinds.update((position, "missed") for position in exact - selected - always)
    kinds.update((position, "found") for position in selected & exact)
    return kinds


def page_of_selected(texts: Sequence[str], selected: Positions, exact: Positions, *, always: Iterable[int] = (),
                     title: str = "Selected tokens") -> str:
    """Returns the page as text.

    texts: text of each token, by position. selected: (layer, head) -> positions that were selected,
    such as a row of Selected.positions. exact: the same of the exact top-k, for the same layers and
    heads: a selection by Index.flat() of the same number of tokens. always: positions of sink and
    window.

    Raises InvalidArgument for other layers and heads in `exact`, and for positions beyond `texts`;
    TypeError for positions that are not integers.
    """
    if set(selected) != set(exact):
        other = sorted(set(selected) ^ set(exact))
        raise InvalidArgument.about("exact", f"must be given for the layers and heads of `selected`, differs in {other[:4]}")
    count, rows, sections = len(texts), [], []
    free = _chosen("always", list(always), count)
    for layer, head in sorted(selected):
        name = f"[{layer}, {head}]"
        found = _chosen(f"selected{name}", selected[layer, head], count)
        best = _chosen(f"exact{name}", exact[layer, head], count)
        kinds = _kinds_of(found, best, free)
        counts = {kind: sum(one == kind for one in kinds.values()) for kind, _ in _KINDS}
        recall = len(best & (found | free)) / len(best) if best else 1.0
        rows.append(f'<tr><td><a href="#l{layer}h{head}">{layer}</a></td><td>{head}</td><td>{recall:.3f}</td>'
                    f'<td>{counts["found"]}</td><td>{counts["missed"]}</td><td>{counts["extra"]}</td></tr>')
        sections.append(f'<details open id="l{layer}h{head}"><summary>layer {layer}, head {head}: recall {recall:.3f}, '
                        f'{counts["missed"]} missed</summary><pre>{_text_of(texts, kinds)}</pre></details>')
    legend = "".join(f'<li><span class="{kind}">{kind}</span>: {meaning}</li>' for kind, meaning in _KINDS)
    heading = _escaping.escape(title)
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
            f'<style>{_STYLE}</style></head>\n<body><h1>{heading}</h1><p>{count} tokens.</p><ul>{legend}</ul>\n'
            '<table><thead><tr><th>layer</th><th>head</th><th>recall</th><th>found</th><th>missed</th><th>extra</th></tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table>\n{"".join(sections)}</body></html>\n')


def write_selected(path: Union[str, "os.PathLike[str]"], texts: Sequence[str], selected: Positions, exact: Positions, *,
                   always: Iterable[int] = (), title: str = "Selected tokens") -> None:
    """Writes the page of page_of_selected to one file, which refers to no other."""
    page = page_of_selected(texts, selected, exact, always=always, title=title)
    with open(path, "w", encoding="utf-8", errors="replace") as file:  # half a character of a token
        file.write(page)

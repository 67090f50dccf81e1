"""Small SVG charts for the report: lines over an axis, dots with intervals, heat maps.

Colours are CSS variables, so a chart is readable on a light and on a dark page. `standalone` makes a file of its own.
"""

import html
import math

LIGHT = {"page": "#fdfdfb", "ink": "#1b1c1e", "soft": "#5f646b", "line": "#d9dad6", "panel": "#f4f4f0",
         "oracle": "#1b1c1e", "full": "#7a7f87", "flat": "#0f8a7e", "pq4x8": "#1f66d0", "pq2x6": "#d9601a",
         "pq4x6": "#8a4fc7", "pq4x4": "#b28a00", "window": "#c2264b", "random": "#8c7a5b",
         "cold": "#f3d7c4", "warm": "#1f66d0", "good": "#1c7a3f", "bad": "#b3261e"}
DARK = {"page": "#15171a", "ink": "#e9eaec", "soft": "#a0a6ae", "line": "#363a40", "panel": "#1d2024",
        "oracle": "#f2f3f5", "full": "#8f959d", "flat": "#3cc4b4", "pq4x8": "#6ea8ff", "pq2x6": "#ff9a57",
        "pq4x6": "#c39bff", "pq4x4": "#e3c04b", "window": "#ff6f8f", "random": "#bfae8c",
        "cold": "#4a2f22", "warm": "#6ea8ff", "good": "#6fd08f", "bad": "#ff8a80"}
MARKS = {"oracle": "diamond", "full": "none", "flat": "square", "pq4x8": "circle", "pq2x6": "triangle",
         "pq4x6": "circle", "pq4x4": "square", "window": "cross", "random": "cross"}
LABELS = {"full": "full attention", "oracle": "exact top-k", "flat": "sidecar, flat", "pq4x8": "pq m=4 b=8",
          "pq2x6": "pq m=2 b=6", "pq4x6": "pq m=4 b=6", "pq4x4": "pq m=4 b=4", "window": "sink + window",
          "random": "random"}
FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"


def variables():
    """The CSS that gives the colours their values."""
    rule = lambda colours: "".join(f"--{name}:{value};" for name, value in colours.items())
    return (f":root{{color-scheme:light dark;{rule(LIGHT)}}}"
            f"@media (prefers-color-scheme:dark){{:root{{{rule(DARK)}}}}}")


def standalone(svg):
    """The chart as a file: with its colours and its own background."""
    start = svg.index(">") + 1
    return (svg[:start] + f"<style>{variables()}</style><rect width='100%' height='100%' rx='6' fill='var(--page)'/>"
            + svg[start:])


def text(x, y, words, anchor="start", size=12, colour="soft", weight=400, extra=""):
    return (f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' "
            f"fill='var(--{colour})' {extra}>{html.escape(str(words))}</text>")


def mark(kind, x, y, colour, title=""):
    style = f"fill='var(--{colour})' stroke='var(--page)' stroke-width='1'"
    shapes = {
        "circle": f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.2' {style}",
        "square": f"<rect x='{x - 3.7:.1f}' y='{y - 3.7:.1f}' width='7.4' height='7.4' {style}",
        "diamond": f"<path d='M{x:.1f} {y - 5.2:.1f}l5.2 5.2l-5.2 5.2l-5.2 -5.2z' {style}",
        "triangle": f"<path d='M{x:.1f} {y - 5:.1f}l5 8.6h-10z' {style}",
        "cross": f"<path d='M{x - 3.6:.1f} {y - 3.6:.1f}l7.2 7.2m0 -7.2l-7.2 7.2' stroke='var(--{colour})' "
                 "stroke-width='2' fill='none'",
    }
    if kind == "none":
        return ""
    return shapes[kind] + f"><title>{html.escape(title)}</title></{shapes[kind][1:shapes[kind].index(' ')]}>"


def ticks_of(low, high, count=5):
    """Round numbers within [low, high]."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / count))
    step *= min((m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= count), default=10)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(number):
    if abs(number) >= 1e6:
        return f"{number / 1e6:.3g}M"
    if abs(number) >= 1e4:
        return f"{number / 1e3:.3g}K"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def tokens(count):
    """1K = 1024, as contexts are named."""
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def lines(series, *, x_label, y_label, width=520, height=300, log_x=False, categories=None, y_range=None, title="",
          legend=True, goal=None, x_ticks=None, joined=True):
    """series: {name: [(x, y[, note])]}; a name of LABELS has its own colour. categories: x is an index into them."""
    left, right, top, bottom = 58, 16, 34 if title else 14, 48
    shown = {name: points for name, points in series.items() if points}
    rows = math.ceil(len(shown) / max(1, (width - left) // 130)) if legend else 0
    bottom += 18 * rows
    xs = [p[0] for points in shown.values() for p in points]
    ys = [p[1] for points in shown.values() for p in points]
    low, high = y_range or padded(min(ys), max(ys))
    x_low, x_high = (-0.35, len(categories) - 0.65) if categories else (min(xs), max(xs))
    scale = math.log10 if log_x else (lambda value: value)
    if not categories and x_low == x_high:
        x_low, x_high = x_low * 0.9 - 1e-9, x_high * 1.1 + 1e-9
    pad = 0 if categories else 0.04 * (scale(x_high) - scale(x_low))

    def place(x, y):
        share = (scale(x) - scale(x_low) + pad) / (scale(x_high) - scale(x_low) + 2 * pad)
        return (left + share * (width - left - right),
                height - bottom - (min(max(y, low), high) - low) / (high - low) * (height - bottom - top))

    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
           f"role='img' aria-label='{html.escape(title or y_label)}' style=\"{FONT}\">"]
    if title:
        out.append(text(left, 18, title, size=13, colour="ink", weight=600))
    for value in ticks_of(low, high):
        y = place(x_high, value)[1]
        out.append(f"<path d='M{left} {y:.1f}H{width - right}' stroke='var(--line)'/>")
        out.append(text(left - 7, y + 4, short(round(value, 6)), "end", 11))
    if categories:
        ticks = list(enumerate(categories))
    else:
        ticks = [(value, short(value)) for value in x_ticks or ticks_of(x_low, x_high)]
    for value, words in ticks:
        out.append(text(place(value, low)[0], height - bottom + 16, words, "middle", 11))
    out.append(text((left + width - right) / 2, height - bottom + 33, x_label, "middle", 11.5))
    out.append(text(13, (top + height - bottom) / 2, y_label, "middle", 11.5,
                    extra=f"transform='rotate(-90 13 {(top + height - bottom) / 2:.1f})'"))
    if goal is not None and low <= goal <= high:
        y = place(x_high, goal)[1]
        out.append(f"<path d='M{left} {y:.1f}H{width - right}' stroke='var(--good)' stroke-dasharray='5 4'/>")
        out.append(text(width - right, y - 5, f"goal {short(goal)}", "end", 11, "good"))
    for name, points in shown.items():
        colour, placed = name if name in LIGHT else "pq4x8", [place(p[0], p[1]) for p in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        dash = " stroke-dasharray='6 4'" if name in ("full", "random") else ""
        if joined:
            out.append(f"<path d='{path}' fill='none' stroke='var(--{colour})' stroke-width='2'{dash}/>")
        for point, (x, y) in zip(points, placed):
            note = point[2] if len(point) > 2 else f"{LABELS.get(name, name)}: {point[1]:.3f}"
            shape = MARKS.get(name, "circle")
            out.append(mark("square" if shape == "none" and len(points) == 1 else shape, x, y, colour, note))
    if legend:
        out += legend_of(shown, left, height - 18 * rows + 4, width - left)
    return "".join(out) + "</svg>"


def legend_of(names, left, top, width):
    per_row, out = max(1, width // 130), []
    for i, name in enumerate(names):
        x, y = left + i % per_row * 130, top + i // per_row * 18
        colour = name if name in LIGHT else "pq4x8"
        dash = " stroke-dasharray='5 3'" if name in ("full", "random") else ""
        out.append(f"<path d='M{x} {y}h20' stroke='var(--{colour})' stroke-width='2'{dash}/>")
        out.append(mark(MARKS.get(name, "circle"), x + 10, y, colour))
        out.append(text(x + 26, y + 4, LABELS.get(name, name), size=11.5, colour="ink"))
    return out


def padded(low, high):
    span = (high - low) or 1
    return low - 0.06 * span, high + 0.06 * span


def scatter(points, *, x_label, y_label, width=640, height=380, title="", y_range=None, goal_x=None, goal_y=None):
    """points: (x, y, label, group); x on a log axis; points of a group are joined in order."""
    left, right, top, bottom = 58, 24, 34, 48
    x_low, x_high = min(p[0] for p in points) / 1.25, max(p[0] for p in points) * 1.35
    low, high = y_range or padded(min(p[1] for p in points), max(p[1] for p in points))

    def place(x, y):
        share = (math.log(x) - math.log(x_low)) / (math.log(x_high) - math.log(x_low))
        return left + share * (width - left - right), height - bottom - (y - low) / (high - low) * (height - bottom - top)

    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
           f"role='img' aria-label='{html.escape(title)}' style=\"{FONT}\">",
           text(left, 18, title, size=13, colour="ink", weight=600)]
    for value in ticks_of(low, high, 6):
        y = place(x_high, value)[1]
        out.append(f"<path d='M{left} {y:.1f}H{width - right}' stroke='var(--line)'/>")
        out.append(text(left - 7, y + 4, short(round(value, 6)), "end", 11))
    for power in range(-4, 4):
        for digit in (1, 2, 5):
            value = digit * 10.0 ** power
            if x_low <= value <= x_high:
                label = f"1/{1 / value:.0f}" if value < 1 else short(value)
                out.append(text(place(value, low)[0], height - bottom + 16, label, "middle", 11))
    out.append(text((left + width - right) / 2, height - 12, x_label, "middle", 11.5))
    out.append(text(13, (top + height - bottom) / 2, y_label, "middle", 11.5,
                    extra=f"transform='rotate(-90 13 {(top + height - bottom) / 2:.1f})'"))
    if goal_x and x_low < goal_x < x_high:
        x = place(goal_x, low)[0]
        out.append(f"<path d='M{x:.1f} {top}V{height - bottom}' stroke='var(--good)' stroke-dasharray='5 4'/>")
        out.append(text(x - 5, height - bottom - 8, f"goal 1/{1 / goal_x:.0f}", "end", 11, "good"))
    if goal_y and low < goal_y < high:
        y = place(x_low, goal_y)[1]
        out.append(f"<path d='M{left} {y:.1f}H{width - right}' stroke='var(--good)' stroke-dasharray='5 4'/>")
        out.append(text(left + 4, y - 5, f"goal {goal_y:g}", "start", 11, "good"))
    groups = list(dict.fromkeys(p[3] for p in points))
    palette = ["random", "pq2x6", "pq4x8", "flat", "pq4x6", "window"]
    for number, group in enumerate(groups):
        colour, own = palette[number % len(palette)], [p for p in points if p[3] == group]
        placed = [place(p[0], p[1]) for p in own]
        out.append(f"<path d='M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in placed)}' fill='none' "
                   f"stroke='var(--{colour})' stroke-width='1.5' opacity='.7'/>")
        for point, (x, y) in zip(own, placed):
            out.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='7.5' fill='var(--{colour})' stroke='var(--page)'>"
                       f"<title>{html.escape(f'{group} b={point[2]}: {point[1]:.3f}')}</title></circle>")
            out.append(text(x, y + 3.8, point[2], "middle", 10.5, "page", 600))
        x, y = min(placed, key=lambda place: place[1])
        out.append(text(x, y - 12, group, "middle", 12, colour, 600))
    return "".join(out) + "</svg>"


def heat_map(cells, columns, rows, *, title, x_label, y_label, width=330):
    """cells: {(column, row): (share, count)}, share in 0..1."""
    left, top, cell_height = 58, 34, 19
    cell_width = (width - left - 10) / len(columns)
    height = top + cell_height * len(rows) + 42
    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
           f"role='img' aria-label='{html.escape(title)}' style=\"{FONT}\">",
           text(left, 18, title, size=13, colour="ink", weight=600)]
    for j, row in enumerate(rows):
        y = top + j * cell_height
        out.append(text(left - 6, y + 14, row, "end", 11))
        for i, column in enumerate(columns):
            x, found = left + i * cell_width, cells.get((column, row))
            if found is None:
                out.append(f"<rect x='{x:.1f}' y='{y}' width='{cell_width - 1.5:.1f}' height='{cell_height - 1.5}' "
                           "fill='none' stroke='var(--line)'/>")
                continue
            share, count = found
            percent = round(100 * share)
            out.append(f"<rect x='{x:.1f}' y='{y}' width='{cell_width - 1.5:.1f}' height='{cell_height - 1.5}' rx='2' "
                       f"style='fill:color-mix(in oklab,var(--warm) {percent}%,var(--cold))'>"
                       f"<title>{column}, depth {row}: {share:.2f} of {count} questions</title></rect>")
            ink = "page" if share > 0.5 else "ink"
            out.append(text(x + (cell_width - 1.5) / 2, y + 13.5, percent, "middle", 10.5, ink))
    for i, column in enumerate(columns):
        out.append(text(left + (i + 0.5) * cell_width, height - 26, column, "middle", 11))
    out.append(text((left + width - 10) / 2, height - 8, x_label, "middle", 11.5))
    out.append(text(13, top + cell_height * len(rows) / 2, y_label, "middle", 11.5,
                    extra=f"transform='rotate(-90 13 {top + cell_height * len(rows) / 2:.1f})'"))
    return "".join(out) + "</svg>"


def intervals(rows, *, x_label, width=760, title="", label_width=270):
    """Dots with 95 % intervals around zero: rows (label, mean, half_width, note, method)."""
    top, row_height = 34 if title else 10, 22
    height = top + row_height * len(rows) + 40
    reach = max(0.02, max(abs(r[1]) + (0 if math.isinf(r[2]) else min(r[2], 0.6)) for r in rows))
    low, high = -min(1, reach * 1.05), min(1, max(0.02, reach * 0.25, max(r[1] + min(r[2], 0.6) for r in rows)) * 1.05)
    place = lambda value: label_width + (min(max(value, low), high) - low) / (high - low) * (width - label_width - 130)
    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
           f"role='img' aria-label='{html.escape(title)}' style=\"{FONT}\">"]
    if title:
        out.append(text(8, 18, title, size=13, colour="ink", weight=600))
    bottom = top + row_height * len(rows)
    for value in ticks_of(low, high, 6):
        x = place(value)
        out.append(f"<path d='M{x:.1f} {top}V{bottom}' stroke='var(--line)'/>")
        out.append(text(x, bottom + 15, f"{value:+.2g}" if abs(value) > 1e-9 else "0", "middle", 11))
    out.append(f"<path d='M{place(0):.1f} {top}V{bottom}' stroke='var(--soft)'/>")
    for i, (label, mean, half, note, method) in enumerate(rows):
        y = top + (i + 0.5) * row_height
        out.append(text(label_width - 10, y + 4, label, "end", 11.5, "ink"))
        if math.isfinite(half):
            out.append(f"<path d='M{place(mean - half):.1f} {y:.1f}H{place(mean + half):.1f}' stroke='var(--{method})' "
                       "stroke-width='2'/>")
        out.append(mark(MARKS.get(method, "circle"), place(mean), y, method, note))
        out.append(text(width - 122, y + 4, note, "start", 11))
    out.append(text((label_width + width - 130) / 2, height - 8, x_label, "middle", 11.5))
    return "".join(out) + "</svg>"

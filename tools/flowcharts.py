"""Flowcharts of Mermaid drawn as SVG without a browser and without the network.

The documentation has its diagrams as Mermaid, which forges show. Here they are drawn for the site:
`flowchart TD` with nodes `name` or `name["label"]`, edges `a --> b` and `a -- "text" --> b`.
Every node is put one row below the lowest of those that lead to it, edges that close a cycle aside.
"""

import html
import re
import textwrap
from dataclasses import dataclass, field
from itertools import pairwise

_NODE = re.compile(r'^\s*(\w+)(?:\["(.*)"\])?\s*$')
_EDGE = re.compile(r'^\s*(\w+)\s*--(?:\s*"(.*)"\s*--)?>\s*(\w+)\s*$')
_FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LETTER, _LINE = 7.4, 18  # width of a letter and height of a line of 13 pixels
_PADDING, _GAP, _ROW_GAP = 12, 28, 20
_LABEL_LETTERS = 30
_ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
    'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


@dataclass
class Chart:
    """The nodes and edges of a flowchart.

    Attributes:
        labels: label by name of the node, in the order of the text.
        edges: pairs of names, and the label of the edge or an empty string.
    """

    labels: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class _Box:
    """A place: the middle of its upper edge, its size, and its text, if any.

    Nodes have one, and edges have one in each row that they pass: empty, or with the edge's label.
    """

    lines: list[str]
    x: float = 0.0
    y: float = 0.0
    height: float = 0.0

    @property
    def width(self) -> float:
        return max((len(line) * _LETTER for line in self.lines), default=0) + 2 * _PADDING


def replace_flowcharts(markdown: str) -> str:
    """Replace the Mermaid fences of a page by drawings."""
    return _FENCE.sub(lambda match: f'<div class="flowchart">{draw(match[1])}</div>', markdown)


def draw(text: str) -> str:
    """Draw a flowchart.

    Args:
        text: the flowchart in the part of Mermaid's language that is described above.

    Returns:
        An SVG element. Its colors are those of the text around it.

    Raises:
        ValueError: for a line that is not in this part of the language.
    """
    chart = parse(text)
    depth = _depths(chart)
    boxes = {name: _Box(_wrapped(label)) for name, label in chart.labels.items()}
    routes = [
        [boxes[start], *_between(depth[start], depth[end], label), boxes[end]]
        for start, end, label in chart.edges
    ]
    _place(chart, depth, boxes, routes)
    everything = [*boxes.values(), *(box for route in routes for box in route)]
    right = max(box.x + box.width / 2 for box in everything)
    parts = [
        _edge(route, label, right) for route, (_, _, label) in zip(routes, chart.edges, strict=True)
    ]
    parts += [_node(box) for box in boxes.values()]
    backward = [
        _GAP + len(label) * _LETTER
        for route, (_, _, label) in zip(routes, chart.edges, strict=True)
        if route[-1].y <= route[0].y
    ]
    left = min(box.x - box.width / 2 for box in everything) - 4
    right += max(backward, default=0) + 4
    height = max(box.y + box.height for box in everything) + 4
    return (
        f'<svg viewBox="{left:.0f} 0 {right - left:.0f} {height:.0f}" width="{right - left:.0f}" '
        f'role="img" aria-label="{html.escape(_description(chart))}">{_ARROW}{"".join(parts)}</svg>'
    )


def parse(text: str) -> Chart:
    """Read a flowchart; nodes that only edges name have their name as label."""
    first, *lines = text.strip().splitlines()
    if first.strip() != "flowchart TD":
        raise ValueError(f"Argument `text` must begin with `flowchart TD`. Received: {first!r}")
    chart = Chart()
    edges = []
    for line in lines:
        if edge := _EDGE.match(line):
            edges.append((edge[1], edge[3], edge[2] or ""))
        elif node := _NODE.match(line):
            chart.labels[node[1]] = node[2] or node[1]
        elif line.strip():
            raise ValueError(f"The flowchart has a line that cannot be drawn: {line!r}")
    for start, end, _ in edges:
        chart.labels.setdefault(start, start)
        chart.labels.setdefault(end, end)
    chart.edges = edges
    return chart


def _depths(chart: Chart) -> dict[str, int]:
    """The row of each node: below all that lead to it, but for edges that close a cycle."""
    forward: dict[str, set[str]] = {name: set() for name in chart.labels}

    def reaches(start: str, goal: str) -> bool:
        return start == goal or any(reaches(name, goal) for name in forward[start])

    for start, end, _ in chart.edges:
        if not reaches(end, start):
            forward[start].add(end)
    depth = dict.fromkeys(chart.labels, 0)
    for _ in chart.labels:
        for start, ends in forward.items():
            for end in ends:
                depth[end] = max(depth[end], depth[start] + 1)
    return depth


def _wrapped(label: str) -> list[str]:
    return [
        line for part in re.split(r"<br/?>", label) for line in textwrap.wrap(part, _LABEL_LETTERS)
    ]


def _between(start: int, end: int, label: str) -> list[_Box]:
    """A box for each row that an edge passes; labels have rows of their own, the odd ones."""
    if end <= start:
        return []
    boxes = [_Box([]) for _ in range(2 * start + 1, 2 * end)]
    boxes[0].lines = [label] if label else []
    return boxes


def _place(
    chart: Chart, depth: dict[str, int], boxes: dict[str, _Box], routes: list[list[_Box]]
) -> None:
    """Give every box its place: below the middle of those that lead to it, side by side."""
    rows: list[list[_Box]] = [[] for _ in range(2 * max(depth.values()) + 1)]
    above: dict[int, list[_Box]] = {}
    for name in chart.labels:
        rows[2 * depth[name]].append(boxes[name])
    for (start, end, _), route in zip(chart.edges, routes, strict=True):
        if depth[end] <= depth[start]:
            continue
        for number, box in enumerate(route[1:-1], start=2 * depth[start] + 1):
            rows[number].append(box)
        for upper, lower in pairwise(route):
            above.setdefault(id(lower), []).append(upper)
    y = 4.0
    for number, row in enumerate(rows):
        wanted = {
            id(box): sum(b.x for b in above[id(box)]) / len(above[id(box)])
            if id(box) in above
            else 0.0
            for box in row
        }
        row.sort(key=lambda box: wanted[id(box)])
        for box, x in zip(row, _beside(row, [wanted[id(box)] for box in row]), strict=True):
            box.x = x
        height = max(len(box.lines) for box in row) * _LINE + (_PADDING if number % 2 == 0 else 0)
        for box in row:
            box.y = y
            box.height = len(box.lines) * _LINE + _PADDING if box.lines else height
        y += height + _ROW_GAP


def _beside(row: list[_Box], wanted: list[float]) -> list[float]:
    """Places without overlap near those that are wanted: pushed to both sides equally."""
    places = []
    for boxes, sign in ((row, 1), (row[::-1], -1)):
        edge = -float("inf")
        pushed = []
        for box, x in zip(boxes, wanted[::sign], strict=True):
            pushed.append(max(sign * x, edge + box.width / 2))
            edge = pushed[-1] + box.width / 2 + _GAP
        places.append([sign * x for x in pushed][::sign])
    return [(one + other) / 2 for one, other in zip(*places, strict=True)]


def _node(box: _Box) -> str:
    words = "".join(
        f'<text x="{box.x:.0f}" y="{box.y + _PADDING + 7 + number * _LINE:.0f}" '
        f'text-anchor="middle">{html.escape(html.unescape(line))}</text>'
        for number, line in enumerate(box.lines)
    )
    return (
        f'<rect x="{box.x - box.width / 2:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" '
        f'height="{box.height:.0f}" rx="6"/>{words}'
    )


def _edge(route: list[_Box], label: str, right: float) -> str:
    start, end = route[0], route[-1]
    if end.y <= start.y:  # it closes a cycle: around the right side of everything
        x1, y1 = start.x + start.width / 2, start.y + start.height / 2
        x2, y2 = end.x + end.width / 2, end.y + end.height / 2
        far = right + _GAP
        path = f"M{x1:.0f} {y1:.0f}C{far:.0f} {y1:.0f} {far:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
        words = _label(label, right, (y1 + y2) / 2, "start")
    else:
        path = f"M{start.x:.0f} {start.y + start.height:.0f}"
        for upper, lower in pairwise(route):
            y1, y2 = upper.y + upper.height, lower.y
            half = (y1 + y2) / 2
            path += f"C{upper.x:.0f} {half:.0f} {lower.x:.0f} {half:.0f} {lower.x:.0f} {y2:.0f}"
            if lower is not end:
                path += f"V{lower.y + lower.height:.0f}"
        words = _label(label, route[1].x, route[1].y + _LINE, "middle")
    return f'<path d="{path}" fill="none" marker-end="url(#arrow)"/>{words}'


def _label(label: str, x: float, y: float, anchor: str) -> str:
    if not label:
        return ""
    return (
        f'<text class="edge" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">'
        f"{html.escape(label)}</text>"
    )


def _description(chart: Chart) -> str:
    """The chart in words, for readers that do not see it."""
    return "; ".join(
        f"{chart.labels[start]} to {chart.labels[end]}" for start, end, _ in chart.edges
    )

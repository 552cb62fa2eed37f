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
_PADDING, _GAP, _ROW_GAP = 12, 28, 44
_LABEL_LETTERS = 30


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
    """A node's place: the middle of its upper edge, and its size."""

    x: float
    y: float
    width: float
    height: float
    lines: list[str]


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
    routes = _routes(chart)
    boxes = _places(chart, routes)
    width = max(box.x + box.width / 2 for box in boxes.values()) + _GAP
    height = max(box.y + box.height for box in boxes.values()) + 4
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{html.escape(_description(chart))}">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
        "</defs>",
    ]
    for (start, end, label), between in zip(chart.edges, routes, strict=True):
        parts.append(_edge([boxes[name] for name in (start, *between, end)], label))
    parts += [_node(boxes[name]) for name in chart.labels]
    return "".join(parts) + "</svg>"


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


def _routes(chart: Chart) -> list[list[str]]:
    """For each edge, the names of the gaps that it goes through in the rows that it skips."""
    depth = _depths(chart)
    return [
        [f"{row}:gap:{number}" for row in range(depth[start] + 1, depth[end])]
        for number, (start, end, _) in enumerate(chart.edges)
    ]


def _places(chart: Chart, routes: list[list[str]]) -> dict[str, _Box]:
    boxes = {}
    for name, label in chart.labels.items():
        lines = [
            line
            for part in re.split(r"<br/?>", label)
            for line in textwrap.wrap(part, _LABEL_LETTERS) or [""]
        ]
        width = max(map(len, lines)) * _LETTER + 2 * _PADDING
        boxes[name] = _Box(0, 0, width, len(lines) * _LINE + _PADDING, lines)
    depth = _depths(chart)
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in chart.labels:
        rows[depth[name]].append(name)
    for gap in (name for route in routes for name in route):
        boxes[gap] = _Box(0, 0, 1, 0, [])
        rows[int(gap.partition(":")[0])].append(gap)
    widths = [sum(boxes[name].width for name in row) + _GAP * (len(row) - 1) for row in rows]
    middle = max(widths) / 2 + _GAP
    y = 4.0
    for row, width in zip(rows, widths, strict=True):
        x = middle - width / 2
        height = max(boxes[name].height for name in row)
        for name in row:
            boxes[name].x = x + boxes[name].width / 2
            boxes[name].y = y
            x += boxes[name].width + _GAP
            if name not in chart.labels:
                boxes[name].height = height
        y += height + _ROW_GAP
    return boxes


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


def _edge(boxes: list[_Box], label: str) -> str:
    start, end = boxes[0], boxes[-1]
    if end.y <= start.y:  # it closes a cycle: around the right side of both
        x1, y1 = start.x + start.width / 2, start.y + start.height / 2
        x2, y2 = end.x + end.width / 2, end.y + end.height / 2
        far = max(x1, x2) + _GAP
        path = f"M{x1:.0f} {y1:.0f}C{far:.0f} {y1:.0f} {far:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
        place = (far, (y1 + y2) / 2)
    else:
        path = f"M{start.x:.0f} {start.y + start.height:.0f}"
        for upper, lower in pairwise(boxes):
            y1, y2 = upper.y + upper.height, lower.y
            half = (y1 + y2) / 2
            path += f"C{upper.x:.0f} {half:.0f} {lower.x:.0f} {half:.0f} {lower.x:.0f} {y2:.0f}"
            if lower is not end:
                path += f"V{lower.y + lower.height:.0f}"
        place = ((start.x + boxes[1].x) / 2, (start.y + start.height + boxes[1].y) / 2 + 4)
    words = (
        f'<text class="edge" x="{place[0]:.0f}" y="{place[1]:.0f}" text-anchor="middle">'
        f"{html.escape(label)}</text>"
        if label
        else ""
    )
    return f'<path d="{path}" fill="none" marker-end="url(#arrow)"/>{words}'


def _description(chart: Chart) -> str:
    """The chart in words, for readers that do not see it."""
    return "; ".join(
        f"{chart.labels[start]} to {chart.labels[end]}" for start, end, _ in chart.edges
    )

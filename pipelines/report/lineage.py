"""The lineage graph: data → features → foundation model → vertical models → deployment, as inline SVG.

Two layouts of the same graph: in columns for a wide screen, one below the other for a phone; the style
sheet shows the one that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.report.style import esc
from pipelines.table import clip

BOX_W, BOX_H, GAP_X, GAP_Y = 196, 74, 40, 14
NARROW_W, INDENT_X = 372, 26
CHAR_W, TITLE_W = 6.6, 8.2  # width of a character of a line and of a title, generous


@dataclass(frozen=True)
class Node:
    """A box: a title and up to three lines. `kind` chooses the frame: plain, good, bad, ghost."""

    key: str
    column: int
    title: str
    lines: tuple[str, ...]
    kind: str = "plain"


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]

    def column(self, index: int) -> list[Node]:
        return [node for node in self.nodes if node.column == index]


def graph_of(summary: Mapping[str, Any]) -> Graph:
    """The boxes and arrows of a validated summary."""
    store = _store_hash(summary["models"])
    split = summary["split"]
    days = f"test {_text(split.get('test_day'))}" if split.get("test_day") else ""
    preprocess = summary["stages"].get("preprocess", {})
    nodes = [
        Node("data", 0, "data", (summary["dataset"], _rows(preprocess.get("rows_in"), "rows read"))),
        Node("store", 1, "features", (_short("hash", store), _short("run", preprocess.get("run_id")), days)),
    ]
    edges = [("data", "store")]
    teachers = {}
    for name, model in summary["models"].items():
        if model["kind"] == "foundation":
            state = "champion" if model["promoted"] else "not promoted"
            nodes.append(Node(name, 2, name, (*_identity(model), state), "good" if model["promoted"] else "bad"))
            edges.append(("store", name))
            teachers[model["hash"]] = name
    for name, model in summary["models"].items():
        if model["kind"] == "vertical":
            nodes.append(Node(name, 3, name, (*_identity(model), _short("run", model["run_id"]))))
            edges.append((_teacher(model, teachers, nodes, edges), name))
            deployed = f"champion · version {model['version']}" if model["promoted"] else "not promoted"
            key = f"deploy:{name}"
            kind = "good" if model["promoted"] else "bad"
            nodes.append(Node(key, 4, "deployment", (deployed, f"for {model['group'] or name}"), kind))
            edges.append((name, key))
    return Graph(tuple(nodes), tuple(edges))


def lineage_svg(summary: Mapping[str, Any]) -> str:
    """Both layouts, ready for the page."""
    graph = graph_of(summary)
    return (
        f'<div class="wide scroll">{wide_svg(graph)}</div>'
        f'<div class="narrow" style="max-width:{NARROW_W}px;margin:0 auto">{narrow_svg(graph)}</div>'
    )


def wide_svg(graph: Graph) -> str:
    """Five columns, arrows to the right."""
    tallest = max(len(graph.column(c)) for c in range(5))
    height = tallest * (BOX_H + GAP_Y) - GAP_Y + 4
    place: dict[str, tuple[float, float]] = {}
    for c in range(5):
        column = graph.column(c)
        used = len(column) * (BOX_H + GAP_Y) - GAP_Y
        for i, node in enumerate(column):
            place[node.key] = (c * (BOX_W + GAP_X) + 2, (height - used) / 2 + i * (BOX_H + GAP_Y))
    parts = []
    for start, end in graph.edges:
        (x0, y0), (x1, y1) = place[start], place[end]
        x0, y0, y1 = x0 + BOX_W, y0 + BOX_H / 2, y1 + BOX_H / 2
        bend = (x1 - x0) / 2
        path = f"M{x0:.0f},{y0:.0f} C{x0 + bend:.0f},{y0:.0f} {x1 - bend:.0f},{y1:.0f} {x1 - 6:.0f},{y1:.0f}"
        parts.append(_arrow(path, x1, y1))
    parts += [_box(node, *place[node.key], BOX_W) for node in graph.nodes]
    return _frame(parts, 5 * BOX_W + 4 * GAP_X + 4, height, min_width=900)


def narrow_svg(graph: Graph) -> str:
    """One box below the other; vertical models and their deployments hang on a line at the left."""
    parts: list[str] = []
    y = 2.0
    box_w = NARROW_W - 4
    teachers = {node.key: node.title for node in graph.column(2)}
    for node in (node for c in range(3) for node in graph.column(c)):
        if node.column and node == graph.column(node.column)[0]:
            parts.append(_arrow_down(NARROW_W / 2, y - GAP_Y - 6, y))
        parts.append(_box(node, 2, y, box_w))
        y += BOX_H + GAP_Y + 6
    top, spine = y - GAP_Y - 6, y
    parents = {end: start for start, end in graph.edges}
    follows = {start: end for start, end in graph.edges}
    deployments = {node.key: node for node in graph.column(4)}
    for node in graph.column(3):
        deployment = deployments[follows[node.key]]
        lines = node.lines[:2]
        if len(teachers) > 1:  # side by side in the wide layout; here the arrows cannot tell them apart
            lines = (f"taught by {teachers.get(parents[node.key], 'none')}", node.lines[1])
        merged = Node(node.key, 3, node.title, (*lines, deployment.lines[0]), deployment.kind)
        middle = y + BOX_H / 2
        parts.append(_arrow(f"M{INDENT_X / 2},{middle:.0f} H{INDENT_X - 6}", INDENT_X, middle))
        parts.append(_box(merged, INDENT_X, y, NARROW_W - INDENT_X - 2))
        spine, y = middle, y + BOX_H + GAP_Y
    if parents and graph.column(3):
        parts.insert(0, f'<path d="M{INDENT_X / 2},{top:.0f} V{spine:.0f}" {_LINE}/>')
    return _frame(parts, NARROW_W, y)


_LINE = 'fill="none" stroke="var(--soft)" stroke-width="1.4"'


def _arrow(path: str, x: float, y: float) -> str:
    head = f"M{x:.0f},{y:.0f} l-8,-4 v8 z"
    return f'<path d="{path}" {_LINE}/><path d="{head}" fill="var(--soft)"/>'


def _arrow_down(x: float, y0: float, y1: float) -> str:
    head = f"M{x:.0f},{y1:.0f} l-4,-8 h8 z"
    return f'<path d="M{x:.0f},{y0:.0f} V{y1 - 6:.0f}" {_LINE}/><path d="{head}" fill="var(--soft)"/>'


def _box(node: Node, x: float, y: float, width: float) -> str:
    stroke = {"good": "--good", "bad": "--bad"}.get(node.kind, "--line")
    dash = ' stroke-dasharray="5 4"' if node.kind in ("bad", "ghost") else ""
    room = int((width - 20) / CHAR_W)
    text = [
        _line(
            node.title,
            x + 11,
            y + 20,
            int((width - 20) / TITLE_W),
            'font-weight="600" fill="var(--ink)" font-size="13"',
        )
    ]
    shown = [line for line in node.lines if line][:3]
    text += [
        _line(line, x + 11, y + 37 + 15 * i, room, 'fill="var(--soft)" font-size="11.5"')
        for i, line in enumerate(shown)
    ]
    frame = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_H}" rx="8" fill="var(--ground)" '
    return frame + f'stroke="var({stroke})" stroke-width="1.4"{dash}/>' + "".join(text)


def _line(text: str, x: float, y: float, room: int, attributes: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}><title>{esc(text)}</title>{esc(clip(text, room))}</text>'


def _frame(parts: Sequence[str], width: float, height: float, min_width: int = 0) -> str:
    style = f' style="min-width:{min_width}px"' if min_width else ""
    head = f'<svg role="img" aria-label="Lineage graph" viewBox="0 0 {width:.0f} {height:.0f}"{style}>'
    return f"<figure>{head}{''.join(parts)}</svg></figure>"


def _teacher(
    model: Mapping[str, Any], teachers: Mapping[str, str], nodes: list[Node], edges: list[tuple[str, str]]
) -> str:
    """The box a vertical model hangs on: its teacher, an earlier teacher (added here), or the features."""
    teacher = str(model["parents"].get("teacher") or "")
    if not teacher:
        return "store"
    if teacher in teachers:
        return teachers[teacher]
    key = f"teacher:{teacher}"
    if all(node.key != key for node in nodes):
        nodes.append(Node(key, 2, "earlier teacher", (_short("hash", teacher), "not of this loop"), "ghost"))
        edges.append(("store", key))
    return key


def _identity(model: Mapping[str, Any]) -> tuple[str, ...]:
    version = f"version {model['version']}" if model["version"] is not None else "not registered"
    return version, _short("hash", model["hash"])


def _store_hash(models: Mapping[str, Any]) -> str:
    found = [str(model["parents"].get("data") or "") for model in models.values()]
    return next((text for text in found if text), "")


def _short(name: str, value: object) -> str:
    return f"{name} {_text(value)[:12]}" if value else ""


def _rows(count: object, what: str) -> str:
    return f"{count:,} {what}" if isinstance(count, int) else ""


def _text(value: object) -> str:
    return "" if value is None else str(value)

"""Blocks as HTML that needs no script; `viewer/charts.js` adds values at the pointer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from zeropipe.core.units import percent
from zeropipe.viz.article.blocks import Block, Chart, Figures, Heading, Note, Row, Shares, Table
from zeropipe.viz.article.chart import chart_html
from zeropipe.viz.colors import THEMES


def article_html(blocks: Sequence[Block]) -> str:
    """The blocks one below the other; consecutive charts side by side if they fit."""
    parts: list[str] = []
    at = 0
    while at < len(blocks):
        block = blocks[at]
        if isinstance(block, Chart):
            group = [block]
            while at + len(group) < len(blocks) and isinstance(blocks[at + len(group)], Chart):
                group.append(blocks[at + len(group)])  # type: ignore[arg-type]
            parts.append(f'<div class="zp-charts">{"".join(map(chart_html, group))}</div>')
            at += len(group)
            continue
        parts.append(_html(block))
        at += 1
    return f'<article class="zp-article">{"".join(parts)}</article>'


def theme_css() -> str:
    """The colours of both themes as CSS variables. As in the viewer, the page's theme comes before the system's."""
    light, dark = (
        "".join(f"--zp-{name}:{color};" for name, color in THEMES[theme].items()) for theme in ("light", "dark")
    )
    return (
        f".zp-article{{{light}}}\n"
        f'html[data-theme="dark"] .zp-article{{{dark}}}\n'
        f'@media (prefers-color-scheme: dark){{html:not([data-theme="light"]) .zp-article{{{dark}}}}}\n'
        f"@media print{{html[data-theme] .zp-article{{{light}}}}}"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        facts = f"<p>{escape(block.facts)}</p>" if block.facts else ""
        return f'<header class="zp-head"><h1>{escape(block.text)}</h1>{facts}</header>'
    if isinstance(block, Figures):
        return f'<dl class="zp-figures">{"".join(_figure(f.name, f.value, f.remark) for f in block.figures)}</dl>'
    if isinstance(block, Note):
        return f'<aside class="zp-advice"><h2>{escape(block.title)}</h2><p>{_with_code(block.text)}</p></aside>'
    assert isinstance(block, Table)
    return _table(block)


def _figure(name: str, value: str, remark: str) -> str:
    small = f"<small>{escape(remark)}</small>" if remark else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _table(table: Table) -> str:
    full = [row.cells for row in table.rows if len(row.cells) == len(table.head)]
    bars = [next((cells[n] for cells in full if isinstance(cells[n], Shares)), None) for n in range(len(table.head))]
    head = "".join(_head(name, bar) for name, bar in zip(table.head, bars, strict=True))
    rows = "".join(_row(row, len(table.head)) for row in table.rows)
    remark = f'<p class="zp-remark">{escape(table.remark)}</p>' if table.remark else ""
    return (
        f'<section class="zp-table"><h2>{escape(table.title)}</h2><div><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{remark}</section>"
    )


def _head(name: str, bar: str | Shares | None) -> str:
    if not isinstance(bar, Shares):
        return f'<th scope="col">{escape(name)}</th>'
    keys = "".join(f'<span class="zp-key"><i class="zp-tone-{tone}"></i>{escape(n)}</span>' for n, _, tone in bar.parts)
    return f'<th scope="col" class="zp-bar-cell"><span class="zp-voice">{escape(name)}</span>{keys}</th>'


def _row(row: Row, width: int) -> str:
    if len(row.cells) == 1 and isinstance(row.cells[0], str):
        return f'<tr class="zp-between"><td colspan="{width}">{escape(row.cells[0])}</td></tr>'
    mark = ' class="zp-marked"' if row.marked else ""
    return f"<tr{mark}>{''.join(map(_cell, row.cells))}</tr>"


def _cell(cell: str | Shares) -> str:
    if not isinstance(cell, Shares):
        return f"<td>{escape(cell)}</td>"
    whole = cell.whole or 1.0
    label = ", ".join(f"{name} {percent(value / whole)}" for name, value, _ in cell.parts)
    bars = "".join(
        f'<i class="zp-tone-{tone}" style="width:{100 * max(0.0, value) / whole:.2f}%"></i>'
        for _, value, tone in cell.parts
    )
    bar = f'<div class="zp-shares-bar" role="img" aria-label="{escape(label)}" title="{escape(label)}">{bars}</div>'
    return f'<td class="zp-bar-cell">{bar}</td>'

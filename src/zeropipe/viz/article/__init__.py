"""The article above the timelines of a page: `blocks` (figures, notes, charts, tables), for `html` and `chart`."""

from zeropipe.viz.article.blocks import Block, Chart, Figure, Figures, Heading, Line, Note, Row, Shares, Table
from zeropipe.viz.article.html import article_html

__all__ = ["Block", "Chart", "Figure", "Figures", "Heading", "Line", "Note", "Row", "Shares", "Table", "article_html"]

"""The article above the timelines of a page: figures, notes, charts and tables, as values and as HTML."""

from zeropipe.viz.article.blocks import Block, Chart, Figure, Figures, Heading, Line, Note, Row, Shares, Table
from zeropipe.viz.article.html import article_html

__all__ = ["Block", "Chart", "Figure", "Figures", "Heading", "Line", "Note", "Row", "Shares", "Table", "article_html"]

"""Counts the graphs of compiled blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo import lookup_backend

from zeropipe.engine.blocks import compiling


@contextmanager
def counted_graphs() -> Iterator[list[Any]]:
    """Let engines compile with `aot_eager`; the list gets every graph."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    with mock.patch.object(compiling, "inductor_backend", mock.Mock(return_value=backend)):
        yield graphs

"""Some kinds of actions out of rows, with the entries of their columns."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from zeropipe.core.action import Kind
from zeropipe.core.jit import Arrays, Floats, Ints
from zeropipe.core.packed import PackedRows, kind_of


def select_rows(
    xp: Arrays, rows: PackedRows, kinds: Collection[Kind], *columns: Floats
) -> tuple[PackedRows, list[Floats]]:
    """The actions of these kinds in their order, and their entries in each column."""
    wanted = xp.list_ints([int(kind in kinds) for kind in Kind])
    codes, counts = xp.ints(rows.codes), xp.full_ints(len(rows.offsets) - 1)
    xp.call(count_kernel, codes, xp.list_ints(rows.offsets), wanted, counts)
    offsets = tuple(accumulate(map(int, counts), initial=0))
    selected = xp.full_ints(offsets[-1])
    xp.call(select_codes_kernel, codes, wanted, selected)
    found = [xp.full_floats(offsets[-1]) for _ in columns]
    for column, target in zip(columns, found, strict=True):
        xp.call(select_kernel, codes, wanted, column, target)
    return PackedRows(xp.int_bytes(selected), offsets), found


def count_kernel(codes: Ints, offsets: Ints, wanted: Ints, counts: Ints) -> None:
    """The number of wanted actions of each rank."""
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank], offsets[rank + 1]):
            counts[rank] += wanted[kind_of(codes[at])]


def select_codes_kernel(codes: Ints, wanted: Ints, selected: Ints) -> None:
    """Copy the wanted codes."""
    count = 0
    for at in range(len(codes)):
        if wanted[kind_of(codes[at])]:
            selected[count] = codes[at]
            count += 1


def select_kernel(codes: Ints, wanted: Ints, column: Floats, selected: Floats) -> None:
    """Copy the entries of wanted actions."""
    count = 0
    for at in range(len(codes)):
        if wanted[kind_of(codes[at])]:
            selected[count] = column[at]
            count += 1

"""Writes modules at random, as source code: views and aliases, state modified in place, parameters used in odd ways."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

TOKENS, WIDTH = 3, 4  # of what modules hand on: (sequences, TOKENS, WIDTH)
PRELUDE = '''
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class HandOn(torch.autograd.Function):
    """Saves nothing; its gradient is a view of what it gets."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.view_as(dy)


class Both(torch.autograd.Function):
    """A sum whose two gradients are one tensor."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


class Scaled(torch.autograd.Function):
    """Keeps a tensor on its own, past save_for_backward."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale.detach().clone()
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale, dy.sum((0, 1))


def parameter(*shape):
    return nn.Parameter(0.5 * torch.randn(*shape))
'''
# What is handed on beside the main tensor: how the next module uses it.
USES = {
    "row": ("{x} * {e}", "{x} + {e}.view(1, 1, -1)"),
    "table": ("{x} + {e}.unsqueeze(0)", "{x} * {e}"),
    "full": ("{x} * {e}.sigmoid()", "{x} + {e}"),
    "first": ("{x} + {e}.unsqueeze(1)", "{x} * {e}[:, None].tanh()"),
    "ids": ("{x} * (1 + {e}.unsqueeze(-1))",),
}


@dataclass
class Writer:
    """The source of one module."""

    name: str
    dice: random.Random
    given: list[str]  # the kinds of tensors it is given, after the main one
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=lambda: ["h"])  # of the main shape
    layers: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)  # buffers of shape (WIDTH,)
    tables: list[str] = field(default_factory=list)  # buffers of shape (TOKENS, WIDTH)
    is_stateful: bool = False  # modifies state in place: may be refused
    number: int = 0

    def new(self, what: str) -> str:
        self.number += 1
        return f"{what}{self.number}"

    def attribute(self, what: str, value: str) -> str:
        name = self.new(what)
        self.init.append(f"self.{name} = {value}")
        return f"self.{name}"

    def buffer(self, shape: str) -> str:
        name = self.new("buffer")
        value = f"torch.rand({shape}) + 0.5"
        self.init.append(
            f'self.register_buffer("{name}", {value})' if self.dice.random() < 0.85 else f"self.{name} = {value}"
        )
        return f"self.{name}"

    def make(self, expression: str) -> str:
        """A new value."""
        name = self.new("v")
        self.body.append(f"{name} = {expression}")
        self.values.append(name)
        return name

    def value(self) -> str:
        return self.dice.choice(self.values[-4:])

    def layer(self) -> str:
        if self.layers and self.dice.random() < 0.3:
            return self.dice.choice(self.layers)
        bias = self.dice.random() < 0.6
        layer = self.attribute("linear", f"nn.Linear({WIDTH}, {WIDTH}, bias={bias})")
        if self.dice.random() < 0.1:
            self.init.append(f"{layer}.weight.requires_grad_(False)")
        self.layers.append(layer)
        return layer

    def write(self) -> str:
        """The class; what it returns is in `returned`."""
        signature = ", ".join(["h", *(f"e{place}" for place in range(len(self.given)))])
        for place, kind in enumerate(self.given):
            if self.dice.random() < 0.8:
                self.make(self.dice.choice(USES[kind]).format(x=self.value(), e=f"e{place}"))
        for _ in range(self.dice.randint(2, 6)):
            weights = list(STATEMENTS.values())
            self.dice.choices(list(STATEMENTS), weights)[0](self)
        more = [value for value in self.values[1:-1] if self.dice.random() < 0.5]
        main = " + ".join([f"torch.tanh({self.values[-1]})", *(f"0.3 * {value}" for value in more)])
        extras = [self.extra() for _ in range(self.dice.choice([0, 0, 1, 1, 2]))]
        self.returned = [kind for kind, _ in extras]
        self.body.append(f"h = {main}")
        self.body.append("return " + ", ".join(["h", *(expression for _, expression in extras)]))
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.init]
        lines += ["", f"    def forward(self, {signature}):", *(f"        {line}" for line in self.body)]
        return "\n".join(lines)

    def extra(self) -> tuple[str, str]:
        """Another output: its kind and its expression."""
        choices = [("first", "h[:, 0]"), ("full", f"{self.value()}.view(-1, {TOKENS}, {WIDTH})"), ("full", "h")]
        choices += [("full", "h.detach()"), ("table", self.attribute("table", f"parameter({TOKENS}, {WIDTH})"))]
        choices += [(kind, f"e{place}") for place, kind in enumerate(self.given)]
        choices += 3 * [("row", row) for row in self.rows] + [("table", table) for table in self.tables]
        choices += [("row", f"{table}[1]") for table in self.tables]
        return self.dice.choice(choices)


def linear(w: Writer) -> None:
    w.make(f"{w.layer()}({w.value()})")


def modified_linear(w: Writer) -> None:
    value = w.make(f"{w.layer()}({w.value()})")
    w.body.append(w.dice.choice([f"{value}.mul_(1.5)", f"{value}.add_({w.values[0]})", f"{value}.sin_()"]))


def function(w: Writer) -> None:
    x, y = w.value(), w.value()
    w.make(
        w.dice.choice(
            [f"torch.tanh({x})", f"{x}.sin()", f"F.gelu({x})", f"HandOn.apply({x})", f"Both.apply({x}, {y})",
             f"{x} + {y}", f"{x} * {y}", f"torch.where({x} > 0, {x}, {y})", f"torch.cat([{x}[:, :1], {y}[:, 1:]], 1)",
             f"torch.softmax({x} @ {y}.transpose(1, 2), -1) @ {x}", f"{x}.detach() * 0.5 + {y}"]
        )
    )  # fmt: skip


def view(w: Writer) -> None:
    x = w.value()
    w.make(
        w.dice.choice(
            [f"{x}.view(-1, {WIDTH}).view({x}.shape)", f"{x}.transpose(1, 2).transpose(1, 2)", f"{x}[:, :]",
             f"{x}.flip(1)", f"{x}.unsqueeze(0).squeeze(0)", f"{x}[:, :1].expand({x}.shape)",
             f"{x}.reshape(-1).view_as({x})"]
        )
    )  # fmt: skip


def added_parameter(w: Writer) -> None:
    x, size = w.value(), TOKENS * WIDTH
    kind = w.dice.randrange(7)
    if kind == 0:
        w.make(f"{x} + {w.attribute('table', f'parameter({TOKENS}, {WIDTH})')}.unsqueeze(0)")
    elif kind == 1:
        w.make(f"{x} + {w.attribute('flat', f'parameter({size})')}.view(1, {TOKENS}, {WIDTH})")
    elif kind == 2:
        w.make(f"{x} + {w.attribute('bias', f'parameter({WIDTH})')}.view(1, 1, -1)")
    elif kind == 3:
        two = [w.attribute("flat", f"parameter({size})") + f".view(1, {TOKENS}, {WIDTH})" for _ in range(2)]
        w.make(f"{x} + {two[0]} + {two[1]}")
    elif kind == 4:
        w.make(f"{x} + {w.attribute('whole', f'parameter(1, {TOKENS}, {WIDTH})')}")
    elif kind == 5:
        w.make(f"Scaled.apply({x}, {w.attribute('scale', f'parameter({WIDTH})')})")
    else:
        w.make(f"Both.apply({x}, {w.attribute('whole', f'parameter(1, {TOKENS}, {WIDTH})')}.expand({x}.shape))")


def weight_again(w: Writer) -> None:
    x, layer = w.value(), w.layer()
    w.make(
        w.dice.choice(
            [f"F.linear({x}, {layer}.weight)", f"{x} + {layer}.weight[:{TOKENS}].unsqueeze(0)",
             f"{layer}({layer}({x}))", f"{layer}({x}) + {layer}({x})",
             f"{layer}({layer}.weight[:{TOKENS}].unsqueeze(0)) * {x}"]
        )
    )  # fmt: skip


def other_layer(w: Writer) -> None:
    x = w.value()
    kind = w.dice.randrange(4)
    if kind == 0:
        w.make(f"{w.attribute('norm', f'nn.LayerNorm({WIDTH})')}({x})")
    elif kind == 1:
        w.make(f"{w.attribute('conv', f'nn.Conv1d({WIDTH}, {WIDTH}, 1)')}({x}.transpose(1, 2)).transpose(1, 2)")
    elif kind == 2:
        w.make(f"checkpoint({w.layer()}, {x}, use_reentrant=False)")
    else:
        w.attribute("unused", f"parameter({WIDTH})")


def in_place(w: Writer) -> None:
    value = w.make(w.dice.choice(["{} * 1.5", "{}.clone()", "{} + 0.0"]).format(w.value()))
    w.body.append(
        w.dice.choice([f"{value}.add_({w.values[0]})", f"{value}[:, 0] = 0.5", f"{value}.tanh_()", f"{value}.mul_(2)"])
    )


def read_buffer(w: Writer) -> None:
    x = w.value()
    if w.dice.random() < 0.5:
        row = w.dice.choice(w.rows) if w.rows else w.buffer(str(WIDTH))
        w.rows = sorted({*w.rows, row})
        w.make(w.dice.choice(["{} * {}", "{} * {}.clone()", "{} + {}"]).format(x, row))
    else:
        table = w.dice.choice(w.tables) if w.tables else w.buffer(f"{TOKENS}, {WIDTH}")
        w.tables = sorted({*w.tables, table})
        w.make(
            f"{w.layer()}({table}) + {x}" if w.dice.random() < 0.5 else f"{w.layer()}({table}[:, :].unsqueeze(0)) * {x}"
        )


def modify_buffer(w: Writer) -> None:
    """As forwards do: before it is read, since autograd refuses it afterwards in a plain model, too."""
    w.is_stateful = True
    if w.dice.random() < 0.5:
        row = w.buffer(str(WIDTH))
        w.rows.append(row)
        new = f"0.5 * {w.value()}.detach().mean((0, 1))"
        how = [
            f"{row}.mul_(0.9)",
            f"{row}.add_(0.1)",
            f"{row}.copy_({new})",
            f"{row} = {row} * 0.9",
            f"{row}[1:] += 0.1",
        ]
        w.body.append(w.dice.choice(how))
    else:
        table = w.buffer(f"{TOKENS}, {WIDTH}")
        w.tables.append(table)
        new = f"{w.value()}.detach()[0]"
        w.body.append(
            w.dice.choice([f"{table}.mul_(0.9)", f"{table}.copy_({new})", f"{table} = 0.9 * {table} + {new}"])
        )
    read_buffer(w)


def hook(w: Writer) -> None:
    """Not on an input: one that was returned twice is one tensor in the plain model, and two in a pipeline."""
    x = w.make(f"{w.value()} * 0.9")
    w.body.append(f"if {x}.requires_grad:")
    w.body.append("    " + w.dice.choice([f"{x}.register_hook(lambda g: 1.5 * g)", f"{x}.retain_grad()"]))


STATEMENTS = {
    linear: 6, modified_linear: 2, function: 5, view: 2, added_parameter: 5, weight_again: 3, other_layer: 2,
    in_place: 2, read_buffer: 2, modify_buffer: 1.5, hook: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Modules to be run one after the other."""

    source: str
    names: list[str]
    sequences: int  # in each microbatch
    inputs_need_grad: bool
    is_stateful: bool
    seed: int


def write_model(seed: int, number: int = 4) -> Model:
    """The same model for the same seed, everywhere."""
    dice = random.Random(seed)
    given, classes, stateful = dice.choice([[], ["ids"]]), [], False
    names = [f"Module{place}" for place in range(number)]
    for name in names:
        writer = Writer(name, dice, given)
        classes.append(writer.write())
        if dice.random() < 0.1:
            freeze = "        self.requires_grad_(False)"
            classes[-1] = classes[-1].replace("\n\n    def forward", f"\n{freeze}\n\n    def forward")
        given, stateful = writer.returned, stateful or writer.is_stateful
    source = "\n\n\n".join(classes)
    return Model(source, names, dice.choice([1, 1, 2]), dice.random() < 0.2, stateful, seed)

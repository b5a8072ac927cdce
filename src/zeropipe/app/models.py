"""What goes over the wire. The bounds here make the OpenAPI page; the words for breaking them are in `errors.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zeropipe.core.action import MAX_STAGES
from zeropipe.core.limits import PAGE
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.sim.costs import MAX_UNITS

MAX_CHOICES = 64  # schedules of one request
MAX_EDGES = 4096  # directions between two ranks with costs of their own
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Column = Annotated[list[Amount], Field(min_length=1, max_length=MAX_STAGES, fail_fast=True)]
Some = Annotated[dict[str, Amount], Field(max_length=MAX_STAGES, examples=[{"0": 0.8, "default": 1.0}])]
PerStage = Amount | Column | Some
Per = Literal["rank", "stage"]
Format = Literal["html", "svg", "png", "pdf", "csv", "json"]


class Strict(BaseModel):
    """Nothing is converted and nothing unknown is passed over: what was typed is what is meant."""

    model_config = ConfigDict(strict=True, extra="forbid")


class LinkIn(Strict):
    """One direction between two ranks."""

    p2p: Amount | None = None  # as in the costs around it
    bandwidth: Speed | None = None


class CostsIn(Strict):
    """`zeropipe.Costs`, field by field; `per` says what a number is of."""

    f: PerStage = 1.0
    i: PerStage = 1.0
    w: PerStage = 1.0
    b: PerStage | None = None
    overlap: PerStage | None = None
    p2p: Amount = 0.0
    bandwidth: Speed | None = None
    message: PerStage = 0.0
    edges: dict[str, LinkIn] = Field(default_factory=dict, max_length=MAX_EDGES, examples=[{"0-1": {"p2p": 0.5}}])
    node_size: Annotated[int, Field(ge=1)] | None = None
    inter_node: LinkIn = LinkIn()
    blocking: bool = False
    blocking_ends: bool = False
    serial_links: bool = False
    activation: PerStage = 1.0
    stash: PerStage | None = None
    weights: PerStage = 0.0
    shards: Literal["keep", "regather"] | None = None
    unshard: PerStage | None = None
    reduce: PerStage | None = None
    whole_weights: PerStage = 0.0
    whole_gradients: PerStage = 0.0
    shard_bandwidth: Speed | None = None
    units: Annotated[int, Field(ge=1, le=MAX_UNITS)] = 1
    memory_limit: Amount | None = None
    unit: Annotated[str, Field(max_length=16)] = ""
    memory_unit: Annotated[str, Field(max_length=16)] = ""


class Choice(Strict):
    """One row of the comparison: a schedule by name, or a dropped file by the id its upload got."""

    name: Annotated[str, Field(max_length=100)] | None = Field(None, examples=["zbv"])
    file: Annotated[str, Field(max_length=64)] | None = None
    stages_per_rank: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, bool | int | float | str] = Field(default_factory=dict, examples=[{"group_size": 8}])
    simulate: bool = Field(False, description="Of a recorded timeline: simulate its schedule instead of showing it.")


class Size(Strict):
    """How large the pipeline is, and what it costs."""

    ranks: Annotated[int, Field(ge=1, le=PAGE.ranks)] = 4
    microbatches: Annotated[int, Field(ge=1, le=PAGE.actions)] = 8
    stages_per_rank: Annotated[int, Field(ge=1)] | None = Field(
        None, description="For every schedule that can have so many; the others keep their own."
    )
    weight_parts: Annotated[int, Field(ge=1, le=MAX_WEIGHT_PARTS)] | None = Field(
        None, description="Cut every W into so many parts and run them where their rank would wait."
    )
    costs: CostsIn = CostsIn()
    per: Per = Field(
        "rank", description="What a cost is of: a rank's part of the model, shared out over its stages, or a stage."
    )


class Ask(Size):
    """Schedules to simulate side by side."""

    schedules: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES)] = Field(
        examples=[[{"name": "1f1b"}, {"name": "zbv"}]]
    )


class FileAsk(Ask):
    """The same, as a file to keep."""

    theme: Literal["light", "dark"] = "light"
    width: Annotated[float, Field(ge=120, le=4000, allow_inf_nan=False)] | None = Field(
        None, description="Of an .svg, .png or .pdf, in points (1/72 inch)."
    )
    labels: Literal["microbatch", "action", "none"] = "microbatch"


FileName = Annotated[str, Field(min_length=1, max_length=200, examples=["mine.csv"])]


class FieldError(BaseModel):
    """What is wrong, and with which field: `ranks`, `costs.f`, `schedules.0`, or empty for the request itself."""

    field: str
    message: str


class Errors(BaseModel):
    """Every refusal looks like this."""

    errors: list[FieldError]


class Picture(BaseModel):
    """A tiny timeline: one SVG path per kind and shade, in a box of `width` times `height`."""

    width: float
    height: int
    paths: dict[str, str]


class Card(BaseModel):
    """A schedule's facts."""

    name: str
    summary: str
    placement: str
    stages_per_rank: list[int]
    splits_backward: bool
    overlaps: bool
    options: dict[str, bool | int | float | str | None]
    limits: str
    paper: str
    picture: Picture | None


class Catalog(BaseModel):
    """All schedules, the colours they are drawn in, and the largest file the page takes."""

    version: str
    max_file_bytes: int
    schedules: list[Card]
    palette: dict[str, Any]


class Idle(BaseModel):
    """Mean idle time of the ranks by cause."""

    warm_up: float
    waiting: float
    communication: float
    cool_down: float
    other: float
    sharding: float


class Result(BaseModel):
    """One simulated schedule, or a recorded timeline as it is."""

    choice: int
    title: str
    schedule: str
    placement: str
    measured: bool
    recorded: bool
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_weight_parts: int
    filled: bool
    num_actions: int
    unit: str
    memory_unit: str
    makespan: float
    bubble: float
    bubble_to_ideal: float
    busy: float
    idle: Idle
    peak_memory: float | None
    peak_rank: int | None
    over_limit: list[int]
    copies: int
    advice: list[str]
    group: int = Field(description="Results of one group do the same work, and only they are held against each other.")
    fits: bool
    best_time: bool
    best_memory: bool
    of_best: float


class Answer(BaseModel):
    """The results in the order of the choices, those refused, and the viewer's data."""

    results: list[Result]
    errors: list[FieldError]
    costs_per: Per
    viewer: dict[str, Any]


class Point(BaseModel):
    """A schedule in the chart of bubble against memory."""

    name: str
    stages_per_rank: int
    bubble: float
    peak_memory: float
    makespan: float
    over_limit: bool
    pareto: bool


class Chart(BaseModel):
    """All schedules that can be built at a size, and why the others cannot."""

    points: list[Point]
    errors: list[FieldError]
    memory_unit: str
    unit: str


class Uploaded(BaseModel):
    """What a dropped file turned out to be: with an id, or with costs (of a timeline: those fitted to its times)."""

    kind: Literal["schedule", "timeline", "costs"]
    name: str
    id: str | None = None
    num_ranks: int | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    measured: bool = False
    costs: dict[str, Any] | None = None


class Load(BaseModel):
    """Requests in one of the server's lanes; more than `room` that wait are answered with 503."""

    running: int
    waiting: int
    room: int

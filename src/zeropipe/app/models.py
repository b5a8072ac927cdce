"""Requests and answers of the HTTP interface. `errors.py` has the messages for values out of bounds."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from zeropipe.core.action import MAX_STAGES
from zeropipe.core.limits import PAGE
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.sim.costs import COST_FIELDS, OLD_NAMES, PHASE_FIELDS, SHARD_FIELDS, SLICE_FIELDS, flat_fields

MAX_CHOICES = 64  # schedules of one request
MAX_EDGES = 4096  # links with costs of their own
MAX_UNIT_CHARACTERS = 16  # of the name of a unit
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Column = Annotated[list[Amount], Field(min_length=1, max_length=MAX_STAGES, fail_fast=True)]
StageTable = Annotated[dict[str, Amount], Field(max_length=MAX_STAGES, examples=[{"0": 0.8, "default": 1.0}])]
PerStage = Amount | Column | StageTable
Per = Literal["rank", "stage"]
Format = Literal["html", "svg", "png", "pdf", "csv", "json"]


class StrictModel(BaseModel):
    """Converts no value and accepts no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid")


class LinkFields(StrictModel):
    """One direction between two ranks; None: as in the costs."""

    p2p: Amount | None = None
    bandwidth: Speed | None = None


def _create_cost_fields() -> type[StrictModel]:
    """The base of CostFields: a field for each of COST_FIELDS but those of phases and slices, which only files have."""
    types: dict[str, Any] = {
        "per stage": PerStage, "number": Amount, "memory": Amount, "bandwidth": Speed, "switch": bool,
        "text": Annotated[str, Field(max_length=MAX_UNIT_CHARACTERS)], "link": LinkFields,
        "links": Annotated[dict[str, LinkFields], Field(max_length=MAX_EDGES, examples=[{"0-1": {"p2p": 0.5}}])],
    }  # fmt: skip
    fields: dict[str, Any] = {}
    for name, cost in COST_FIELDS.items():
        if name in (*PHASE_FIELDS, *SLICE_FIELDS):
            continue
        kind: Any = types.get(cost.type)
        if cost.type == "integer":
            kind = Annotated[int, Field(ge=1, le=cost.max_value)]
        elif cost.type == "choice":
            kind = Literal[cost.choices]
        default = LinkFields() if cost.type == "link" else cost.default
        fields[name] = (kind | None if default is None else kind, Field(default, description=cost.help))
    return create_model("CostFields", __base__=StrictModel, **fields)


class CostFields(_create_cost_fields()):  # type: ignore[misc]
    """The fields of `zeropipe.Costs`, per rank or per stage as `per` says."""


def cost_fields_script() -> str:
    """The JavaScript module of the page with the fields of Costs: each as the user types it."""
    fields = {
        name: {
            "default": cost.default if isinstance(cost.default, bool) else _input_text(cost.default),
            "perStage": cost.type == "per stage",
            "sharded": name in SHARD_FIELDS,
        }
        for name, cost in flat_fields().items()
    }
    return (
        "// The fields of zeropipe.Costs, as the user types them. Generated from zeropipe.sim.costs.\n"
        f"export const COST_FIELDS = {json.dumps(fields)};\n"
        f"export const OLD_NAMES = {json.dumps(OLD_NAMES)};\n"
    )


def _input_text(default: float | str | None) -> str:
    return "" if default is None else f"{default:g}" if isinstance(default, float | int) else default


class Choice(StrictModel):
    """One row of the comparison: a schedule by name, or an uploaded file by its id."""

    name: Annotated[str, Field(max_length=100)] | None = Field(None, examples=["zbv"])
    file: Annotated[str, Field(max_length=64)] | None = None
    stages_per_rank: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, bool | int | float | str] = Field(default_factory=dict, examples=[{"group_size": 8}])
    simulate: bool = Field(
        False, description="Simulate the schedule of a recorded timeline instead of showing the recording."
    )


class SizeRequest(StrictModel):
    """The size and the costs of the pipeline."""

    ranks: Annotated[int, Field(ge=1, le=PAGE.ranks)] = 4
    microbatches: Annotated[int, Field(ge=1, le=PAGE.actions)] = 8
    stages_per_rank: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stages on each rank, for the schedules that can have this number."
    )
    weight_parts: Annotated[int, Field(ge=1, le=MAX_WEIGHT_PARTS)] | None = Field(
        None, description="Split every W into this number of parts, which fill idle time."
    )
    costs: CostFields = CostFields()
    per: Per = Field("rank", description="Whether costs are per rank, divided among its stages, or per stage.")


class CompareRequest(SizeRequest):
    """Schedules to simulate side by side."""

    schedules: Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES)] = Field(
        examples=[[{"name": "1f1b"}, {"name": "zbv"}]]
    )


class FileRequest(CompareRequest):
    """A comparison to download as a file."""

    theme: Literal["light", "dark"] = "light"
    width: Annotated[float, Field(ge=120, le=4000, allow_inf_nan=False)] | None = Field(
        None, description="Width of an .svg, .png or .pdf in points (1/72 inch)."
    )
    labels: Literal["microbatch", "action", "none"] = "microbatch"


FileName = Annotated[str, Field(min_length=1, max_length=200, examples=["mine.csv"])]


class FieldError(BaseModel):
    """An error and its field: `ranks`, `costs.f`, `schedules.0`, or empty for the request itself."""

    field: str
    message: str


class Errors(BaseModel):
    """The answer to a request that was refused."""

    errors: list[FieldError]


class Picture(BaseModel):
    """A small timeline: one SVG path per kind and shade, in a box of `width` times `height`."""

    width: float
    height: int
    paths: dict[str, str]


class Card(BaseModel):
    """A schedule of the registry."""

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
    """All schedules, their colours, and the largest file that can be uploaded."""

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
    offload: float = 0.0


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
    idle_fraction: float
    bubble: float
    bubble_to_ideal: float
    busy: float
    idle: Idle
    peak_memory: float | None
    peak_rank: int | None
    over_limit: list[int]
    copies: int
    advice: list[str]
    group: int = Field(description="Results of one group do the same work and are ranked together.")
    fits: bool
    best_time: bool
    best_memory: bool
    of_best: float


class Answer(BaseModel):
    """The results in the order of the choices, errors of the other choices, and the viewer's data."""

    results: list[Result]
    errors: list[FieldError]
    costs_per: Per
    viewer: dict[str, Any]


class Point(BaseModel):
    """A schedule in the chart of idle time against memory."""

    name: str
    stages_per_rank: int
    idle_fraction: float
    bubble: float
    peak_memory: float
    makespan: float
    over_limit: bool
    pareto: bool


class Chart(BaseModel):
    """All schedules that can be built at a size, and errors of the others."""

    points: list[Point]
    errors: list[FieldError]
    memory_unit: str
    unit: str


class UploadInfo(BaseModel):
    """An uploaded file: schedules and timelines have an id, costs and timelines have costs."""

    kind: Literal["schedule", "timeline", "costs"]
    name: str
    id: str | None = None
    num_ranks: int | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    measured: bool = False
    costs: dict[str, Any] | None = None


class QueueLoad(BaseModel):
    """Requests in one of the server's queues; at most `room` requests wait, others get status 503."""

    running: int
    waiting: int
    room: int

"""All options that more than one command has: one name and one meaning each, those of the training file.

A command receives its options as keywords. `request.create_request` and `take_looks` read the shared ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from zeropipe.cli.command import SINGLE_COSTS, Command, Option, print_cost_help
from zeropipe.cli.param_types import DTYPES, Dtype, FiniteRange, Integers, Size, SwitchOrAuto, Tokens
from zeropipe.core.formats.parse import parse_value
from zeropipe.core.gradient_policy import GRADIENTS
from zeropipe.core.mesh import DIMENSIONS, EXPERTS
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.errors import ConfigError, short

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

command = partial(click.command, cls=Command)
option = partial(click.option, cls=Option)
INTEGERS, POSITIVE = Integers(), click.IntRange(1)


def flag_of(name: str) -> str:
    """`--memory-limit` for memory_limit."""
    return "--" + name.replace("_", "-")


def combine(*decorators: Decorator) -> Decorator:
    """One decorator for several options, in this order in `--help`."""

    def decorate(command: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


json = option("--json", "as_json", is_flag=True, help="Print JSON.")
dry_run = option("--dry-run", is_flag=True, help="Check everything and print the plan; start nothing.")
report = option("--report", metavar="FILE", help="Write a page with the measured and the simulated timeline.")
timeout = option(
    "--timeout", type=FiniteRange(0, min_open=True), default=600.0, show_default=True, field="engine.timeout",
    help="Seconds without progress before a process gives up.",
)  # fmt: skip
search_seconds = option(
    "--search-seconds", type=float, default=10.0, show_default=True, old_names={"--seconds": ""},
    help="Time to search for schedules; 0 in plan: none.",
)  # fmt: skip
search_steps = option(
    "--search-steps", type=int, metavar="N", help="Steps of local search instead of a time, for equal results.",
    old_names={"--steps": "use --search-steps; in run and profile, --steps are recorded steps"},
)  # fmt: skip
workers = option("--workers", type=POSITIVE, help="Parallel workers; one per core by default.")


def output(required: bool = False) -> Decorator:
    return option(
        "-o", "--output", "out", metavar="FILE", required=required,
        help="File to write; its suffix is the format.",
    )  # fmt: skip


# sizes
ranks = option(
    "--ranks", "-p", type=INTEGERS, group="Size", field="mesh.pp", old_names={"--pp": ""},
    help="Pipeline ranks; compare and plan take several like 4,8.",
)  # fmt: skip
microbatches = option(
    "--microbatches", "-m", type=INTEGERS, group="Size",
    help="Microbatches of each pipeline in a step; compare takes several.",
)  # fmt: skip
stages_per_rank = option(
    "--stages-per-rank", "-v", type=INTEGERS, group="Size", field="schedule.stages_per_rank",
    help="Stages on each rank; the schedule's default if not set; compare takes several.",
)  # fmt: skip
schedule_options = option(
    "--option", "-O", "pairs", multiple=True, metavar="NAME=VALUE", group="Size", field="schedule.options",
    help="Option of the schedule, like group_size=4; may be repeated.",
)  # fmt: skip
slices = option(
    "--slices", type=INTEGERS, group="Size", field="schedule.slices",
    help="Slices of the sequences of each microbatch, for schedules that have them, like seq1f1b; plan and search take"
    " several like 1,2,4.",
)  # fmt: skip
size = combine(ranks, microbatches, stages_per_rank, slices, schedule_options)

# the model and how it runs
num_layers = option(
    "--num-layers", type=POSITIVE, field="model.num_layers", help="Layers of a built-in model, if not its own number."
)
sequence = option(
    "--sequence", type=Tokens(), field="data.sequence",
    help="Tokens per sequence, like 4096, 128K or 1M; by default 4096 in estimate and plan, 128 in run and profile.",
)  # fmt: skip
sample = option(
    "--sample", type=POSITIVE, help="Tokens of a packed sample, if several share a sequence and attend by kernels."
)
dtype = option(
    "--dtype", type=Dtype(), field="model.dtype",
    help="Data type of weights and activations; by default bfloat16 in estimate and plan, float32 in run and profile.",
)  # fmt: skip
lora = option(
    "--lora", type=POSITIVE, metavar="RANK", field="lora.rank",
    help="Train LoRA adapters of this rank on all linear layers, and freeze the model.",
)  # fmt: skip
ep = option(
    "--ep", type=INTEGERS, field="mesh.ep",
    help="GPUs that experts are divided over; estimate and plan take several like 1,8.",
)  # fmt: skip
cp = option(
    "--cp", type=INTEGERS, field="mesh.cp",
    help="GPUs that have a part of every sequence; estimate and plan take several like 1,4.",
)  # fmt: skip
imbalance = option(
    "--imbalance", type=float, default=1.0, show_default=True,
    help="With ep: rows of experts of the GPU that has most, over the mean.",
)  # fmt: skip
dispatch = option(
    "--dispatch", type=click.Choice(["expert", "process"]), default="expert", show_default=True, field="mesh.dispatch",
    help="With ep: a token is sent once to each expert of it, or to each process that has some.",
)  # fmt: skip
device = option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, field="engine.device",
    help="Device to run on; auto is a GPU if there is one.",
)  # fmt: skip
compile = option(
    "--compile/--no-compile", type=SwitchOrAuto(), default="auto", show_default="auto", field="engine.compile",
    help="Compile each transformer block (torch.compile); auto: in run and profile on a GPU in 16 bits, not in estimate"
    " and plan.",
)  # fmt: skip
fused_head = option(
    "--fused-head/--no-fused-head", default=True, show_default=True, field="engine.fused_head",
    help="Compute the loss in chunks of tokens, where the model allows it.",
)  # fmt: skip
steps = option(
    "--steps", type=POSITIVE, help="Recorded steps, after a warm-up; by default 3 in run, 5 in profile."
)  # fmt: skip
gpu = option(
    "--gpu", default="h100", show_default=True, help="GPU to estimate for; `zeropipe estimate --known` lists them."
)
efficiency = option(
    "--efficiency",
    metavar="NAME=X,..",
    help="Fractions of the GPU's data sheet that are reached, like matmul=0.6,memory=0.8.",
)

# which of a model's layer costs to use; which settings to estimate, measure or try
_LAYER_COSTS = "Costs of layers (a --costs file of estimate or profile)"


def _layer_option(*names: str, **settings: Any) -> Callable[..., Decorator]:
    """An option that some commands need only for costs of layers, where it is in the group of these."""
    return lambda group, **more: option(*names, group=group, **{**settings, **more})


_ac = _layer_option(
    "--ac", metavar="MODE", field="engine.ac",
    help="Activation checkpointing: none, full, selective:N, selective:op, memory_budget:X; estimate, profile and plan "
    "take several like none,full.",
)  # fmt: skip
_microbatch = _layer_option(
    "--microbatch", type=INTEGERS, field="data.microbatch",
    help="Sequences per microbatch; estimate, profile and plan take several like 1,2,4.",
    old_names={"--microbatch-size": "", "--microbatch-sizes": ""},
)  # fmt: skip
_tp = _layer_option(
    "--tp", type=INTEGERS, field="mesh.tp", help="Tensor-parallel size; estimate and plan take several like 1,2,4."
)
_sequence_parallel = _layer_option(
    "--sequence-parallel/--no-sequence-parallel", default=None,
    help="With tp, also shard sequences outside attention and MLP; estimate: settings with it too; plan tries both.",
)  # fmt: skip
_layers = _layer_option(
    "--layers", metavar="N,N,..", field="schedule.layers",
    help="Layers of each stage, like 2,3,3,2; spread evenly by default.",
)  # fmt: skip
_balance = _layer_option(
    "--balance", type=click.Choice(["even", "time"]), field="schedule.balance",
    help="Spread layers evenly (the default), or by time: the slowest rank is as fast as possible.",
)  # fmt: skip
ac, microbatch, tp, layers = _ac(""), _microbatch(""), _tp(""), _layers("")
sequence_parallel = _sequence_parallel("")
mesh = option(
    "--mesh",
    metavar="NAME=N,..",
    help=f"Processes per mesh dimension, like pp=2,tp=2: any of {', '.join(DIMENSIONS)}, {EXPERTS}.",
)
# the training file's names, which `train` takes
mesh_fields = combine(
    *(option(f"--mesh.{name}", f"mesh_{name}", type=POSITIVE, hidden=True) for name in (*DIMENSIONS, EXPERTS))
)  # fmt: skip


def run_microbatch(note: str) -> Decorator:
    """`microbatch` of `run`, which had the name --batch."""
    return _microbatch("", old_names={"--batch": note, "--microbatch-size": ""})


# costs: field -> (type, help); a str is one number or several
COSTS: dict[str, tuple[Any, str]] = {
    "f": (str, "Time of a forward: one number, one per stage like 1,1,2, or some stages like 0=0.8."),
    "i": (str, "Time of an input gradient."),
    "w": (str, "Time of a weight gradient."),
    "b": (str, "Time of a full backward; i + w by default."),
    "overlap": (str, "Time of an F and a B as one step; f + b by default."),
    "p2p": (float, "Latency of a message between ranks."),
    "bandwidth": (float, "Bytes per unit of time between ranks; unlimited by default."),
    "message": (str, "Bytes of a message."),
    "node_size": (int, "Ranks per machine."),
    "inter_p2p": (float, "Latency between machines; p2p by default."),
    "inter_bandwidth": (float, "Bandwidth between machines; bandwidth by default."),
    "blocking": (bool, "A sender waits for its transfer."),
    "blocking_ends": (bool, "A sender waits for its transfer in warm-up and cool-down only, as in Megatron-LM."),
    "serial_links": (bool, "One transfer at a time in each direction of a link."),
    "activation": (str, "Memory that a forward allocates."),
    "stash": (str, "Memory kept from I until W; all of it by default."),
    "f_workspace": (str, "Memory in use only while a forward runs."),
    "workspace": (str, "Memory in use only while a full backward runs."),
    "i_workspace": (str, "Memory in use only while an input gradient runs; workspace by default."),
    "recompute": (str, "Time that the backward of a checkpointed forward takes more; f by default."),
    "checkpointed_activation": (str, "Memory that a checkpointed forward allocates; activation by default."),
    "checkpointed_workspace": (
        str,
        "The same of a checkpointed forward's full backward; by default with what the forward did not keep.",
    ),
    "checkpointed_i_workspace": (str, "The same of its input gradient."),
    "weights": (str, "Constant memory: parameters, gradients, optimizer."),
    "first_gradients": (str, "The part of weights that the first B or W of a stage allocates."),
    "shards": (
        click.Choice(["keep", "regather"]),
        "Sharded stages: gather weights once per step (keep), or for every microbatch (regather).",
    ),
    "unshard": (str, "Time to gather a stage; full_weights / shard_bandwidth by default."),
    "reduce": (str, "Time to reduce a stage's gradients; full_gradients / shard_bandwidth by default."),
    "full_weights": (str, "Memory of gathered weights."),
    "gathered_weights": (str, "Memory of weights gathered at a time with regather; two units by default."),
    "started_weights": (str, "Memory of weights gathered before their stage runs; gathered_weights by default."),
    "full_gradients": (str, "Memory of gradients until they are reduced."),
    "gradients": (
        click.Choice(GRADIENTS),
        "Reduce gradients once per step, after every microbatch, or when more than N stages of a rank have them.",
    ),
    "rolling_gradients": (str, "Memory of gradients while a B or W runs with rolling ones; three units by default."),
    "shard_bandwidth": (float, "Bytes per unit of time between the ranks of a shard group."),
    "units": (int, "FSDP units of a stage, which are gathered and reduced one by one."),
    "offload_size": (str, "Memory that an OFFLOAD copies to the host; activation by default."),
    "offload_time": (str, "Time of an OFFLOAD; offload_size / offload_bandwidth by default."),
    "reload_time": (str, "Time of a RELOAD; offload_size / reload_bandwidth by default."),
    "offload_bandwidth": (float, "Bytes per unit of time from a device to its host."),
    "reload_bandwidth": (float, "Bytes per unit of time back; offload_bandwidth by default."),
    "memory_limit": (Size(), "Memory of a rank, like 40 or 40GB; schedules that need more cannot win."),
}


def _cost_option(name: str) -> Decorator:
    kind, text = COSTS[name]
    group = "Costs" if name == "memory_limit" else SINGLE_COSTS
    field = "engine.shards" if name == "shards" else ""
    settings = {"is_flag": True, "default": None} if kind is bool else {"type": kind, "metavar": "X"}
    if name == "shards":
        settings.pop("metavar")
    old_names = {"--whole-" + name.removeprefix("full_"): ""} if name.startswith("full_") else None
    return option(flag_of(name), name, group=group, field=field, help=text, old_names=old_names, **settings)


costs_file = option(
    "--costs", "costs_file", metavar="FILE", group="Costs", field="schedule.costs",
    help="Costs: a .toml or .json file, or a recorded timeline (run --timeline).",
)  # fmt: skip
per = option(
    "--per", type=click.Choice(["rank", "stage"]), group="Costs",
    help="Whether costs are per rank, divided among its stages (the default), or per stage.",
)  # fmt: skip
costs = combine(
    costs_file,
    per,
    _cost_option("memory_limit"),
    option(
        "--weight-parts", type=click.IntRange(1, MAX_WEIGHT_PARTS), group="Costs",
        help="Divide every W into this number of parts, and fill gaps with them.",
    ),
    option(
        "--help-costs", is_flag=True, is_eager=True, expose_value=False, callback=print_cost_help, group="Costs",
        help="Describe the options of single costs, and exit.",
    ),
    *(one(_LAYER_COSTS) for one in (_ac, _microbatch, _tp, _sequence_parallel, _layers, _balance)),
    *(_cost_option(name) for name in COSTS if name != "memory_limit"),
)  # fmt: skip
offload = option(
    "--offload", metavar="MODE", group="Costs",
    help="Copy activations to the host and back: auto (all that take no time and lower a peak), fit (as few as keep "
    "the memory limit), or a share from 0 to 1.",
)  # fmt: skip
checkpointing = option(
    "--checkpointing", type=click.Choice(["fit"]), group="Costs",
    help="Checkpoint as few F as keep the memory limit; checkpointed_activation is what such an F keeps.",
)  # fmt: skip
overlaps = option(
    "--overlaps", is_flag=True, group="Costs",
    help="Make an Overlap of each F and B that are neighbours and can start at the same time.",
)  # fmt: skip

# pictures
_LOOKS = ("title", "width", "dpi", "theme", "labels", "memory_curves", "legend", "facts")
_MOVED_MEMORY = "use --memory-curves; in plan, --memory is the memory of a GPU"
looks = combine(
    option("--title", group="Picture", help="Title of the page or figure."),
    option("--width", type=float, group="Picture", help="Width of an .svg, .png or .pdf in points (1/72 inch)."),
    option("--dpi", type=float, group="Picture", help="Resolution of a .png in dots per inch."),
    option(
        "--theme", type=click.Choice(["light", "dark"]), group="Picture",
        help="Colours; by default a page follows the system, a figure is light.",
    ),
    option(
        "--labels", type=click.Choice(["microbatch", "action", "none"]), group="Picture", help="Text in the boxes."
    ),
    option(
        "--memory-curves/--no-memory-curves", default=None, group="Picture", help="Draw memory over time.",
        old_names={"--memory": _MOVED_MEMORY, "--no-memory": _MOVED_MEMORY},
    ),
    option("--legend/--no-legend", default=None, group="Picture", help="Draw the legend of a figure."),
    option(
        "--facts/--no-facts", default=None, group="Picture",
        help="Write makespan, idle time and peak memory beside a figure's name.",
    ),
)  # fmt: skip


def take_looks(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the picture options from a command's keywords, and return those that are set as `zp.draw` takes them."""
    found = {name.removesuffix("_curves"): values.pop(name) for name in _LOOKS}
    return {name: value for name, value in found.items() if value is not None}


def require_run_dtype(dtype: str) -> str:
    """ConfigError for float16, which can only be estimated."""
    if dtype == "float16":
        raise ConfigError(f"--dtype {dtype}: can only be estimated; use one of {', '.join(DTYPES)}")
    return dtype


def require_single(name: str, values: tuple[int, ...] | None, others: str) -> int | None:
    """The value of an option; ConfigError if there are several, which the commands `others` take."""
    if values and len(values) > 1:
        listed = ",".join(map(str, values))
        raise ConfigError(f"{name}={short(listed)}: must be a single number here; {others} several")
    return values[0] if values else None


def parse_pairs(pairs: tuple[str, ...], flag: str) -> dict[str, Any]:
    """Parse ("group_size=4",) as {"group_size": 4}."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name and text):
            raise ConfigError(f"{flag} {short(pair)}: must be name=value, like group_size=4")
        name = name.replace("-", "_")
        if name in settings:
            raise ConfigError(f"{flag} {short(pair)}: {name} is given twice; leave one of them out")
        settings[name] = parse_value(text)
    return settings

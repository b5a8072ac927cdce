"""schedule.checkpointing of a training file: what --dry-run says of it, and a run with checkpointed F."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from train_runs import metrics_of, model_directory, run_config, train_on

import zeropipe as zp
from zeropipe.cli.request import create_request
from zeropipe.core.formats.json import to_json
from zeropipe.core.model.layers import format_counts, layer_counts
from zeropipe.errors import ConfigError
from zeropipe.planning.context import RESERVE
from zeropipe.sim.compare import compare
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.config.read import read_run
from zeropipe.train.config.rules import check_run
from zeropipe.train.inputs import load_layer_costs
from zeropipe.train.preview import preview
from zeropipe.train.schedule import build_run_schedule

LARGE = (
    "--model.path", "qwen3-8b", "--model.weights", "random", "--train.steps", "1", "--mesh.pp", "8",
    "--data.batch", "128", "--data.microbatch", "4", "--data.sequence", "4096",
)  # fmt: skip
COSTS = ("--schedule.costs", "h200")
FIT = ("--schedule.checkpointing", "fit")
MARKED = "\n".join(zp.to_csv(zp.build("gpipe", ranks=8, microbatches=32)).replace("0F0,", "0F0c,", 1).splitlines())


def made(*options):
    return preview(read_run(None, [*LARGE, *COSTS, *options]))


def test_fit_recomputes_only_what_it_must():
    plain, full, fitting = made(), made("--engine.ac", "full"), made(*FIT)
    limit = plain.prediction.memory_limit
    assert max(rank.peak for rank in plain.ranks) > limit
    assert 0.8 * limit < max(rank.peak for rank in fitting.ranks) <= limit * (1 + 1e-9)
    assert plain.prediction.step < fitting.prediction.step < full.prediction.step
    assert 0 < fitting.prediction.parts["recompute"] < 0.5 * (full.prediction.step - plain.prediction.step)
    assert sum(fitting.prediction.parts.values()) == pytest.approx(fitting.prediction.step)
    schedule = build_run_schedule(read_run(None, [*LARGE, *COSTS, *FIT]))
    ranks = {stage for stage, _ in schedule.checkpointed}
    assert ranks == {rank for rank, one in enumerate(plain.ranks) if one.peak > limit}


@pytest.mark.parametrize(
    "options, message",
    [
        ((*COSTS, "--engine.ac", "full"), r"engine\.ac='full' does not run with schedule\.checkpointing='fit'"),
        ((*COSTS, "--schedule.offload", "0.5"), r"schedule\.offload=0\.5 does not run with schedule\.checkpointing"),
        ((*COSTS, "--schedule.name", "seq1f1b", "--schedule.slices", "2"), r"schedule\.slices=2 does not run with"),
        ((*COSTS, "--engine.ac", "full", "--schedule.name", "MARKED"), r"engine\.ac='full' does not run with the"),
        ((), r"checkpointing='fit' needs the times of layers: set schedule\.costs to a GPU"),
    ],
)  # fmt: skip
def test_what_is_refused(options, message, tmp_path):
    fit: tuple[str, ...] = FIT
    if "MARKED" in options:
        file, fit = tmp_path / "marked.json", ()
        file.write_text(to_json(zp.from_csv(MARKED)))
        options = [str(file) if option == "MARKED" else option for option in options]
    with pytest.raises(ConfigError, match=message):
        check_run(read_run(None, [*LARGE, *fit, *options]))


def test_a_schedule_file_with_marks_is_predicted_as_they_say(tmp_path):
    """Also by commands, with costs of layers; costs without ac full cannot predict it."""
    config = read_run(None, [*LARGE, *COSTS, *FIT])
    schedule = build_run_schedule(config)
    file, costs_file = tmp_path / "marked.json", tmp_path / "costs.json"
    file.write_text(to_json(schedule))
    wanted, shown = made(*FIT), made("--schedule.name", str(file))
    assert shown.prediction == wanted.prediction
    assert [rank.memory for rank in shown.ranks] == [rank.memory for rank in wanted.ranks]

    layers = load_layer_costs(config)
    costs_file.write_text(to_layer_json(layers))
    per_stage, full = (
        layers.for_schedule(schedule).costs(shown.layers_per_stage, layers.setting(ac=ac), placement=schedule.placement)
        for ac in ("none", "full")
    )
    timeline = zp.simulate(schedule, per_stage.with_checkpointed(full, 8))
    options = {"layers": format_counts(shown.layers_per_stage), "ac": "none"}
    request = create_request([str(file)], {"costs_file": str(costs_file), **options})
    found = request.price()
    assert zp.simulate(found.schedule, found.costs).makespan == timeline.makespan
    assert zp.simulate(found.schedule, found.costs).peak_memory == timeline.peak_memory
    [even] = compare([schedule], layers)
    assert even.makespan == zp.simulate(schedule, layers.schedule_costs(schedule, layer_counts(36, 8))).makespan
    assert even.peak_memory[0] < 0.6 * compare([replace(schedule, checkpointed=frozenset())], layers)[0].peak_memory[0]
    with pytest.raises(ConfigError, match="ac='full' with a schedule that says which F are checkpointed"):
        create_request([str(file)], {"costs_file": str(costs_file), **options, "ac": "full"}).price()
    plain = load_layer_costs(config.model_copy(update={"schedule": read_run(None, [*LARGE, *COSTS]).schedule}))
    costs_file.write_text(to_layer_json(plain))
    options = ("--schedule.costs", str(costs_file), "--schedule.name", str(file))
    unknown = preview(read_run(None, [*LARGE, *options]))
    assert unknown.prediction is None
    assert any("no setting with ac=full" in note for note in unknown.notes)


def test_recomputation_is_named_with_slices_and_with_ac_full(tmp_path):
    """A slice of a checkpointed F is computed again once; ac full says what it recomputes."""
    options = ("--mesh.pp", "4", "--data.batch", "16", "--data.microbatch", "1", "--data.sequence", "4096")
    base = [*LARGE[:6], *options, *COSTS, "--engine.compile", "false"]
    seconds = {}
    for slices in (1, 2, 4):
        plain = zp.build("seq1f1b", ranks=4, microbatches=16, slices=slices)
        keys = frozenset((stage, number) for stage in range(4) for number in range(16 * slices))
        file = tmp_path / f"all{slices}.json"
        file.write_text(to_json(replace(plain, checkpointed=keys, rebuild=None)))
        seconds[slices] = preview(read_run(None, [*base, "--schedule.name", str(file)])).prediction.parts["recompute"]
    assert seconds[1] > 0
    assert list(seconds.values()) == pytest.approx([seconds[1]] * 3)
    full = preview(read_run(None, [*base, "--engine.ac", "full"])).prediction
    assert full.parts["recompute"] == pytest.approx(seconds[1], rel=0.05)


def test_a_run_has_the_same_losses(tmp_path):
    start, file = model_directory(tmp_path / "model"), tmp_path / "costs.json"
    losses = {}
    for mode in (None, "fit"):
        output = tmp_path / str(mode)
        tables = {
            "model": {"path": str(start), "dtype": "float32"}, "mesh": {"pp": 2},
            "schedule": {"name": "zb-h1", "costs": "h100" if mode is None else str(file), "checkpointing": mode},
        }  # fmt: skip
        config = run_config(output, start, **tables)
        if mode is None:  # costs of both modes, of a GPU that is a little too small
            both = config.model_copy(update={"schedule": config.schedule.model_copy(update={"checkpointing": "fit"})})
            costs, peak = load_layer_costs(both), max(rank.peak for rank in preview(config).ranks)
            file.write_text(to_layer_json(replace(costs, machine={**costs.machine, "memory": RESERVE + 0.99 * peak})))
        assert bool(build_run_schedule(config).checkpointed) == (mode == "fit")
        train_on(config)
        losses[mode] = [row["loss"] for row in metrics_of(output)]
    assert losses[None] == losses["fit"]
    assert len(losses[None]) > 1

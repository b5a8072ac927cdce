"""One vocabulary: an option has one name and one meaning in all commands, the training file's."""

import importlib.util
import json
import subprocess
import sys

import click
import pytest
from paths import DOCS

from zeropipe.cli.command import Option
from zeropipe.cli.options import COSTS, flag_of

spec = importlib.util.spec_from_file_location("docs_cli", DOCS / "cli.py")
docs_cli = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_cli)
USES = docs_cli.uses()
SIZE = ("--ranks", "2", "--microbatches", "4")


def meaning(option):
    """Everything that `--help` says about an option."""
    kind = {**option.type.to_info_dict(), "name": option.type.name}
    return kind, option.help, option.default, option.is_flag, option.multiple, option.metavar, option.field


def find_conflicts(uses):
    """Names with two meanings, and meanings with two names."""
    meanings, names = {}, {}
    for command, option in uses:
        opts = (*option.opts, *option.secondary_opts)
        for name in opts:
            meanings.setdefault(name, []).append((command, meaning(option)))
        for key in filter(
            None, (("keyword", option.name), ("help", option.help), option.field and ("field", option.field))
        ):
            names.setdefault(key, []).append((command, opts))
    conflicts = [f"{name} in {command} and {found[0][0]}" for name, found in meanings.items()
                 for command, other in found if other != found[0][1]]  # fmt: skip
    conflicts += [f"{key} of {opts} in {command} and of {found[0][1]} in {found[0][0]}" for key, found in names.items()
                  for command, opts in found if opts != found[0][1]]  # fmt: skip
    return conflicts


def test_an_option_has_one_name_and_one_meaning():
    assert find_conflicts(USES) == []


@pytest.mark.parametrize(
    "names, settings, conflict",
    [
        (["--batch"], {"type": click.IntRange(1), "help": "Sequences per microbatch."}, "--batch in other and plan"),
        (["--dtype"], {"type": click.Choice(["bf16"])}, "--dtype in other and"),
        (["--compile/--no-compile"], {"default": True}, "--compile in other and"),
        (["--mesh"], {"is_flag": True}, "--mesh in other and"),
        (["--microbatch-len"], {"field": "data.microbatch"}, "'data.microbatch') of ('--microbatch-len',)"),
        (["--pages"], {"help": "Number of rows to print."}, "'Number of rows to print.') of ('--pages',)"),
    ],
)
def test_a_conflict_is_found(names, settings, conflict):
    found = find_conflicts([*USES, docs_cli.Use("other", Option(names, **settings))])
    assert any(conflict in line for line in found), found


def test_old_names_are_no_names_of_the_same_command():
    for command in {use.command for use in USES}:
        options = [use.option for use in USES if use.command == command]
        visible = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        old = [name for option in options for name in option.old_names]
        assert len(old) == len(set(old)), command
        assert not visible & set(old), command


def test_options_of_training_fields_have_their_choices_and_defaults():
    pytest.importorskip("pydantic")
    from zeropipe.train.config.overrides import choices_of, find_field

    for command, option in USES:
        if not option.field:
            continue
        field = find_field(option.field)
        assert field is not None, f"{command} {option.opts}: no field {option.field}"
        choices = getattr(option.type, "choices", None)
        assert choices is None or tuple(choices) == choices_of(field), option.opts
        if (option.show_default or option.secondary_opts) and not field.is_required():
            assert option.default == field.default, option.opts


def test_the_page_has_all_options(tmp_path):
    """`make cli` writes it."""
    subprocess.run([sys.executable, DOCS / "cli.py", tmp_path / "page.md"], check=True)
    assert (tmp_path / "page.md").read_text() == (DOCS / "cli.md").read_text()


def test_help_lists_single_costs_and_help_costs_describes_them(run):
    for command in ("show", "simulate", "compare", "search", "draw", "app"):
        text = run(command, "--help")[1]
        assert all(f" {flag_of(name)}" in text for name in COSTS)
        assert "Time of an input gradient." not in text
        status, costs, _ = run(command, "--help-costs")
        assert status == 0
        described = "".join(costs.split())
        for name, (_, text) in COSTS.items():
            assert ("".join(text.split()) in described) == (name != "memory_limit"), name


@pytest.mark.parametrize(
    "old, new, note",
    [
        (
            ("run", "zbv", *SIZE, "--dry-run", "--batch", "2"),
            ("--microbatch", "2"),
            "--batch: use --microbatch; in plan",
        ),
        (("run", "zbv", *SIZE, "--dry-run", "--prove"), ("--verify",), ""),
        (("run", "zbv", *SIZE[2:], "--dry-run", "--mesh.pp", "2", "--mesh.tp", "2"), ("--mesh", "pp=2,tp=2"), ""),
        (("search", *SIZE, "--steps", "3"), ("--search-steps", "3"), "--steps: use --search-steps; in run"),
        (("search", *SIZE, "--seconds=0"), ("--search-seconds", "0"), ""),
        (("estimate", "qwen3-0.6b", "--compile", "--microbatch-size", "1,2"), ("--microbatch", "1,2"), ""),
        (("estimate", "qwen3-0.6b", "--compile", "--dtype", "bf16"), ("--dtype", "bfloat16"), ""),
    ],
)
def test_old_names_work_and_those_with_another_meaning_elsewhere_are_noted(run, old, new, note):
    kept = old[: next(n for n, word in enumerate(old) if word.split("=")[0] in OLD)]
    results = [run(*words, "--json") for words in (old, (*kept, *new))]
    assert [status for status, _, _ in results] == [0, 0], results
    first, second = (json.loads(out) for _, out, _ in results)
    for data in (first, second):
        if isinstance(data, dict):
            data.pop("seconds", None)
    assert first == second
    assert results[0][2] == (f"zeropipe: {note}" + results[0][2][len(f"zeropipe: {note}") :] if note else "")
    assert results[1][2] == ""


OLD = {"--batch", "--prove", "--mesh.pp", "--steps", "--seconds", "--microbatch-size", "--dtype"}


def test_a_picture_takes_the_old_name_of_memory_curves(run, tmp_path):
    for name, option in (("a.svg", "--memory"), ("b.svg", "--memory-curves"), ("c.svg", "--no-memory")):
        _, _, err = run("draw", "zbv", *SIZE, "-o", tmp_path / name, option)
        assert err.startswith(f"zeropipe: {option}: use --memory-curves") == (option != "--memory-curves")
    a, b, c = ((tmp_path / f"{name}.svg").read_text() for name in "abc")
    assert a == b != c


def test_a_plan_takes_old_names(run):
    small = (
        "plan",
        "qwen3-0.6b",
        "--gpus",
        2,
        "--batch",
        4,
        "--search-seconds",
        0,
        "--workers",
        1,
        "--compile",
        "--json",
    )
    old = ("--pp", 2, "--microbatch-sizes", 1, "--most", 9, "--dtype", "bf16")
    new = ("--ranks", 2, "--microbatch", 1, "--max-candidates", 9, "--dtype", "bfloat16")
    plans = [json.loads(run(*small, *words)[1]) | {"seconds": 0} for words in (old, new)]
    assert plans[0] == plans[1]
    assert {row["pp"] for row in plans[0]["rows"]} == {2}


def test_blocks_are_not_compiled_by_default_and_an_estimate_says_so(run):
    _, out, err = run("estimate", "qwen3-0.6b", "--json")
    assert not any(setting["compile"] for setting in json.loads(out)["settings"])
    assert err.startswith("zeropipe: estimated without torch.compile")
    assert run("estimate", "qwen3-0.6b", "--no-compile")[2] == ""


def test_float16_is_only_estimated(run):
    assert run("estimate", "qwen3-0.6b", "--dtype", "float16", "--compile")[0] == 0
    for command in (("run", "zbv", *SIZE, "--dry-run"), ("profile", "tiny-qwen3")):
        assert "--dtype float16: can only be estimated" in run(*command, "--dtype", "float16")[2]


def test_train_takes_a_mesh_like_run(run):
    pytest.importorskip("pydantic")
    short = run("train", "--print", "--json", "--model.path", "tiny-qwen3", "--mesh", "pp=2,dp_shard=4")
    long = run("train", "--print", "--json", "--model.path", "tiny-qwen3", "--mesh.pp", 2, "--mesh.dp_shard", 4)
    assert short == long
    assert json.loads(short[1])["mesh"]["dp_shard"] == 4
    assert "mesh 'x=2'" in run("train", "--print", "--model.path", "tiny-qwen3", "--mesh", "x=2")[2]

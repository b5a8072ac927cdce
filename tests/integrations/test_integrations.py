"""What the integrations have in common. They themselves are tested with their frameworks: tests/integrations."""

from importlib.util import find_spec

import pytest

import zeropipe as zp
from zeropipe.errors import ConfigError
from zeropipe.integrations.schedule_choice import choose_schedule


@pytest.mark.parametrize(
    "words, stages, last",
    [("1F1B", 4, 3), ("Interleaved1F1B", 8, 3), ("ZBVZeroBubble", 8, 0), ("v-half", 8, 0), ("zb-h1", 4, 3)],
)
def test_a_name_has_its_stages_and_their_ranks(words, stages, last):
    choice = choose_schedule(words)
    assert choice.num_stages(4, 14, None, 1, 1) == stages
    assert choice.placement(4, stages).rank_of(stages - 1) == last
    assert choice.splits_backward == (words not in ("1F1B", "Interleaved1F1B"))


def test_layers_per_stage_choose_the_stages():
    assert choose_schedule("interleaved").num_stages(2, 10, 2, 1, 1) == 6
    with pytest.raises(ConfigError, match="zbv takes 2 per rank"):
        choose_schedule("zbv").num_stages(2, 10, 2, 1, 1)
    with pytest.raises(ConfigError, match="cannot share"):
        choose_schedule("interleaved").num_stages(2, 11, 3, 1, 1)


def test_a_file_brings_its_stages(tmp_path):
    for name, text in {"a.csv": zp.to_csv, "a.json": zp.to_json}.items():
        (tmp_path / name).write_text(text(zp.build("zbv", ranks=2, microbatches=4)))
        choice = choose_schedule(str(tmp_path / name))
        assert choice.num_stages(2, 10, None, 1, 1) == 4
        assert choice.placement(2, 4).stages_of(0) == (0, 3)
        assert choice.splits_backward
        with pytest.raises(ConfigError, match="is for 2 ranks and 4 stages"):
            choice.num_stages(4, 10, None, 1, 1)
        with pytest.raises(ConfigError, match="leave out the layers per stage"):
            choice.num_stages(2, 10, 2, 1, 1)


def test_wishes_that_cannot_be_met(tmp_path):
    with pytest.raises(ConfigError, match="two copies"):
        choose_schedule("dualpipe")
    with pytest.raises(ConfigError, match="zbv"):
        choose_schedule("zbw")
    with pytest.raises(ConfigError, match=r"missing\.csv"):
        choose_schedule(str(tmp_path / "missing.csv"))
    other = tmp_path / "schedule.txt"
    other.write_text("0F0,0B0")
    with pytest.raises(ConfigError, match="is a file of no known kind: one with a schedule is named"):
        choose_schedule(str(other))
    mirrored = tmp_path / "mirrored.json"
    mirrored.write_text(zp.to_json(zp.build("dualpipe", ranks=2, microbatches=4)))
    with pytest.raises(ConfigError, match="two copies"):
        choose_schedule(str(mirrored))


@pytest.mark.parametrize(
    "name, package",
    [("torchtitan", "torchtitan"), ("archon", "areal"), ("automodel", "nemo_automodel"), ("verl", "verl")],
)
def test_a_missing_framework_is_named_in_one_line(name, package):
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=f"needs .*{package}.*No module named '{package}'"):
        __import__(f"zeropipe.integrations.{name}")

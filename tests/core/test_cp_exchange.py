"""The rule by which attention exchanges heads or keys over `cp`: by heads, length and link."""

import pytest

from zeropipe.core.model.cp_exchange import AttentionHeads, Exchange, choose_exchange, parse_exchange
from zeropipe.errors import ConfigError

WIDE = AttentionHeads(64, 8, 256, tp=8)  # 8 heads and one of keys: those of llama-3-70b on one of 8 processes
ALIKE = AttentionHeads(24, 24, 256)


@pytest.mark.parametrize(
    "heads, cp, sequence, crosses, wanted",
    [
        (WIDE, 8, 2**20, True, "heads"),  # they divide: whatever the length
        (WIDE, 16, None, True, "gather"),  # no length
        (WIDE, 16, 2**18, False, "ring"),  # 2^18 x 8 x 256 elements are 2^29
        (WIDE, 16, 2**18 - 1, False, "gather"),
        (WIDE, 16, 2**16, True, "ring"),  # parts of 4,096 tokens, and 8 heads for each of keys
        (WIDE, 16, 2**16 - 16, True, "gather"),
        (ALIKE, 16, 2**16, True, "gather"),  # a head of keys for each: messages are longer than attention
        (ALIKE, 16, 2**17, True, "ring"),
        (AttentionHeads(30, 6, 256, tp=4), 2, 2**20, True, "gather"),  # heads do not divide over tp
        (AttentionHeads(None, 0, 0), 2, 2**20, True, "gather"),
    ],
)
def test_it_is_chosen_by_heads_length_and_link(heads, cp, sequence, crosses, wanted):
    assert choose_exchange(heads, cp, sequence, crosses=crosses) == Exchange(wanted)
    assert parse_exchange("auto", heads, cp, sequence, crosses=crosses).name == wanted


def test_where_there_can_be_no_ring_keys_are_gathered_with_the_reason():
    assert choose_exchange(WIDE, 16, 2**20, no_ring="it is odd") == Exchange("gather", "it is odd")
    assert choose_exchange(WIDE, 16, 4096, no_ring="it is odd") == Exchange("gather"), "it would be no ring anyway"
    with pytest.raises(ConfigError, match="cp_exchange='ring': it is odd; use heads or gather"):
        parse_exchange("ring", WIDE, 16, 4096, no_ring="it is odd")


def test_a_wish_is_kept_or_refused():
    assert parse_exchange("ring", WIDE, 8) == Exchange("ring")
    with pytest.raises(ConfigError, match="cp_exchange='heads': cp=16 x tp=8 must divide num_attention_heads=64; use"):
        parse_exchange("heads", WIDE, 16)
    with pytest.raises(ConfigError, match="cp_exchange='rings': must be auto, heads, gather or ring"):
        parse_exchange("rings", WIDE, 16)

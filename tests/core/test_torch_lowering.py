"""Our lowering against torch's own: the same messages in the same places."""

import pytest

import zeropipe as zp

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")

ONE_COPY = [
    ("gpipe", 4, 6), ("1f1b", 4, 9), ("interleaved", 4, 8), ("interleaved", 3, 6), ("looped-bfs", 3, 4),
    ("interleaved-zb", 4, 8), ("zb-h1", 4, 8), ("zb-h2", 4, 10), ("zbv", 4, 9), ("zbv", 3, 2), ("v-half", 4, 9),
    ("v-min", 4, 9), ("dualpipev", 4, 10), ("1f1b-overlap", 4, 8), ("interleaved-overlap", 4, 8), ("hanayo", 2, 6),
]  # fmt: skip


@pytest.mark.parametrize("name,ranks,microbatches", ONE_COPY)
def test_messages_are_where_torch_puts_them(name, ranks, microbatches):
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    rows = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(zp.to_csv(schedule).splitlines())
    }
    theirs = torch_schedules._add_send_recv(rows, schedule.placement.rank_of, schedule.num_stages)
    ours = zp.lower(schedule)
    for rank in range(ranks):
        assert [str(step) for step in ours.rows[rank]] == [str(action) for action in theirs[rank]]

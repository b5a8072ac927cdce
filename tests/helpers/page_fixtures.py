"""The page in a real Chromium, for tests: fixtures `address` and `visit`, and what a person does and reads there."""

import threading
from urllib.parse import parse_qs, urlparse

import pytest

READY = "main[aria-busy=false] [data-painted]"


@pytest.fixture(scope="module")
def address():
    uvicorn = pytest.importorskip("uvicorn", reason="the app extra is not installed")
    from zeropipe.app.serve import listen, page_address
    from zeropipe.app.server import create_app

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield page_address(listener)
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def visit(watched, address):
    def go(query="", wait=READY, **options):
        return watched(address + query, wait=wait, **options)

    go.expected = watched.expected
    return go


def settle(page):
    page.wait_for_selector("main[aria-busy=false]")


def rows(page):
    """What the comparison says: {title: (makespan, idle, peak memory)}."""
    found = {}
    for body in page.query_selector_all(".compare tbody"):
        figures = [cell.inner_text().split("\n")[0] for cell in body.query_selector_all("tr:first-child > td > b")]
        found[body.query_selector(".name").inner_text()] = tuple(figures)
    return found


def drop(page, name, text):
    """Let go of a file above the page."""
    page.evaluate(
        """([name, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name));
            for (const kind of ["dragenter", "dragover", "drop"]) {
                const how = { dataTransfer: data, bubbles: true, cancelable: true };
                document.body.dispatchEvent(new DragEvent(kind, how));
            }
        }""",
        [name, text],
    )


def query(page):
    page.wait_for_timeout(150)  # the address is written a moment after the change
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).query).items()}

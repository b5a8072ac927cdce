"""A real Chromium for tests: fixtures `browser` and `watched`. Skips, with the reason, only where none is installed."""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--no-first-run"]  # fmt: skip
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the PATH")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=ARGS)
        yield opened
        opened.close()


@pytest.fixture
def watched(browser):
    """Opens pages; at the end none may have logged an error or asked another host for anything."""
    complaints, contexts = [], []

    def open_page(url, size=DESKTOP, wait="[data-painted]", hosts=("127.0.0.1", "localhost"), **options):
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)  # what is waited for comes at once, unless other tests keep the machine busy
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "console",
            lambda message: message.type in ("error", "warning") and complaints.append(f"logged {message.text}"),
        )
        page.on("request", lambda request: _foreign(request.url, hosts) and complaints.append(f"asked {request.url}"))
        page.goto(url)
        if wait:
            page.wait_for_selector(wait)
        return page

    open_page.complaints = complaints
    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _foreign(url, hosts):
    if url.startswith(("file:", "data:", "blob:")):
        return False
    return url.split("/")[2].split(":")[0] not in hosts


@contextmanager
def expected(complaints):
    """What is logged inside is taken off the list, for tests of errors."""
    before = len(complaints)
    yield
    del complaints[before:]

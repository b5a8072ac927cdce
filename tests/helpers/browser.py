"""A real Chromium for tests: fixtures `browser`, `pages` and `watched`. Where there is none, tests are skipped.

Chromium's headless shell comes first: the whole browser spends as much time on the frame around a page as on the page.
"""

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
NO_BROWSER = (
    f"browser tests need Chromium, and none of {', '.join(NAMES)} is on the PATH: "
    "apt-get install chromium-headless-shell (or chromium), then run them again"
)
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--no-first-run"]  # fmt: skip
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(NO_BROWSER)
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=ARGS)
        yield opened
        opened.close()


def fold_skips(reports):
    """Give tests skipped for want of Chromium one place: pytest prints one line, with their number, for it."""
    for report in reports:
        if isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(NO_BROWSER):
            report.longrepr = (__file__, None, NO_BROWSER)


class Pages:
    """Pages of one browser, each with a context of its own, for one test after the other.

    A page that was used before costs a quarter of a new one: its process has read the page's code already.
    """

    def __init__(self, browser):
        self._browser, self._free = browser, {}

    def take(self, size, options):
        kind = (tuple(size.items()), tuple(options.items()))
        if self._free.get(kind):
            return kind, self._free[kind].pop()
        page = self._browser.new_context(viewport=size, **options).new_page()
        page.set_default_timeout(150_000)  # what is waited for comes at once, unless other tests keep the machine busy
        return kind, page

    def give_back(self, kind, page):
        """Forget what a test did: what the page stored, its size, where the pointer is, what was granted."""
        try:
            page.unroute_all(behavior="ignoreErrors")
            page.mouse.move(0, 0)
            page.evaluate("localStorage.clear(), sessionStorage.clear()")
            page.goto("about:blank")
            page.set_viewport_size(dict(kind[0]))
            page.context.clear_cookies()
            page.context.clear_permissions()
        except Exception:  # a page in no state to be used again
            page.context.close()
        else:
            self._free.setdefault(kind, []).append(page)


@pytest.fixture(scope="module")
def pages(browser):
    return Pages(browser)


@pytest.fixture
def watched(pages):
    """Opens pages; at the end none may have logged an error or asked another host for anything."""
    complaints, opened, asked = [], [], set()

    def open_page(url, size=DESKTOP, wait="[data-painted]", hosts=("127.0.0.1", "localhost"), **options):
        kind, page = pages.take(size, options)
        heard = {
            "pageerror": lambda error: complaints.append(f"error: {error}"),
            "console": lambda said: said.type in ("error", "warning") and complaints.append(f"logged {said.text}"),
            "request": lambda request: asking(request, hosts),
            "requestfinished": lambda request: asked.discard(request),
            "requestfailed": lambda request: asked.discard(request),
        }
        for event, hear in heard.items():
            page.on(event, hear)
        opened.append((kind, page, heard))
        page.goto(url)
        if wait:
            page.wait_for_selector(wait)
        return page

    def asking(request, hosts):
        asked.add(request)
        if _foreign(request.url, hosts):
            complaints.append(f"asked {request.url}")

    @contextmanager
    def expected():
        """For tests of errors: something is logged inside, and so is what comes of the requests made inside."""
        before = len(complaints)
        yield
        for _ in range(600):
            opened[-1][1].wait_for_timeout(50)  # hears what the pages say
            if len(complaints) > before and not asked:
                break
        assert len(complaints) > before, "nothing was logged"
        del complaints[before:]

    open_page.expected = expected
    yield open_page
    for kind, page, heard in opened:
        for event, hear in heard.items():
            page.remove_listener(event, hear)
        pages.give_back(kind, page)
    assert not complaints, "; ".join(complaints)


def point_at(page, target, x, y, shows):
    """Move the pointer over a place until what it shows is there, as a hand does: a page may still move its parts."""
    for attempt in range(20):
        box = target.bounding_box()
        page.mouse.move(box["x"] + x + attempt % 2, box["y"] + y)
        for _ in range(20):
            if page.locator(shows).count():
                return
            page.wait_for_timeout(100)
    page.wait_for_selector(shows)


def _foreign(url, hosts):
    if url.startswith(("file:", "data:", "blob:")):
        return False
    return url.split("/")[2].split(":")[0] not in hosts

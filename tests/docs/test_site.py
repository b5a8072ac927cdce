"""The documentation site: its API pages are complete, it builds without a broken link, and works in a browser."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from paths import DOCS, ROOT

import zeropipe
import zeropipe.engine

SITE = DOCS / "site"


@pytest.fixture(scope="module")
def api_pages():
    return load_script("api").write_pages()


@pytest.fixture(scope="module")
def compare_page():
    return load_script("compare")


def load_script(name):
    spec = spec_from_file_location(name, SITE / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", [zeropipe, zeropipe.engine], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module, api_pages):
    sections = dict(part.split("\n", 1) for part in api_pages[f"{module.__name__}.md"].split("\n## ")[1:])
    assert set(sections) == set(module.__all__)
    for name, text in sections.items():
        outside_code = "".join(text.split("```")[::2]).strip()
        assert outside_code, f"{name} has no docstring"


def test_signatures_are_those_of_the_source(api_pages):
    page = api_pages["zeropipe.md"]
    assert "check(what: Schedule | Program) -> None" in page
    assert "Action(stage: int, kind: Kind, microbatch: int)" in page
    assert "<factory>" not in page
    assert "ForwardRef" not in page


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site") / "html"
    run = subprocess.run(
        [sys.executable, SITE / "build.py", target], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return target


@pytest.mark.full
def test_the_site_builds_strictly_and_has_all_tracks(site):
    index = (site / "docs" / "README.html").read_text()
    for caption in ("See schedules", "Plan a run", "Train", "Plug into another trainer", "Look up", "Project"):
        assert f'<span class="caption-text">{caption}</span>' in index


@pytest.mark.full
@pytest.mark.parametrize("width, height", [(1280, 800), (390, 800)], ids=["laptop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_a_browser(site, browser, width, height, scheme):
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    for name in ("README", "concepts", "simulate", "measurements", "api/zeropipe"):
        page.goto(f"file://{site}/docs/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    page.goto(f"file://{site}/docs/concepts.html")
    page.locator("article img").first.click()
    assert page.locator("dialog.zoom img").bounding_box()["width"] >= min(width, 1000)
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.zoom", state="detached")
    page.goto(f"file://{site}/search.html?q=bubble")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    assert complaints == []
    context.close()


def test_results_of_the_comparison_are_those_of_the_simulator(compare_page):
    costs = compare_page.COSTS["link"][1]
    results = compare_page.simulate_all(2, 2, costs)
    for name, shown in results["timelines"].items():
        schedule = zeropipe.build(name, ranks=2, microbatches=2)
        expected = zeropipe.simulate(schedule, costs.stage_costs(schedule.problem))
        assert shown["makespan"] == expected.makespan
    assert set(results["timelines"]) | set(results["errors"]) == set(zeropipe.names())
    assert "zbv" in results["timelines"]


@pytest.mark.full
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")], ids=["laptop", "phone"])
def test_the_comparison_in_a_browser(site, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(f"file://{site}/play/index.html")
    page.wait_for_selector(".zp-panel canvas")
    assert page.locator(".zp-panel h2").all_inner_texts() == ["zbv", "zb-h1", "1f1b"]
    page.select_option("[name=ranks]", "8")
    page.click("#schedules button:text-is('v-min')")
    page.wait_for_function("document.querySelectorAll('.zp-panel').length === 4")
    assert page.evaluate("location.hash") == "#8x16-equal,1f1b,zb-h1,zbv,v-min"
    expected = zeropipe.simulate(zeropipe.build("zbv", ranks=8, microbatches=16), zeropipe.Costs(f=0.5, i=0.5, w=0.5))
    assert f"makespan {expected.makespan:g}" in page.locator(".zp-panel").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    context.close()

"""The documentation site: its API pages are complete, it builds without a broken link, and works in a browser."""

import json
import re
import shutil
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
    spec = spec_from_file_location(name.replace("/", "_"), SITE / f"{name}.py")
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
    fields = ("stage: int", "kind: Kind", "microbatch: int", "slice: int | None = None", "checkpointed: bool = False")
    action = page.partition("## Action\n")[2].partition("```\n")[0]
    assert [line.strip(" ,") for line in action.splitlines() if ":" in line] == list(fields)
    assert "<factory>" not in page
    assert "ForwardRef" not in page


def test_every_page_is_in_the_navigation(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SITE), *sys.path])
    navigation = load_script("build").navigation((DOCS / "README.md").read_text())
    listed = set(re.findall(r"^[a-z-]+\.md$", navigation, re.MULTILINE))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


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


COSTS = {"f": "1, 1, 1, 1.3", "i": "1.4", "w": "0.6", "p2p": "0.1", "memory_limit": "4"}


def plain_results(names, ranks, microbatches):
    """Makespan and peak memory by name, without the page's code."""
    costs = zeropipe.Costs(f=[1, 1, 1, 1.3], i=1.4, w=0.6, p2p=0.1, memory_limit=4)
    found = {}
    for name in names:
        schedule = zeropipe.build(name, ranks=ranks, microbatches=microbatches)
        timeline = zeropipe.simulate(schedule, costs.stage_costs(schedule.problem, schedule.placement))
        found[name] = (timeline.makespan, list(timeline.peak_memory))
    return found


def test_results_of_the_comparison_are_those_of_the_simulator(compare_page):
    names = ["1f1b", "zbv", "interleaved", "chimera", "dualpipev"]
    request = {"ranks": "4", "microbatches": "12", "schedules": names, **COSTS}
    seen = json.loads(load_script("play/results").answer(json.dumps(request)))
    assert {name: (one["makespan"], one["peakMemory"]) for name, one in seen["timelines"].items()} == plain_results(
        names, 4, 12
    )
    assert set(compare_page.simulate_all(["zbv", "dualpipe"], 5, 5, zeropipe.Costs())["errors"]) == {"dualpipe"}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"ranks": "four"}, "ranks='four': must be a positive integer"),
        ({"ranks": "2.5"}, "ranks=2.5: must be a positive integer"),
        ({"microbatches": ""}, "microbatches='': must be a positive integer"),
        ({"f": "1, 2"}, "f"),
        ({"w": "x"}, "w='x': must be a number"),
        ({"i": "nan"}, "i=nan"),
        ({"p2p": "-1"}, "p2p=-1.0"),
        ({"memory_limit": "1e300"}, "memory_limit=1e+300"),
        (
            {"ranks": "512", "microbatches": "100000"},
            "use fewer ranks, stages or microbatches, or use zeropipe compare",
        ),
        ({"ranks": "9999"}, "ranks=9999: this page takes up to 1,024"),
        ({"schedules": ["nosuch"]}, "unknown schedule"),
    ],
)
def test_wrong_fields_of_the_comparison_are_named_in_one_line(changes, said):
    request = {"ranks": "4", "microbatches": "8", "schedules": ["1f1b"], **COSTS, "f": "1"} | changes
    seen = json.loads(load_script("play/results").answer(json.dumps(request)))
    line = seen.get("error") or seen["errors"]["1f1b"]
    assert line.startswith(said) or said in line
    assert "\n" not in line


IN_BROWSER = """
import sys
sys.modules.update(dict.fromkeys(("numpy", "numba", "rich", "click", "pydantic")))
sys.path.insert(0, sys.argv[1])
import results
assert ".zip" in results.__file__, results.__file__
print(results.answer(sys.argv[2]))
"""


def test_the_files_of_the_page_are_complete(tmp_path):
    """What the browser imports runs from the zip alone, without the site and without packages."""
    (tmp_path / "zeropipe.zip").write_bytes(load_script("browser_python").zip_package())
    request = {"ranks": "4", "microbatches": "8", "schedules": zeropipe.names(), **COSTS}
    command = [sys.executable, "-I", "-S", "-c", IN_BROWSER, tmp_path / "zeropipe.zip", json.dumps(request)]
    seen = json.loads(subprocess.check_output(command, text=True, timeout=120, cwd=tmp_path))
    assert seen["errors"] == {}
    expected = plain_results(zeropipe.names(), 4, 8)
    assert {name: (one["makespan"], one["peakMemory"]) for name, one in seen["timelines"].items()} == expected


def test_without_npm_the_page_has_its_grid(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    assert load_script("browser_python").write_files(tmp_path / "python", tmp_path / "npm") is None
    assert "does not answer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_python_than_the_pinned_one_is_refused(tmp_path):
    script = load_script("browser_python")
    (tmp_path / f"pyodide-{script.VERSION}.tgz").write_bytes(b"another")
    with pytest.raises(SystemExit, match="checksum differs"):
        script.fetch(tmp_path)


@pytest.fixture(scope="module")
def play(tmp_path_factory, compare_page):
    """The page with Python, and one that was built without."""
    folders = tmp_path_factory.mktemp("play")
    compare_page.write_page(folders / "python", ROOT / "build" / "npm")
    if not (folders / "python" / "python").exists():
        pytest.skip("npm cannot be reached")
    shutil.copytree(folders / "python", folders / "grid", ignore=shutil.ignore_patterns("python"))
    script = (folders / "grid" / "compare.js").read_text()
    found = re.search(r'"python": (\{.*?\})\};', script)
    (folders / "grid" / "compare.js").write_text(script.replace(found[1], "null"))
    return folders


def open_comparison(browser, folder, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.set_default_timeout(200_000)  # a busy machine takes a minute to start Python
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else complaints.append(asked.url))
    page.goto(f"file://{folder}/index.html")
    page.wait_for_selector(".zp-panel canvas")
    return page, complaints


@pytest.mark.full
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")], ids=["laptop", "phone"])
def test_the_comparison_of_the_grid_in_a_browser(play, browser, width, scheme):
    page, complaints = open_comparison(browser, play / "grid", width, scheme)
    assert page.locator(".zp-panel h2").all_inner_texts() == ["zbv", "zb-h1", "1f1b"]
    page.fill("[name=ranks]", "8")
    page.fill("[name=microbatches]", "16")
    page.click("#schedules button:text-is('v-min')")
    page.wait_for_function("document.querySelectorAll('.zp-panel').length === 4")
    assert "ranks=8&microbatches=16" in page.evaluate("location.hash")
    expected = zeropipe.simulate(zeropipe.build("zbv", ranks=8, microbatches=16), zeropipe.Costs(f=0.5, i=0.5, w=0.5))
    assert f"makespan {expected.makespan:g}" in page.locator(".zp-panel").first.inner_text()
    page.select_option("[name=costs]", "link")
    page.wait_for_function("location.hash.includes('p2p=0.2')")
    page.fill("[name=ranks]", "7")
    page.wait_for_function("document.getElementById('about').textContent.startsWith('Without Python')")
    assert "was built without Python" in page.inner_text("#python")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.context.close()


@pytest.mark.full
@pytest.mark.parametrize("width, scheme", [(1280, "dark"), (390, "light")], ids=["laptop", "phone"])
def test_the_comparison_of_any_numbers_in_a_browser(play, browser, width, scheme):
    """Python in WebAssembly gives the numbers of this Python."""
    page, complaints = open_comparison(browser, play / "python", width, scheme)
    page.wait_for_selector("#python[data-ready=true]")
    for name, value in {"ranks": "4", "microbatches": "12", **COSTS}.items():
        page.fill(f"[name={name}]", value)
    names = ["1f1b", "zb-h1", "zbv", "interleaved"]
    page.click("#schedules button:text-is('interleaved')")
    page.wait_for_function("document.querySelectorAll('.zp-panel').length === 4")
    shown = {panel.locator("h2").inner_text(): panel.inner_text() for panel in page.locator(".zp-panel").all()}
    expected = plain_results(names, 4, 12)
    assert shown.keys() == expected.keys()
    for name, (makespan, memory) in expected.items():
        assert f"makespan {round(makespan, 3):g} " in shown[name], (name, makespan)
        assert f"peak memory {round(max(memory), 3):g}" in shown[name], (name, memory)
    request = {"ranks": "4", "microbatches": "12", "schedules": zeropipe.names(), **COSTS}
    seen = page.evaluate("request => askPython(request)", request)
    found = {name: (one["makespan"], one["peakMemory"]) for name, one in seen["timelines"].items()}
    assert found == plain_results(zeropipe.names(), 4, 12)
    page.fill("[name=ranks]", "0")
    page.wait_for_function("document.getElementById('about').textContent.includes('ranks=0: must be')")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    page.context.close()

"""The Plan page and the search dialog in a real Chromium."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from browser import PHONE
from page_fixtures import drop, rows, settle

import zeropipe as zp
from zeropipe.app import plan_calls
from zeropipe.core.model.configs import CONFIGS_BY_SHAPE
from zeropipe.sim.layer_file import to_layer_json

ASKED = "plan?model=qwen3-0.6b&gpus=2&gpus_per_node=2&batch=8&sequence=1024"
SHOWN = "#viewer [data-painted]"


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(plan_calls, "MAX_CANDIDATES", 40)
    monkeypatch.setattr(plan_calls, "MAX_DOTS", 3)


def test_a_plan_is_ranked_drawn_and_its_rows_can_be_chosen(visit):
    page = visit(ASKED, wait=SHOWN)
    plan = zp.plan(
        "qwen3-0.6b", gpus=2, gpus_per_node=2, batch=8, sequence=1024, search_seconds=0, max_candidates=40, workers=1
    )
    best = plan.best.candidate
    assert page.inner_text("#headline").startswith(f"{best.schedule}, pp {best.layout.pp} ×")
    assert len(page.query_selector_all("#rows tbody tr")) == len(plan.rows[:40])
    assert len(page.query_selector_all(".on-front")) == len(plan.front)
    tops = page.evaluate("[...document.querySelectorAll('.on-front')].map((one) => Number(one.getAttribute('cy')))")
    assert min(tops) > 0, "the slowest of the front is in the picture"
    assert page.inner_text("#tried").startswith(f"{plan.num_tried} tried")
    assert f"({plan.num_left_out} with more work left out), {len(plan.rows)} fit" in page.inner_text("#tried")
    shares = page.evaluate("[...document.querySelector('.filling').children].map((one) => parseFloat(one.style.width))")
    assert sum(shares) == pytest.approx(100 * plan.best.memory.peak / plan.best.limit, abs=0.1)
    page.click("#rows tbody tr:nth-child(2) button")
    page.wait_for_selector("#rows tr:nth-child(2)[aria-selected=true]")
    second = plan.rows[1]
    page.wait_for_function("(name) => document.querySelector('.zp-panel h2').textContent.startsWith(name)",
                           arg=second.candidate.schedule)  # fmt: skip
    assert page.inner_text("#about-row p") == plan.why(second)
    page.locator(".on-front").first.press("Enter")
    assert "×" in page.inner_text("#row-of")
    page.fill("#in-gpus", "many")
    with visit.expected():  # the browser logs the answer 422
        page.click("#form button[type=submit]")
        page.wait_for_selector("#error-gpus:not([hidden])")
    assert "gpus='many'" in page.inner_text("#error-gpus")
    assert "gpus=many" in page.url


def test_back_leads_to_the_plan_before_and_a_wrong_link_keeps_its_words(visit):
    page = visit(ASKED, wait=SHOWN)
    page.fill("#in-batch", "16")
    page.press("#in-batch", "Enter")
    page.wait_for_function("() => location.search.includes('batch=16') && document.querySelector('[aria-busy=false]')")
    page.go_back()
    page.wait_for_selector(SHOWN)
    assert page.input_value("#in-batch") == "8"
    assert "batch=8" in page.url
    with visit.expected():  # the browser logs the answer 422
        page.goto(page.url.replace("model=qwen3-0.6b", "model=nope"))
        page.wait_for_selector("#error-model:not([hidden])")
    assert "model='nope'" in page.inner_text("#error-model")
    assert "model=nope" in page.url


def test_an_own_file_is_dropped_planned_saved_as_a_run_and_kept_by_the_link_or_the_tab(visit, monkeypatch):
    monkeypatch.setattr(plan_calls, "MAX_CANDIDATES", 3)
    page = visit("plan", wait=".own")
    drop(page, "mine.json", json.dumps(CONFIGS_BY_SHAPE["qwen3-0.6b"]))
    page.wait_for_selector("#own-note:has-text('qwen3, 28 layers. The link carries it.')")
    page.click("#form button[type=submit]")
    page.wait_for_selector("#save-run:enabled")
    assert page.inner_text("#in-model option:checked") == "mine.json (0.596B)"
    assert page.text_content("#in-model option[value=kimi-k2]") == "kimi-k2 (1030B)"
    with page.expect_download() as saved:
        page.click("#save-run")
    assert saved.value.suggested_filename == "run.toml"
    assert 'path = "mine.json"' in Path(saved.value.path()).read_text()
    asked, link = [], page.url
    page.route("**/api/plan", lambda route: asked.append(route.request.post_data_json))  # no answer comes
    page.evaluate("sessionStorage.clear()")
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector("main[aria-busy=true]")
    noise = "".join(Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=30_000))
    page.click(".own .link")
    page.fill("#pasted", json.dumps({"model_type": noise}))
    page.click("#paste .strong")
    page.wait_for_selector("#own-note:has-text('It is too large for a link: only this tab keeps it.')")
    page.click("#form button[type=submit]")
    page.reload()
    page.wait_for_selector("main[aria-busy=true]")
    assert [(one["model"], len(one["file"])) for one in asked[::2]] == [
        ("mine.json", len(json.dumps(CONFIGS_BY_SHAPE["qwen3-0.6b"]))),
        ("config.json", 30_000 + len('{"model_type": ""}')),
    ]
    page.evaluate("history.replaceState(null, '', location.href.replace(/[0-9]$/, 'x'))")  # of another text
    page.reload()
    page.wait_for_selector("#error-model:has-text('this link does not carry config.json')")
    page.fill("#in-sequence", "1024")
    page.click(".own .link")
    page.fill("#pasted", to_layer_json(zp.estimate("qwen3-0.6b", gpu="h200")))
    page.click("#paste .strong")
    page.wait_for_selector("#own-note:has-text('costs.json, estimated costs of qwen3-0.6b, 28 layers. The link')")
    assert page.inner_text("#in-gpu option:checked") == "h200"
    assert (page.input_value("#in-sequence"), page.is_disabled("#in-sequence")) == ("4096", True)
    assert page.get_attribute("#in-memory", "placeholder") == "141"
    with page.expect_request("**/api/plan") as sent:
        page.click("#form button[type=submit]")
    assert sent.value.post_data_json.keys() == {"model", "file", "gpus", "gpus_per_node", "batch"}
    page.select_option("#in-model", "qwen3-8b")
    assert (page.input_value("#in-sequence"), page.is_disabled("#in-sequence")) == ("1024", False)
    assert (page.input_value("#in-gpu"), page.is_visible("#from-file-gpu")) == ("h100", False)
    drop(page, "huge.json", " " * (2**18 + 1))
    page.wait_for_selector("#error-model:has-text('huge.json is longer than 256 KiB')")
    page.goto(link.partition("#")[0])
    page.wait_for_selector("#error-model:has-text('this link does not carry mine.json')")


def test_a_plan_with_copies_to_the_host_is_shown_and_saved_with_its_schedule(visit):
    """Of rows without copies the schedule has a name, and there is nothing more to save."""
    page = visit("plan?gpus=2&batch=8&sequence=512&pp=2&tp=1&ac=none&memory=0.01&reserve=0", wait=".own")
    tiny = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}  # fmt: skip
    drop(page, "tiny.json", json.dumps(tiny))
    page.wait_for_selector("#own-note:has-text('qwen3, 4 layers.')")
    page.click("#form button[type=submit]")
    page.wait_for_selector("#save-run:enabled")
    page.wait_for_selector(SHOWN)
    assert page.inner_text("#row-of").endswith("with copies to the host")
    assert "offload" in page.inner_text("#rows tbody tr:first-child")
    assert "Save it beside tiny.json and run.schedule.json." in page.inner_text(".run-file .note")
    saved = {}
    for name in ("save-run", "save-schedule"):
        with page.expect_download() as download:
            page.click(f"#{name}")
        saved[download.value.suggested_filename] = Path(download.value.path()).read_text()
    assert saved.keys() == {"run.toml", "run.schedule.json"}
    assert 'name = "run.schedule.json"' in saved["run.toml"]
    made = zp.plan(
        tiny, gpus=2, batch=8, sequence=512, pp=2, tp=1, ac="none", memory=1e7, reserve=0,
        search_seconds=0, max_candidates=40, workers=1,
    )  # fmt: skip
    assert zp.from_json(saved["run.schedule.json"]) == made.best.schedule
    page.fill("#in-memory", "80")
    page.click("#form button[type=submit]")
    page.wait_for_selector("#row-of:not(:has-text('copies'))")
    page.wait_for_selector("#save-run:enabled")
    assert not page.is_visible("#save-schedule")


def test_what_does_not_fit_is_shown_with_links_to_plans_that_fit(visit):
    page = visit("plan?model=llama-3-70b&gpus=8&batch=16&sequence=1024&pp=8&tp=1&ac=full&reserve=5", wait="#closest li")
    made = zp.plan(
        "llama-3-70b", gpus=8, batch=16, sequence=1024, pp=8, tp=1, ac="full", reserve=5e9, search_seconds=0, workers=1
    )
    closest = made.closest
    assert page.inner_text("#headline") == "Nothing fits into 75.0 GB"
    assert page.inner_text("#status") == made.describe_closest()
    assert not page.is_visible("#planned")
    assert page.inner_text("#closest-of") == str(closest.row.candidate)
    items = [one.inner_text() for one in page.query_selector_all("#about-closest dt")]
    assert items == ["weights", "gradients", "optimizer", "activations", "workspace"]
    assert page.inner_text("#about-closest dd") == f"{closest.row.memory.weights / 1e9:.1f} GB"
    assert len(page.query_selector_all("#about-closest li")) == len(closest.ways_out) > 1
    assert page.inner_text("#untried").startswith("Not tried: ")
    assert page.get_attribute("#untried span", "title")
    page.click("#about-closest a:has-text('lora rank 16')")
    page.wait_for_selector(SHOWN)
    assert (page.input_value("#in-lora"), page.input_value("#in-reserve")) == ("16", "5")
    assert (page.input_value("#in-pp"), page.input_value("#in-ac")) == ("8", "full")
    assert not page.is_visible("#closest")
    assert page.inner_text("#tried").endswith(" fit into 75.0 GB (80.0 GB − 5.0 GB reserve)")
    assert page.inner_text("#untried").startswith("Not tried: tensor parallelism, ")


def test_a_plan_that_takes_its_time_tells_for_how_long(visit):
    page = visit(ASKED, wait=SHOWN)
    page.route("**/api/plan", lambda route: None)  # no answer comes
    page.press("#in-batch", "Enter")
    page.wait_for_selector("#since:not([hidden])")
    assert page.inner_text("#since").endswith("s so far; large models on many GPUs take minutes")


def test_the_plan_fits_a_phone_in_the_dark(visit):
    page = visit(ASKED, wait=SHOWN, size=PHONE, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.is_visible("#in-batch")
    bar = page.locator(".filling").first.bounding_box()
    assert bar["x"] + bar["width"] <= PHONE["width"]


def test_a_search_shows_its_gap_and_what_it_found_is_compared(visit):
    page = visit("?ranks=2&microbatches=4&schedules=1f1b&memory_limit=2&w=0.5")
    page.click("#open-search")
    page.wait_for_selector("dialog[data-state=done]")
    assert page.inner_text("#search .big") in ("Proven best",) or "gap" in page.inner_text("#search .big")
    note = page.inner_text("#search .note")
    assert note.startswith("Of the schedules with 1 stage per rank and one copy of the model: ")
    assert "idle" in note
    assert page.get_attribute(".search-gap path", "d").startswith("M")
    page.click("#search .strong")
    page.wait_for_selector(".compare tbody[data-choice=searched]")
    settle(page)
    found = float(rows(page)["searched"][0])
    assert found <= zp.simulate(zp.build("1f1b", ranks=2, microbatches=4), zp.Costs(w=0.5)).makespan
    other = zp.to_json(replace(zp.build("gpipe", ranks=2, microbatches=4), name="searched"))
    sizes = {"unit": "", "memory_unit": "", "peak_memory": 4, "idle_fraction": 0.2, "named": None}
    answer = {"value": 12.5, "bound": 12.5, "seen": [], "seconds": 0.5, "schedule": other, "searched": "", **sizes}
    page.route("**/api/search", lambda route: route.fulfill(json=answer))
    page.click("#open-search")
    page.wait_for_selector("dialog[data-state=done]")
    page.click("#search .strong")
    page.wait_for_selector(".compare tbody:nth-of-type(3)")
    settle(page)
    assert list(rows(page)) == ["1f1b", "searched (file, simulated)", "searched (file, simulated, 2)"]
    page.route("**/api/search", lambda route: route.fulfill(status=422, json={"errors": [{"message": "no"}]}))
    with visit.expected():
        page.click("#open-search")
        page.wait_for_selector("dialog[data-state=done] #error-search:not([hidden])")
    assert page.inner_text("#search .big") == "Nothing found"

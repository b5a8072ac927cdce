"""How the page looks in a real Chromium: on a phone, in light and dark, to keys and readers, and at a glance."""

import pytest
from browser import PHONE
from full_marker import mark_rest_full
from page_fixtures import READY, drop, rows, settle

import zeropipe as zp


def test_the_headline_holds_only_the_same_work_against_each_other(visit):
    page = visit("?schedules=", wait="main[aria-busy=false]")
    for n, (name, ranks) in enumerate((("1f1b", 2), ("zbv", 2), ("1f1b", 4))):
        drop(page, f"{name}-{ranks}.csv", zp.to_csv(zp.build(name, ranks=ranks, microbatches=8)))
        page.wait_for_selector(f".compare tbody:nth-of-type({n + 1})")
        settle(page)
        if n == 1:
            assert page.inner_text("h1").startswith("zbv-2 is fastest: ")
    assert page.inner_text("h1").endswith("less time than 1f1b-2, with 2 ranks · 8 microbatches")
    assert "different sizes" in page.inner_text("#status")
    assert "other work" in page.inner_text(".compare tbody:nth-of-type(3)")


def test_what_is_over_the_limit_does_not_win(visit):
    page = visit("?schedules=1f1b,zbv,v-half&microbatches=12&memory_limit=3.5")
    assert page.inner_text("h1") == "Only v-half fits the memory limit"
    assert "fastest" not in page.inner_text(".compare tbody[data-choice=zbv]")
    assert "fastest" in page.inner_text(".compare tbody[data-choice=v-half]")
    page.click("#tab-costs")
    page.fill("#in-memory_limit", "1")
    settle(page)
    assert page.inner_text("h1") == "None fits the memory limit of 1"
    assert "fastest" not in page.inner_text(".compare")


def test_nothing_chosen_offers_a_beginning_and_few_microbatches_are_advised_against(visit):
    page = visit("?schedules=&ranks=8&microbatches=4", wait="main[aria-busy=false]")
    page.click("text=Zero bubble")
    settle(page)
    assert list(rows(page)) == ["1f1b", "zb-h1", "zbv"]
    [advice] = zp.advice(zp.build("zbv", ranks=8, microbatches=4))
    assert page.inner_text(".compare tbody[data-choice=zbv] .advice") == advice
    page.fill("#in-microbatches", "32")
    settle(page)
    assert not page.is_visible(".advice")


@pytest.mark.parametrize("width", mark_rest_full([1440, 390], [390]))
def test_names_in_the_chart_do_not_lie_on_each_other(visit, width):
    page = visit("?schedules=1f1b,zbv,v-half", size={"width": width, "height": 900})
    for ranks, microbatches, most in ((4, 8, 8), (8, 96, 96), (2, 64, 64)):  # the last two crowd at the left
        page.fill("#in-ranks", str(ranks))
        page.fill("#in-microbatches", str(microbatches))
        page.wait_for_selector(f"#chart[aria-busy=false] [data-name=gpipe][aria-label*='peak memory {most}']")
        boxes = page.evaluate(
            "[...document.querySelectorAll('.chart text')].map((one) => [one.textContent, one.getBoundingClientRect()])"
        )
        assert {"1f1b", "zbv", "v-half"} <= {name for name, _ in boxes}
        for n, (name, a) in enumerate(boxes):
            for other, b in boxes[:n]:
                apart = a["left"] >= b["right"] or b["left"] >= a["right"] or a["top"] + 2 >= b["bottom"]
                assert apart or b["top"] + 2 >= a["bottom"], f"{name} lies on {other} with {ranks} ranks"


def test_everything_is_reached_by_keys(visit):
    page = visit("?schedules=1f1b")
    page.focus("#tab-schedules")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#in-f")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible(".card")
    seen = set()
    page.evaluate("document.activeElement.blur()")
    for _ in range(70):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(
            "(({ id, className, tagName }) => id || className.baseVal || className || tagName)(document.activeElement)"
        ))  # fmt: skip
    assert {
        "in-ranks",
        "in-microbatches",
        "in-stages_per_rank",
        "in-weight_parts",
        "tab-schedules",
        "card",
        "choose-file",
        "share",
    } <= seen
    assert any("dot" in name for name in seen)
    assert "zp-plot" in seen
    page.focus(".card[data-name=gpipe]")
    page.keyboard.press("Space")
    settle(page)
    assert set(rows(page)) == {"1f1b", "gpipe"}


def test_timelines_out_of_sight_have_their_height(visit):
    """The scroll bar stays as it is while one scrolls, and after a change of the window's width."""
    page = visit("?schedules=1f1b,interleaved,zb-h1,zb-h2,zbv,v-half,dualpipev,chimera&ranks=8&microbatches=24")
    heights = "[...document.querySelectorAll('.zp-panel')].map((panel) => panel.offsetHeight)"
    for _ in range(2):
        before, whole = page.evaluate(heights), page.evaluate("document.documentElement.scrollHeight")
        assert len(before) == 8
        assert max(before) < 700  # eight ranks and their memory
        for n in range(8):
            page.evaluate(f"document.querySelectorAll('.zp-panel')[{n}].scrollIntoView()")
            page.wait_for_timeout(60)
        assert page.evaluate(heights) == before
        assert page.evaluate("document.documentElement.scrollHeight") == whole
        page.set_viewport_size({"width": 1100, "height": 800})
        page.wait_for_timeout(200)


CONTRAST = """() => {
    const light = (color) => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const color = getComputedStyle(node).backgroundColor;
            if (!/, 0\\)$/.test(color) && color !== "transparent") return color;
        }
        return "rgb(255, 255, 255)";
    };
    const poor = [];
    for (const node of document.querySelectorAll("body *:not(.unseen, .skip, noscript, option, svg *)")) {
        const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!text || !node.checkVisibility()) continue;
        const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) poor.push([node.tagName, node.className, node.textContent.slice(0, 20), ratio]);
    }
    return poor;
}"""
NAMELESS = """() => {
    const all = "button, input, select, textarea, summary, a[href], [role=button], [tabindex='0']";
    const named = (node) => node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length;
    return [...document.querySelectorAll(all)].filter((node) => node.checkVisibility() && !named(node))
        .map((node) => node.outerHTML.slice(0, 120));
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read(visit, theme):
    page = visit("?schedules=1f1b,interleaved,zbv&ranks=8&microbatches=4&memory_limit=3.5", color_scheme=theme)
    page.wait_for_selector("g.dot")
    for tab in ("costs", "schedules"):
        page.click(f"#tab-{tab}")
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(CONTRAST) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.querySelectorAll('h1').length") == 1


def test_light_and_dark(visit):
    page = visit("?schedules=1f1b", color_scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) == "rgb(255, 255, 255)" != dark
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.zp-viewer')).backgroundColor") == "rgb(255, 255, 255)"
    )
    page.reload()
    page.wait_for_selector(READY)
    assert page.evaluate(colour) == "rgb(255, 255, 255)"


@pytest.mark.parametrize("tab", ["schedules", "costs"])
def test_a_phone_shows_all_without_scrolling_sideways(visit, tab):
    page = visit("?schedules=1f1b,interleaved,dualpipev", size=PHONE, has_touch=True)
    assert not page.is_visible("#tab-costs")
    page.tap("#fold")
    assert page.get_attribute("#fold", "aria-expanded") == "true"
    page.tap(f"#tab-{tab}")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.is_visible(".compare")
    page.tap("#fold")
    assert not page.is_visible(f"#tab-{tab}")


def test_a_schedule_is_described_by_a_touch_that_is_held(visit):
    page = visit("?schedules=1f1b", size=PHONE, has_touch=True)
    page.tap("#fold")
    assert page.inner_text("#about") == "Hold a schedule to read about it; tap to compare it."
    card = page.locator(".card[data-name=gpipe]")
    card.scroll_into_view_if_needed()
    box = card.bounding_box()
    client = page.context.new_cdp_session(page)
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    client.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [at]})
    page.wait_for_timeout(700)
    client.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.wait_for_timeout(100)
    assert page.inner_text("#about").startswith("gpipe ")
    assert page.locator("#about").bounding_box()["y"] < PHONE["height"]
    assert card.get_attribute("aria-pressed") == "false"
    card.tap()
    page.wait_for_selector(".card[data-name=gpipe][aria-pressed=true]")


def test_a_phone_shows_results_in_its_upper_half_and_errors_that_were_folded_away(visit):
    page = visit("?schedules=1f1b,zbv", size=PHONE, has_touch=True)
    for place in ("h1", ".compare tbody"):
        assert page.locator(place).first.bounding_box()["y"] < PHONE["height"] / 2
    assert page.inner_text("#fold").split("\n") == ["Schedules and costs:", "2 schedules", "default costs"]
    with visit.expected():
        other = visit("?schedules=1f1b&weight_parts=65", size=PHONE, wait="#error-weight_parts:not([hidden])")
        assert other.is_visible("#error-weight_parts")
        third = visit("?schedules=1f1b&f=x", size=PHONE, wait="#tab-costs.wrong")
        third.wait_for_selector("#error-costs-f")


@pytest.mark.parametrize("width", mark_rest_full([390, 360, 320], [320]))
def test_wide_figures_and_long_names_stay_on_a_phone(visit, width):
    sizes = "?schedules=interleaved-overlap:v=4,zb-h2:extra=2,chimera&weight_parts=4"
    costs = "&f=0.0123456&unit=s&activation=1234567890&memory_unit=B&memory_limit=3e9"
    page = visit(sizes + costs, size={"width": width, "height": 844}, has_touch=True)
    drop(page, f"{'a_long_name_' * 4}.csv", zp.to_csv(zp.build("zbv", ranks=4, microbatches=8)))
    page.wait_for_selector(".compare tbody:nth-of-type(4)")
    settle(page)
    page.wait_for_selector("g.dot")
    page.tap("text=As a table")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    table = page.locator(".compare").bounding_box()
    assert table["x"] + table["width"] <= width

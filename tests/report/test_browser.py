"""The page in a real browser: headless Chromium opens it, searches, sorts, and nothing foreign runs or is fetched."""

import pytest
from chromium import browser, find_browser
from full_run import EVIL

CHROMIUM = find_browser()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium that runs on this machine (make browser)"),
    pytest.mark.long,
]

ROWS = "[...document.querySelectorAll('.units > li')].map((row) => row.querySelector('.number').textContent)"


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        tab.screen(1200, 900)
        tab.open(run / "report.html")
        yield tab


def choose(page, name, value):
    """Set a control as a person would, so that the page hears of it."""
    page.run(
        f"(() => {{ const control = document.querySelector('[name={name}]'); control.value = {value!r};"
        "control.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def units(page):
    return [int(text.lstrip("#")) for text in page.run(ROWS)]


def test_nothing_is_fetched_and_nothing_complains(page):
    assert all(r["request"]["url"].startswith(("file:", "data:")) for r in page.seen("Network.requestWillBeSent"))
    assert len([r for r in page.seen("Network.requestWillBeSent") if r["request"]["url"].startswith("file:")]) == 1
    for kind in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
        assert page.seen(kind) == []


def test_text_of_the_corpus_is_shown_and_does_not_run(page):
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.wait(f"document.querySelector('.intervals')?.textContent.includes({EVIL!r})")
    assert page.run("window.pwned") is None
    assert page.run("document.querySelectorAll('img:not([src^=\"data:\"])').length") == 0
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = false; })")
    assert page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.pwned=2\">'), 1") == 1
    page.run("new Promise((done) => setTimeout(done, 200))")  # for nothing to happen there is nothing to wait for
    assert page.run("window.pwned") is None  # the policy holds even where markup got in
    page.run("document.body.lastElementChild.remove()")
    page.events.clear()


def test_units_are_sorted_and_more_of_them_shown(page):
    choose(page, "sort", "max")
    assert units(page) == list(range(118, 78, -2))
    choose(page, "sort", "unit")
    assert units(page) == list(range(0, 40, 2))
    page.run("document.querySelector('.more').click()")
    assert units(page) == list(range(0, 80, 2))
    page.run("document.querySelector('[name=only]').click()")
    assert units(page) == list(range(20))
    choose(page, "sort", "f1")
    assert units(page)[:2] == [4, 7]
    choose(page, "sort", "rate")
    shown = page.run("[...document.querySelectorAll('.units .soft:nth-child(2)')].map((each) => each.textContent)")
    rates = [float(text.removeprefix("rate ").removesuffix("%")) for text in shown]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
    page.run("document.querySelector('[name=only]').click()")


def test_units_are_found_by_word_class_and_number(page):
    choose(page, "query", "WORD42x")
    assert units(page) == [42]
    assert page.run("document.querySelector('.count').textContent").startswith("1 of 120 units")
    choose(page, "query", "sport")
    assert units(page) == [4]
    choose(page, "query", "#7")  # found though it has no contexts
    assert units(page) == [7]
    choose(page, "query", "<script>")
    assert len(units(page)) == 20
    choose(page, "query", "nowhere to be found")
    assert units(page) == []
    choose(page, "query", "")


def test_another_replacement_is_chosen_and_a_unit_opened(page):
    choose(page, "set", "3")
    choose(page, "query", "word42x")
    page.run("document.querySelector('.units details').open = true")
    page.wait("document.querySelectorAll('.intervals h4').length > 0")
    headings = page.run("[...document.querySelectorAll('.intervals h4')].map((each) => each.textContent)")
    assert headings[0] == "activation 5 to 6" and len(headings) == 6
    assert "block1-tc-k32/units/42" in page.run("document.querySelector('.intervals').lastChild.textContent")
    assert page.run("document.querySelectorAll('.intervals .at').length") == 6
    choose(page, "query", "")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 400, 1280])
def test_nothing_overflows_and_everything_is_readable(page, width, dark):
    page.screen(width, 800, dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = page.run(
        "[...document.querySelectorAll('main *')]"
        ".filter((each) => !each.closest('.scroll, pre, svg, .hidden, .preview'))"
        ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML)"
    )
    assert wide == []
    assert page.run(CONTRAST) == []


def test_a_legend_hides_and_shows_its_lines(page):
    page.screen(1280, 900)
    figure = "document.querySelector('#faithfulness .drawn')"
    shown = f"[...{figure}.querySelectorAll('[data-series=TC]')].map((each) => getComputedStyle(each).display)"
    others = shown.replace("TC", "MxD")
    assert page.run(shown) == page.run(others) == ["inline"] * 3
    page.run(f"{figure}.querySelector('input[value=TC]').click()")
    assert page.run(shown) == ["none"] * 3 and page.run(others) == ["inline"] * 3
    assert page.run("document.querySelectorAll('.off').length") == 3  # those of other figures stay
    page.run(f"{figure}.querySelector('input[value=TC]').click()")
    assert page.run(shown) == ["inline"] * 3


TOLD = "[...document.querySelectorAll('.tip:not([hidden]) p:not(.soft)')].map((each) => each.textContent)"


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_points_say_their_values_where_the_pointer_is_and_with_the_arrow_keys(page, width, dark):
    def press(key):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        return page.run(TOLD)

    def pointed(chart):
        mark = f"document.querySelectorAll('#faithfulness .drawn .chart')[{chart}].querySelector('.spot')"
        page.run(f"{mark}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # scrolling hides what is told
        x, y = page.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({mark}.getBoundingClientRect())"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.wait("!document.querySelector('.tip').hidden")
        tip = page.run("JSON.parse(JSON.stringify(document.querySelector('.tip').getBoundingClientRect()))")
        assert tip["left"] >= 0 and tip["right"] <= width and tip["top"] >= 0 and tip["bottom"] <= y
        return page.run(TOLD)

    page.screen(width, 900, dark)
    assert pointed(0) == ["MxD, 8: 0.01"]
    source = page.run("document.querySelector('.tip .soft').textContent")
    assert source == "faithfulness.json#/results/made-up~1block1-mxd-k8/blocks/1/normalized_mse"
    assert page.run(CONTRAST) == []
    assert sorted(pointed(2)) == ["CP-muMoE, 8: 0.02", "MxD, 8: 0.02", "TC, 8: 0.02"], "those below it, too"
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=450)
    page.wait("document.querySelector('.tip').hidden")
    page.run("document.querySelector('#faithfulness .legend input[value=MxD]').click()")
    page.run("document.querySelector('#faithfulness .chart').focus({preventScroll: true})")
    assert [press("ArrowRight"), press("ArrowRight"), press("ArrowLeft"), press("ArrowLeft")] == [
        [told] for told in ("TC, 8: 0.005", "TC, 32: 0.002", "TC, 8: 0.005", "CP-muMoE, 32: 0.00167")
    ]
    assert press("Escape") == []
    page.run("document.querySelector('#faithfulness .legend input[value=MxD]').click()")


@pytest.mark.parametrize("width", [400, 1280])
def test_the_sections_stay_in_sight_and_say_where_one_is(page, width):
    page.screen(width, 900)
    for name in ("units", "faithfulness"):
        page.run(f"document.querySelector('#{name}').scrollIntoView({{behavior: 'instant'}})")
        page.wait(f"document.querySelector('nav [aria-current=true]')?.hash === '#{name}'")
        link = "document.querySelector('nav [aria-current=true]').getBoundingClientRect()"
        page.wait(f"{link}.left >= 0 && {link}.right <= innerWidth && {link}.top >= 0 && {link}.bottom < innerHeight")
        title = page.run(f"document.querySelector('#{name}-title').getBoundingClientRect().top")
        bar = page.run("document.querySelector('nav').getBoundingClientRect().bottom") if width == 400 else 0
        assert bar <= title < 200


@pytest.mark.parametrize("width", [400, 1280])
def test_plots_are_as_wide_as_the_page_and_markers_keep_their_size(page, width):
    page.screen(width, 900)
    wide = (
        "[...document.querySelectorAll('figure .panels')].filter((each) => each.querySelector('.chart')).map((each) => "
        "[...each.children].map((panel) => panel.getBoundingClientRect().right).reduce((a, b) => Math.max(a, b)) / "
        "each.closest('section').getBoundingClientRect().right)"
    )
    shares = page.run(wide)
    assert len(shares) > 10 and all(0.99 < share < 1.01 for share in shares)
    mark = page.run("document.querySelector('#faithfulness circle.mark').getBoundingClientRect().width")
    assert 7 < mark < 9


def test_tables_that_scroll_have_a_shadow_where_they_go_on(page):
    page.screen(400, 900)
    region = "document.querySelector('#faithfulness .scroll')"
    assert page.run(f"{region}.scrollWidth > {region}.clientWidth")
    style = f"getComputedStyle({region})"
    assert page.run(f"{style}.backgroundAttachment") == "local, scroll"
    assert page.run(f"{style}.backgroundImage").count("linear-gradient") == 2


CONTRAST = """(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce(([r, g, b], [x, y, z, alpha = 1]) =>
      [r + (x - r) * alpha, g + (y - g) * alpha, b + (z - b) * alpha], [255, 255, 255]);
  };
  const poor = [];
  for (const node of document.querySelectorAll("main *, header *, footer *, .tip:not([hidden]) *")) {
    const drawn = node.tagName === "text";
    if (!drawn && ![...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim())) continue;
    if (node.closest("noscript, script, option, title")) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(drawn ? style.fill : style.color)), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${node.outerHTML.slice(0, 80)}: ${(a + 0.05) / (b + 0.05)}`);
  }
  return poor;
})()"""
"""Everything that is written with a contrast below 4.5 to 1 (WCAG 2, AA)."""


def test_a_unit_shows_what_it_adds_and_numbers_on_tokens(page):
    page.screen(1200, 900)
    choose(page, "set", "0")
    choose(page, "query", "#42")
    page.run("document.querySelector('.units details').open = true")
    page.wait("document.querySelectorAll('.adds .tokens').length > 0")
    shown = page.run("[...document.querySelectorAll('.adds .tokens')].map((each) => each.textContent)")
    assert shown[0].startswith("promotes  up42") and EVIL in shown[0] and shown[1].startswith("suppresses  down42")
    assert page.run("document.querySelector('.adds .up .token').title") == "logit +0.5 for each unit of activation"
    said = page.run("[...document.querySelectorAll('.adds p.soft')].map((each) => each.textContent)")
    assert said == ["peak 4.42 (by chance 3.5); mean cosine of its directions 0.625"]
    heights = page.run("[...document.querySelectorAll('.histogram rect')].map((each) => +each.getAttribute('height'))")
    assert heights == sorted(heights[:3], reverse=True) + heights[3:] and heights[0] == 36 and heights[2] == 0
    tokens = "[...document.querySelectorAll('.intervals .context')[0].children]"
    assert page.run(f"{tokens}.map((each) => each.title)") == ["", "activation 0.5", "activation 6", "", ""]
    below = f"getComputedStyle({tokens}[2], '::after').content"
    assert page.run(below) == "none"
    page.run("document.querySelector('[name=numbers]').click()")
    assert page.run(below) == '"6"'
    for width in (400, 1280):
        page.screen(width, 900)
        assert page.run("document.documentElement.scrollWidth") <= width
    page.run("document.querySelector('[name=numbers]').click()")
    choose(page, "query", "up42")
    assert units(page) == [42]
    choose(page, "query", "")


def test_a_link_leads_to_one_unit_of_one_replacement(page, run):
    choose(page, "set", "2")
    choose(page, "query", "#42")
    page.run("document.querySelector('.units details').open = true")
    page.wait("document.querySelector('.intervals a') !== null")
    href = page.run("document.querySelector('.intervals a').getAttribute('href')")
    chosen = page.run("document.querySelector('[name=set]').value")
    assert href.startswith("#unit=") and href.endswith("/42")
    choose(page, "set", "0")
    choose(page, "query", "")
    page.run(f"location.hash = {href!r}")
    page.wait("document.querySelector('.units details')?.open")
    assert units(page)[0] == 42 and page.run("document.querySelector('[name=set]').value") == chosen
    assert page.run("document.getElementById(location.hash.slice(1)) === document.querySelector('.units li')")
    page.open(run / "report.html")
    assert page.run("document.querySelector('[name=query]').value") == ""
    page.open(run / "report.html", href)  # and from an address that is opened anew
    page.wait("document.querySelector('.units details')?.open")
    assert units(page)[0] == 42 and page.run("document.querySelector('[name=set]').value") == chosen
    page.run("location.hash = '#unit=nobody/3'")
    page.run("new Promise((done) => setTimeout(done, 100))")
    assert units(page)[0] == 42
    page.run("location.hash = ''")
    page.open(run / "report.html")

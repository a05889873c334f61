"""The built site in a real browser: search, copy, themes, widths, mathematics without a network, and accessibility.

It is what ``make docs`` wrote to docs/_build/html. Chromium comes from the system and axe-core from npm (see .ci/run);
where one is missing, the tests that need it are skipped.
"""

import functools
import http.server
import re
import shutil
import threading
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs/_build/html"
AXE = ROOT / ".venv/axe/axe.min.js"
PAGES = [
    "index",
    "start/quickstart",
    "start/which-tool",
    "start/comparison",
    "howto/compress",
    "howto/what-does-it-cost",
    "howto/migrate-ddp",
    "howto/networks",
    "howto/resume",
    "howto/distributed",
    "concepts/sklinear",
    "concepts/glossary",
    "concepts/papers",
    "benchmarks/linalg",
    "reference/errors",
    "reference/api/generated/panther.compress",
    "examples/index",
    "examples/linalg/randomized_svd",
    "examples/distributed/data_parallel",
]
_TIMEOUT_MS = 600_000  # A browser has many threads, and the cores may be busy.

pytestmark = pytest.mark.tool


@pytest.fixture(scope="module")
def site():
    if not (SITE / "index.html").exists():
        pytest.skip("docs/_build/html is not built: make docs")
    return SITE


@pytest.fixture(scope="module")
def address(site):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra dev")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        chromium = started.chromium.launch(executable_path=path, args=options, timeout=_TIMEOUT_MS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, address):
    """Open a page; requests to anywhere else than the site are refused and remembered."""
    contexts, elsewhere = [], []

    def answer(route):
        if route.request.url.startswith(address):
            route.continue_()
        else:
            elsewhere.append(route.request.url)
            route.abort()

    def visit(page, width=1280, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        context.set_default_timeout(_TIMEOUT_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        context.route("**/*", answer)
        opened = context.new_page()
        opened.goto(f"{address}/{page}.html", wait_until="load")
        return opened

    yield visit
    for context in contexts:
        context.close()
    assert elsewhere == [], "pages work without a network"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("tensor parallel", "tensor parallel|tensor_parallel|TensorParallel"),
        ("compress", "^compress"),
        ("memory", "memory"),
        ("seed", "seeds?"),
    ],
)
def test_search_finds_and_the_first_result_opens(visit, query, expected):
    page = visit("index")
    page.locator("button.search-button__button:visible").first.click()
    field = page.locator("input[type=search]:visible").first
    field.fill(query)
    field.press("Enter")
    result = page.locator("#search-results ul.search li a").first
    result.wait_for()
    result.click()
    page.wait_for_url(lambda url: "search.html" not in url)
    assert re.search(expected, page.locator("h1").first.inner_text(), re.I)


def test_a_code_block_is_copied_without_its_prompts(visit):
    page = visit("start/quickstart")
    block = page.locator("div.highlight").first
    block.hover()
    block.locator("button.copybtn").click()
    page.wait_for_function("document.querySelector('button.copybtn.success') !== null")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("import torch, panther as pr\n")
    assert ">>>" not in copied


def test_the_theme_is_switched(visit):
    page = visit("index", theme="light")
    theme = "document.documentElement.dataset.theme"
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(theme) == "light"
    first_ground = page.evaluate(ground)
    page.locator("button.theme-switch-button:visible").first.click()
    page.locator("button.theme-change-button[data-mode=dark]:visible").first.click()
    page.wait_for_function(f"{theme} === 'dark'")
    assert page.evaluate(ground) != first_ground


def each_page(visit, width, theme="light"):
    """Yield the name of each of ``PAGES`` and the window that shows it."""
    page = visit("index", width, theme)
    origin = page.url.removesuffix("/index.html")
    for name in PAGES:
        page.goto(f"{origin}/{name}.html", wait_until="load")
        yield name, page


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_scrolls_sideways(visit, width, theme):
    wider = []
    for name, page in each_page(visit, width, theme):
        needed = page.evaluate("document.documentElement.scrollWidth")
        if needed > width:
            wider.append(f"{name} needs {needed} pixels")
    assert not wider


def test_headings_and_text_fit_a_narrow_window(visit):
    wider = []
    for name, page in each_page(visit, 390):
        wider += page.evaluate(
            """name => [...document.querySelectorAll('.bd-article :is(h1, h2, h3, p, li, dd)')]
                .filter(box => !box.closest('table, figure') && !box.querySelector('pre, table, figure, .math-block'))
                .filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1)
                .map(box => `${name}: ${box.textContent.trim().slice(0, 70)}`)""",
            name,
        )
    assert not wider


def test_words_of_titles_and_neighbours_stay_whole(visit):
    broken = []
    for name, page in each_page(visit, 390):
        broken += page.evaluate(
            """name => [...document.querySelectorAll('.bd-article h1, .prev-next-title')].flatMap(title => {
                const text = title.firstChild, range = document.createRange();
                return [...text.textContent.matchAll(/\\b\\w{2,15}\\b/g)].filter(word => {
                    range.setStart(text, word.index);
                    range.setEnd(text, word.index + word[0].length);
                    return range.getClientRects().length > 1;
                }).map(word => `${name}: ${word[0]}`);
            })""",
            name,
        )
    assert not broken


@pytest.mark.parametrize("width", [1280, 390])
def test_sentences_of_output_wrap(visit, width):
    page = visit("howto/networks", width)
    marked, wider = page.evaluate(
        """() => {
            const marked = [...document.querySelectorAll('pre .sentence')];
            const right = box => box.getBoundingClientRect().right;
            const wider = marked.filter(line => right(line) > right(line.closest('pre')));
            return [marked.length, wider.map(line => line.textContent)];
        }"""
    )
    assert marked > 8
    assert not wider


def test_a_line_of_72_columns_fits(visit):
    page = visit("howto/compress", 1280)
    room, needed = page.evaluate(
        """() => {
            const block = document.querySelector('.bd-article pre'), line = document.createElement('span');
            line.textContent = 'x'.repeat(72);
            block.append(line);
            const style = getComputedStyle(block);
            return [
                block.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight),
                line.getBoundingClientRect().width,
            ];
        }"""
    )
    assert room >= needed


def test_mathematics_is_drawn_by_the_browser(visit):
    page = visit("concepts/sklinear")
    formulas = page.locator("math")
    assert formulas.count() > 3
    assert all(box["width"] > 3 and box["height"] > 5 for box in (formulas.nth(i).bounding_box() for i in range(3)))


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_accessibility(visit, width, theme):
    if not AXE.exists():
        pytest.skip("axe-core is not there: make .venv/axe/axe.min.js")
    found = []
    for name, page in each_page(visit, width, theme):
        page.add_script_tag(path=str(AXE))
        rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
        for violation in page.evaluate("rules => axe.run(document, rules)", rules)["violations"]:
            first = violation["nodes"][0]
            found.append(f"{name}: {violation['id']}, {len(violation['nodes'])} times: {first['html'][:150]}")
    assert not found


def test_links_lead_to_pages_and_headings(site):
    names, links = {}, []
    for path in site.rglob("*.html"):
        markup = path.read_text()
        names[path] = set(re.findall(r'\s(?:id|name)="([^"]+)"', markup))
        links += [(path, unescape(link)) for link in set(re.findall(r'(?:href|src)="([^"]*)"', markup))]
    broken = []
    for path, link in links:
        if re.match(r"[a-z]+:|//|\{", link):
            continue
        target, _, fragment = link.partition("#")
        file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
        file = file / "index.html" if file.is_dir() else file
        if not file.exists():
            broken.append(f"{path.relative_to(site)}: {link}")
        elif fragment and file in names and unquote(fragment) not in names[file]:
            broken.append(f"{path.relative_to(site)}: {link} has no such heading")
    assert len(links) > 1000
    assert sorted(broken)[:20] == []

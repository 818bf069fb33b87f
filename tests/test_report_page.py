"""The report as HTML, in a real browser: search, expand, hover, keyboard, dark mode, printing, and its size."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import MemoryTracker, ShardGraphError
from shardgraph.findings.finding import Finding
from shardgraph.passes.analysis.rows import Row
from shardgraph.pictures.page.modules import module_tree
from shardgraph.pictures.page.page import Figure, Page
from tests.machines import toy_cluster

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
INPUTS = (torch.zeros(2, 8),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(layers)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(5, 8), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.tokens.weight.t()


class Mean(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.shape[0]


def analysis(**options: object) -> shardgraph.Analysis:
    found = shardgraph.analyze(Net(), INPUTS, plan="fsdp", mesh={"dp": 2}, cluster=toy_cluster(), **options)
    assert isinstance(found, shardgraph.Analysis)
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    return shardgraph.visualize(analysis(), path, model=Net(), example_inputs=INPUTS)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        try:
            started = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start here: {error}")
        yield started
        started.close()


@pytest.fixture
def page(browser, report):
    """The report, opened without a network; an error of its script fails the test."""
    context = browser.new_context(offline=True, color_scheme="light", viewport={"width": 1200, "height": 900})
    opened, errors = context.new_page(), []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: request.url.startswith("file:") or errors.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    context.close()
    assert not errors


def modules(page) -> list[str]:
    """The names in the table of modules, as they are shown."""
    return [name.strip("▾▸ ") for name in page.locator("#modules tbody tr td:first-child").all_text_contents()]


# -- in a browser ----------------------------------------------------------------------------------


@needs_browser
def test_a_module_opens_and_closes_by_a_click(page):
    assert modules(page) == ["model", "layers", "head"]
    page.get_by_role("row", name="layers").click()
    assert modules(page) == ["model", "layers", "0", "1 to 3 (3 equal layers)", "head"]
    page.locator("#modules tbody tr").first.click()
    assert modules(page) == ["model"]


@needs_browser
def test_all_modules_open_and_close_at_once(page):
    page.get_by_text("expand all").click()
    assert len(modules(page)) == 1 + 2 + 1 + 4 * 3
    page.get_by_text("collapse all").click()
    assert modules(page) == ["model", "layers", "head"]


@needs_browser
def test_a_search_shows_what_matches_and_what_is_around_it(page):
    page.fill("#search", "2.DOWN")
    assert modules(page) == ["model", "layers", "1 to 3 (3 equal layers)", "2", "down"]
    assert page.text_content("#found") == "1 module"
    page.fill("#search", "nothing of this name")
    assert modules(page) == ["model"] and page.text_content("#found") == "0 modules"
    page.fill("#search", "")
    assert "head" in modules(page)


@needs_browser
def test_the_table_is_used_by_keys(page):
    page.locator("#modules tbody tr").first.focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert modules(page) == ["model", "layers", "0", "1 to 3 (3 equal layers)", "head"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")  # to the module around it
    page.keyboard.press("Enter")
    assert modules(page) == ["model", "layers", "head"]


@needs_browser
def test_a_pointer_on_memory_names_the_operation_and_its_kinds(page):
    page.locator(".picture svg rect[fill-opacity='0']").nth(4).hover(force=True)
    told = page.text_content("#tip")
    assert "(forward): " in told and "parameters" in told
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


@needs_browser
def test_a_pointer_on_a_stream_names_the_operation_its_time_and_module(page):
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.99 * box["width"] - 12, box["y"] + 25)
    assert "update" in page.text_content("#tip") and "optimizer" in page.text_content("#tip")


@needs_browser
def test_the_streams_are_magnified_by_buttons_and_keys(page):
    whole = page.text_content("#at")
    page.get_by_text("zoom in").click()
    assert page.text_content("#at") != whole
    page.get_by_text("whole step").click()
    assert page.text_content("#at") == whole
    page.locator("#timeline canvas").focus()
    page.keyboard.press("+")
    assert page.text_content("#at") != whole


@needs_browser
def test_it_is_dark_where_the_reader_likes_that_and_by_a_button(page):
    def paper() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert paper() == "rgb(255, 255, 255)"
    page.locator("#theme").click()
    assert paper() == "rgb(22, 24, 28)"
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert paper() == "rgb(22, 24, 28)"


@needs_browser
def test_on_paper_every_text_is_open_and_there_are_no_buttons(page):
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("button:visible").count() == 0
    assert len(page.pdf()) > 10_000


@needs_browser
def test_on_paper_are_all_findings_and_what_was_looked_at(browser, tmp_path):
    found = [Finding("rule", severity, "found", "model.py:1", "mend it") for severity in ("warning", "note")]
    path = tmp_path / "page.html"
    path.write_text(Page("Plan", findings=found, looked_at="2 of 3 layers").html())
    opened = browser.new_page()
    opened.goto(path.as_uri())
    sizes = opened.evaluate("[...document.querySelectorAll('.finding')].map(each => getComputedStyle(each).fontSize)")
    assert sizes[0] == sizes[1]
    opened.emulate_media(media="print")
    assert opened.locator(".finding:visible").count() == 2 and opened.get_by_text("2 of 3 layers").is_visible()
    opened.close()


@needs_browser
@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
def test_texts_of_a_plan_stay_in_their_boxes_and_apart_in_a_wider_font(browser, tmp_path):
    picture = shardgraph.visualize(analysis(), tmp_path / "plan.svg", model=Net(), example_inputs=INPUTS)
    opened = browser.new_page()
    opened.goto(picture.as_uri())
    found = opened.evaluate("""() => {
        const wide = document.createElementNS("http://www.w3.org/2000/svg", "style");
        wide.textContent = "text { letter-spacing: 0.06em }";  // a tenth wider than measured
        document.documentElement.append(wide);
        const all = selector => [...document.querySelectorAll(selector)];
        const inside = (text, box) => text.getBBox().x >= box.x - 1
            && text.getBBox().x + text.getBBox().width <= box.x + box.width + 1;
        const nodes = all(".node").filter(node => node.querySelector("polygon, ellipse")).map(node =>
            [[...node.querySelectorAll("text")], node.querySelector("polygon, ellipse").getBBox()]);
        const title = each => each.querySelector("title").textContent;
        const clusters = all(".cluster").map(cluster => {
            const heading = all(".node").find(node => title(node) == title(cluster).replace("cluster", "label of"));
            return [[...heading.querySelectorAll("text")], cluster.getBBox()];
        });
        const lines = all(".graph text").map(text => text.getBoundingClientRect());
        const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4
            && b.top < a.bottom - 4;
        return {
            texts: lines.length,
            outside: [...nodes, ...clusters].flatMap(([texts, box]) =>
                texts.filter(text => !inside(text, box)).map(text => text.textContent)),
            together: lines.flatMap((a, i) => lines.slice(i + 1).filter(b => meet(a, b))).length,
        };
    }""")
    opened.close()
    assert found["texts"] > 20 and found["outside"] == [] and found["together"] == 0


@needs_browser
def test_names_that_are_markup_are_shown_as_they_are(browser, tmp_path):
    row = Row(half="forward", node="mm", operation="mm", module="</script><b>x", label="<i>mm", kind="matmul",
              read=1, written=1, seconds=1.0, memory={"parameters": 1})  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(Page("<u>title", warnings=["a < b"], modules=module_tree([row], None)).html())
    opened = browser.new_page()
    opened.goto(path.as_uri())
    assert opened.text_content("h1") == "<u>title" and opened.text_content("#warnings li") == "a < b"
    assert modules(opened) == ["model", "</script><b>x"]
    opened.close()


@needs_browser
@pytest.mark.slow
def test_a_model_of_126_layers_on_thousands_of_devices_opens_in_two_seconds(browser, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, use_cache=False,
                             num_attention_heads=128, num_key_value_heads=8, vocab_size=128256)  # fmt: skip
        model, ids = LlamaForCausalLM(config), torch.zeros(1, 8192, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids}
    found = shardgraph.analyze(model, plan="fsdp+tp", mesh={"dp": 512, "tp": 8}, example_kwargs=call, cluster="H100")
    path = shardgraph.visualize(found, tmp_path / "large.html", model=model, example_kwargs=call)
    assert path.stat().st_size < 5_000_000
    opened = browser.new_page()
    opened.goto(path.as_uri())
    taken = opened.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert taken < 2000 and opened.locator("#modules tbody tr").count() > 0
    opened.close()


@needs_browser
def test_what_lint_finds_is_there_with_line_and_remedy(browser, page, tmp_path):
    (row,) = page.locator("#findings .finding").all()
    assert row.locator("dt b").text_content() == "summed-loss" and row.locator("dt span").text_content() == "warning"
    assert "test_report_page.py:" in row.locator("code").text_content()
    assert "gradients of 2 ranks are averaged" in row.locator("dd").first.text_content()
    assert row.locator(".remedy").text_content().startswith("use a mean")

    mean = shardgraph.analyze(Mean(), INPUTS, plan="fsdp", mesh={"dp": 2}, cluster=toy_cluster())
    opened = browser.new_page()
    opened.goto(shardgraph.visualize(mean, tmp_path / "clean.html").as_uri())
    assert opened.locator("#findings .finding").count() == 0
    assert "Lint found nothing" in opened.locator("#findings").inner_text()
    opened.close()


# -- what it says ----------------------------------------------------------------------------------


def test_a_line_of_a_package_is_told_from_where_it_is_imported(monkeypatch):
    monkeypatch.setattr("sys.path", ["/home/someone", "/usr/lib/site-packages"])
    for where, told in {
        "/usr/lib/site-packages/package/model.py:3": "package/model.py:3",
        "/home/someone/model.py:4": "model.py:4",
        "/elsewhere/model.py:5": "/elsewhere/model.py:5",
        "layers.0.weight": "layers.0.weight",
    }.items():
        page = Page("Plan", findings=[Finding("rule", "note", "found", where, "mend it")]).html()
        assert f"<code>{told}</code>" in page


def test_a_long_name_breaks_behind_an_underscore():
    page = Page("Plan", figures=[Figure("peak", "1 GiB", "at _log_softmax_backward & more")]).html()
    assert "at _log_<wbr>softmax_<wbr>backward &amp; more" in page


def test_it_says_what_does_not_fit_and_what_takes_less(tmp_path):
    small = toy_cluster()
    small = replace(small, device=replace(small.device, memory=1024))
    path = shardgraph.visualize(replace(analysis(), cluster=small), tmp_path / "report.html")
    assert "more than a device has" in path.read_text()


def test_of_a_deep_model_few_layers_are_looked_at_and_it_says_so(tmp_path):
    deep = shardgraph.analyze(Net(12), INPUTS, plan="fsdp", mesh={"dp": 2}, cluster=toy_cluster())
    assert "Looked at 7 of 12 layers" in shardgraph.visualize(deep, tmp_path / "deep.html").read_text()


@pytest.mark.slow
def test_of_a_pipeline_what_lies_in_several_stages_is_found(tmp_path):
    model, ids = Tied(), torch.zeros(4, 3, dtype=torch.long)
    call = {"loss_fn": lambda out, target: out.square().mean(), "example_kwargs": {"target": ids}}
    found = shardgraph.analyze(model, (ids,), "pp", mesh={"pp": 2}, cluster=toy_cluster(), **call)
    assert "<b>tied-across-stages</b>" in shardgraph.visualize(found, tmp_path / "report.html").read_text()


@pytest.fixture(scope="module")
def piped(tmp_path_factory):
    """The report of four blocks in two stages."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    found = shardgraph.analyze(model, (torch.zeros(8, 8),), "pp", mesh={"pp": 2}, cluster=toy_cluster())
    return shardgraph.visualize(found, tmp_path_factory.mktemp("piped") / "report.html")


def test_of_a_pipeline_the_picture_says_where_stages_begin(piped):
    assert ">pp=2: 2 stages, 1f1b, 4 microbatches, stages begin with 2<" in piped.read_text()


def test_of_a_pipeline_rounding_is_no_communication(piped):
    exposed = re.search(r"exposed communication</span><b>(.*?)</b><small>(.*?)</small>", piped.read_text())
    assert exposed is not None and not re.search(r"\de-\d", exposed[2]), exposed[2]


@needs_browser
def test_of_a_pipeline_modules_are_told_to_be_those_of_a_microbatch_in_all_stages(browser, piped):
    page = browser.new_page()
    page.goto(piped.as_uri())
    heads = page.locator("#modules th").all_text_contents()
    assert "over stages" in heads and "on a rank" not in heads
    assert "one microbatch on its way through all stages" in page.locator("#modules").inner_text()
    assert "of one microbatch" in page.locator("#modules th", has_text="compute").get_attribute("title")
    page.close()


@pytest.mark.slow
def test_it_has_the_plans_that_were_compared_and_the_yaml(tmp_path):
    plan = shardgraph.plan(Net(), INPUTS, cluster=toy_cluster(devices_per_node=2), devices=2)
    path = shardgraph.visualize(plan, tmp_path / "report.html", model=Net(), example_inputs=INPUTS)
    text = path.read_text()
    assert "Plans that were compared" in text and "&lt;- chosen" in text and "schema: " in text


def test_it_has_the_measured_memory_beside_the_predicted(tmp_path):
    net = Net()
    with MemoryTracker(net) as tracker:
        net(*INPUTS).backward()
    found = analysis()
    path = shardgraph.visualize(found, tmp_path / "report.html", measured=tracker.trace)
    assert "Predicted beside measured" in path.read_text()
    with pytest.raises(ShardGraphError, match=r"a plan's \.html"):
        shardgraph.visualize(found, tmp_path / "report.svg", measured=tracker.trace)


def test_a_notebook_shows_a_picture_an_analysis_and_a_plan_by_themselves(report, tmp_path):
    assert "<iframe srcdoc=" in report._repr_html_()
    found = analysis()
    assert "<svg" in shardgraph.visualize(found, tmp_path / "memory.svg")._repr_html_()
    assert "plan fsdp" in found._repr_html_() and "plan fsdp" in found.plan._repr_html_()
    assert len(repr(found)) < 200 and "by_module" not in repr(found)
    assert repr(found.by_module()).splitlines()[1].startswith("(the model)")

"""The site as a stranger uses it: ten questions, a few clicks each; axe and rulers look on."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
from conftest import serious
from playwright.sync_api import Page, expect

SITE: dict[str, Any] = runpy.run_path(str(pages.DOCS / "site" / "answers.py"))["read"](pages.ROOT)
BY_KEY = {one["key"]: one for one in SITE["implementations"]}
CAUSAL = "Causal flag, fewer queries than keys"
KINDS = (
    "index.html",
    "can-i-use.html",
    "translator.html",
    "conventions/all.html",
    "conventions/causal-flag-fewer-queries-than-keys.html",
    "requirements/all.html",
    "requirements/output.equals-definition.html",
    "defects/all.html",
    "known/accuracy.html",
    "badges/all.html",
    "implementations/index.html",
    "implementations/torch-mha.html",
    "defects/*.html",
)
"""A page of each kind, or a pattern of which it is the first that is no list of all."""


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id) -> Path:
    """The site, built by the worker that needs it first; others wait for it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sitemap.xml.gz").exists():  # written at the end
            subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
                cwd=pages.ROOT,
                env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
                check=True,
            )
    return folder


Open = Callable[..., Page]


@pytest.fixture
def walk(visit, site) -> Open:
    def opened(name: str = "index.html", address: str = "", **options: object) -> Page:
        return visit(site / name, address, alone=False, **options)

    return opened


def named(site: Path, kind: str) -> str:
    """The name of the page of a kind."""
    if "*" not in kind:
        return kind
    return min(str(it.relative_to(site)) for it in site.glob(kind) if it.stem != "all")


def every_kind(site: Path) -> list[str]:
    return [named(site, kind) for kind in KINDS]


# A stranger's questions


def answers(key: str, question: str) -> list[str]:
    return [value for value, *_ in BY_KEY[key]["answers"][question]]


def click(page: Page, *names: str) -> None:
    """Follow links by a part of their text, in what the reader sees."""
    for name in names:
        page.locator("a:visible", has_text=name).first.click()
        page.wait_for_load_state()


def ask(page: Page, key: str, question: str) -> list[str]:
    """Ask "Can I use", and return what is answered."""
    click(page, "Can I use")
    page.locator("#choose-implementation").select_option(key)
    page.locator("#choose-question").select_option(question)
    return page.locator("#can-i-use-answer dd strong").first.inner_text().split("; ")


def row(page: Page, key: str) -> str:
    """What the table "One by one" says of an implementation."""
    table = page.locator("h2", has_text="One by one").locator("xpath=following::table[1]")
    return table.locator("tr", has_text=BY_KEY[key]["title"]).first.inner_text()


def group(page: Page, value: str) -> str:
    """Which implementations "Who does what" names beside a value."""
    return page.locator("table").first.locator("tr", has_text=value).first.inner_text()


FLOATS = "0 and 1, as floats"
BOTTOM_RIGHT = "bottom-right, since 1.28"


# Each is a stranger's question, and the path is what he does: links by their text, or
# "Can I use" with the implementation and the question. What is told is on the screen then.
STRANGER: dict[str, tuple[tuple[str, ...], Callable[[Page], bool]]] = {
    "does Keras' float mask add?": (
        ("Can I use", "?keras-jax-mha", f"?{FLOATS}"),
        lambda page: "1 attends, 0 blocks" in told(page),
    ),
    "since when does onnxruntime align at the end?": (
        ("Can I use", "?onnxruntime-attention", f"?{CAUSAL}"),
        lambda page: "top-left" in told(page) and BOTTOM_RIGHT in told(page),
    ),
    "which libraries' windows count the own key?": (
        ("every library, question by question", "Does a window count"),
        lambda page: all(
            any(value == "counts the own key" for value in answers(key, "Window"))
            == (BY_KEY[key]["title"] in group(page, "counts the own key").split("\t")[-1])
            for key in ("onnxruntime-gqa", "mistral-sdpa", "jax-sdpa")
        ),
    ),
    "does flax's causal flag align top-left beside a cache?": (
        ("Can I use", "?flax-nnx", f"?{CAUSAL}"),
        lambda page: "as beside a cache" in told(page) and "top-left" in told(page),
    ),
    "what does torch give a fully masked query?": (
        ("every library, question by question", "What does a fully masked query get"),
        lambda page: all(value in row(page, "torch-mha") for value in answers("torch-mha", ROWS)),
    ),
    "where is float64 computed in float32?": (
        ("Answers", "Accuracy"),
        lambda page: "float32" in page.locator("tr", has_text="float64").first.inner_text(),
    ),
    "what becomes of torch's key_padding_mask in Keras?": (
        ("The translator of masks",),
        lambda page: "attention_mask = np.array" in page.locator("pre").first.inner_text(),
    ),
    "does padding with NaN reach the output of MLX?": (
        ("Can I use", "?mlx-sdpa", "?NaN in a blocked value"),
        lambda page: "reaches the output" in told(page),
    ),
    "do Llama's rotary embeddings pair halves?": (
        ("every library, question by question", "Do rotary embeddings pair"),
        lambda page: "halves" in row(page, "llama-model-sdpa"),
    ),
    "is there a script that shows flax's defect?": (
        ("Answers", "Defects", "is_causal beside a padding mask"),
        lambda page: page.locator("a", has_text="flax_nnx_causal").first.is_visible(),
    ),
}
ROWS = "A fully masked query gets"


def told(page: Page) -> str:
    return page.locator("#can-i-use-answer").inner_text()


@pytest.mark.parametrize("question", STRANGER)
def test_a_strangers_question_is_answered_in_a_few_clicks(walk, question):
    path, is_answered = STRANGER[question]
    assert len(path) <= 3
    page = walk()
    fields = iter(("implementation", "question"))
    for step in path:
        if step[0] == "?":
            page.locator(f"#choose-{next(fields)}").select_option(step[1:])
        else:
            click(page, step)
    assert is_answered(page), page.locator("main").inner_text()


@pytest.mark.parametrize(
    ("key", "question"),
    [("torch-mha", "True in a mask"), ("jax-sdpa", ROWS), ("mlx-sdpa", CAUSAL)],
)
def test_can_i_use_answers_what_was_seen(walk, key, question):
    shown = ask(walk(), key, question)
    assert len(shown) == len(answers(key, question))
    assert all(map(str.startswith, shown, answers(key, question)))


def test_a_question_over_all_libraries_is_two_clicks(walk):
    page = walk()
    click(page, "every library, question by question", "is the causal flag aligned")
    table = page.locator("table").first
    for value in {value for key in BY_KEY for value in answers_or_none(key)}:
        expect(table).to_contain_text(value)
    # Since when does onnxruntime align so?
    expect(page.locator("tr", has_text="com.microsoft.MultiHeadAttention").last).to_contain_text(
        "onnxruntime 1.", use_inner_text=True
    )


def answers_or_none(key: str) -> list[str]:
    return answers(key, CAUSAL) if CAUSAL in BY_KEY[key]["answers"] else []


def test_another_version_has_its_own_answer(walk):
    key, question = "onnxruntime-mha", CAUSAL
    page = walk("can-i-use.html")
    page.locator("#choose-implementation").select_option(key)
    page.locator("#choose-question").select_option(question)
    strong = page.locator("#can-i-use-answer dd strong").first
    for point in BY_KEY[key]["history"]:
        if point["now"] or question not in point["answers"]:
            continue
        page.locator("#choose-version").select_option(point["with"])
        expect(strong).to_have_text("; ".join(value for value, *_ in point["answers"][question]))
    # The address is the answer: it can be sent to somebody.
    address = page.evaluate("location.hash")
    told = strong.inner_text()
    page = walk("can-i-use.html", address)
    expect(page.locator("#can-i-use-answer dd strong").first).to_have_text(told)


def test_what_deviates_is_said_by_dtype(walk):
    page = walk("can-i-use.html", "#implementation=torch-mha")
    items = page.locator("#can-i-use-answer dd li")
    for dtype in ("", "float64", "bfloat16"):
        page.locator("#choose-dtype").select_option(dtype)
        wrong = [own for own in BY_KEY["torch-mha"]["known"] if not dtype or dtype in own["dtypes"]]
        expect(items).to_have_count(len(wrong))


GPU = {
    "on": "a GPU of this test, driver 1.2",
    "date": "2026-01-02",
    "asked": "--level core",
    "unavailable": "",
    "versions": {"torch": "9.9"},
    "dtypes": ["float32"],
    "accuracy": {"float32": "A0"},
    "answers": {"True in a mask": [["attends", "", False]]},
    "known": [],
}
HALVES = '<span class="on-cpu">of the CPU</span><span class="on-gpu" hidden>of the GPU</span>'


@pytest.fixture(scope="session")
def measured(site) -> str:
    """A page "Can I use" as it would be if one implementation was measured on a GPU."""
    before, start, rest = (site / "can-i-use.html").read_text().partition('id="site-data">')
    text, end, after = rest.partition("</script>")
    data = json.loads(text)
    for one in data["implementations"]:
        if one["key"] == "torch-mha":
            one["gpu"] = GPU
    before = re.sub("<td[^>]*>", lambda cell: cell[0] + HALVES, before, count=1)
    name = "can-i-use-on-a-gpu.html"
    (site / name).write_text("".join((before, start, json.dumps(data), end, after)))
    return name


def test_without_a_gpu_there_is_no_switch_and_the_page_says_why(walk):
    page = walk("can-i-use.html", "#implementation=torch-mha")
    if all(one["gpu"] is None for one in SITE["implementations"]):
        expect(page.get_by_role("group", name="Measured on")).to_have_count(0)
        expect(page.locator("main")).to_contain_text("nothing was measured on a GPU")
        assert "not measured on a GPU" in told(page)


def test_the_device_is_a_switch_by_keyboard(walk, measured):
    page = walk(measured, "#implementation=torch-mha&question=True+in+a+mask")
    seen = page.locator("#can-i-use-answer dd strong").first
    halves = [page.get_by_text(f"of the {device}", exact=True) for device in ("CPU", "GPU")]
    expect(seen).to_have_text("blocks")
    expect(halves[0]).to_be_visible()
    expect(halves[1]).to_be_hidden()
    page.get_by_role("radio", name="CPU").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="GPU")).to_be_checked()
    expect(seen).to_have_text("attends")
    expect(halves[0]).to_be_hidden()
    expect(halves[1]).to_be_visible()
    assert f"{GPU['on']}, {GPU['date']}, asked: --level core" in told(page)
    assert "float32 A0" in told(page)
    expect(page.locator("#choose-version")).to_contain_text("torch 9.9")
    expect(page.locator("#choose-dtype option")).to_have_text(["any", "float32"])
    assert serious(page) == []
    # The address is the answer: it can be sent to somebody.
    page = walk(measured, page.evaluate("location.hash"))
    expect(page.locator("#can-i-use-answer dd strong").first).to_have_text("attends")
    page.locator("#choose-implementation").select_option("jax-sdpa")
    expect(page.locator("#can-i-use-answer dd strong").first).to_have_text("not measured on a GPU")
    assert "What deviates" not in told(page)


def translation() -> tuple[int, int, int]:
    """A mask, and arguments of two libraries that can both say it and mean something else."""
    told = SITE["translator"]
    kinds = [kind for *_, kind in told["arguments"]]
    return next(
        (mask, source, target)
        for mask, given in enumerate(told["answers"])
        for source, one in enumerate(kinds)
        for target, other in enumerate(kinds)
        if one != other
        and given[one][0] >= 0
        and given[one][1][other] >= 0
        and given[one][1][other] != given[one][0]
    )


def test_the_translator_says_what_translate_says(walk):
    page = walk()
    click(page, "The translator of masks")
    mask, source, target = translation()
    page.locator("#choose-mask").select_option(str(mask))
    page.locator("#choose-from").select_option(str(source))
    page.locator("#choose-to").select_option(str(target))
    code = page.locator("#translator-answer pre").inner_text()
    arrays, _, rest = code.partition("# for any other mask:")
    assert rest
    known: dict[str, Any] = {}
    exec(arrays, known)
    shown = known[rest.partition(" = ")[0].split()[-1]].copy()
    exec(rest, known)
    np.testing.assert_array_equal(known[rest.partition(" = ")[0].split()[-1]], shown)


def test_a_defect_has_its_script_and_who_has_it(walk):
    page = walk("defects/all.html")
    page.locator(".md-content li a").first.click()
    expect(page.locator("table").first).to_contain_text("Dtypes")
    expect(page.locator("table td a").first).to_be_visible()


def test_every_badge_is_there(walk):
    page = walk("badges/all.html")
    loaded = "(own) => own.complete && own.naturalWidth > 60 && own.clientWidth >= 60"
    badges = page.locator("td img").all()
    assert len(badges) == len(BY_KEY)
    assert all(own.evaluate(loaded) for own in badges)


def test_the_search_finds_a_page(walk):
    # The theme warns of a query that comes before it has read its index, and asks it again later.
    early = ("Invalid query: ", "TypeError: Cannot read properties of undefined (reading '_index')")
    page = walk("can-i-use.html", warned=early)
    page.keyboard.press("/")
    page.keyboard.type("fully masked query", delay=5)
    expect(page.locator(".md-search-result__link").first).to_be_visible()


# Looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_no_serious_fault_on_any_kind_of_page(walk, site, kind, scheme):
    page = walk(named(site, kind), color_scheme=scheme, reduced_motion="reduce")
    assert serious(page) == []


@pytest.mark.parametrize("width", [390, 1400, 1920])
def test_no_page_is_wider_than_the_screen_and_tables_fit(walk, site, width):
    page = walk(viewport={"width": width, "height": 900})
    wide = {}
    for name in every_kind(site):
        page.goto((site / name).as_uri())
        wide[name] = page.evaluate(WIDE, width >= 1400)
    assert wide == {name: [] for name in wide}


WIDE = """(tables) => {
  const found = [];
  const over = document.documentElement.scrollWidth - innerWidth;
  if (over > 0) found.push(`the page, by ${over}`);
  for (const own of tables ? document.querySelectorAll(".md-typeset__scrollwrap") : []) {
    if (own.scrollWidth > own.clientWidth + 1) found.push(own.innerText.slice(0, 80));
  }
  return found;
}"""


def test_no_headings_of_a_page_read_the_same(walk, site):
    page = walk()
    for name in every_kind(site):
        page.goto((site / name).as_uri())
        heads = page.locator(".md-content :is(h1, h2)").all_inner_texts()
        assert Counter(heads).most_common(1)[0][1] == 1, name


def test_on_a_phone_every_part_of_the_site_is_two_taps_away(walk):
    page = walk(viewport={"width": 390, "height": 844})
    page.locator(".md-header label[for=__drawer]").click()
    parts = page.locator(".md-nav--primary > .md-nav__list > li")
    expect(parts).to_have_count(7)
    parts.filter(has_text="Answers").first.locator("label").first.click()
    expect(page.locator(".md-nav a:visible", has_text="Translator of masks")).to_be_in_viewport()


def test_on_a_phone_no_sentence_of_a_table_has_a_word_a_line(walk):
    page = walk("implementations/onnxruntime-gqa.html", viewport={"width": 390, "height": 844})
    for words in ("last queries with yarn", "unsupported → conforms"):
        box = page.locator("td:last-child", has_text=words).first.bounding_box()
        assert box is not None
        assert box["width"] >= 200, words

"""The documentation is executed: examples, programs, commands, links and names."""

from __future__ import annotations

import doctest
import importlib.util
import math
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from looped import for_each
from pages import DOCS, ROOT, blocks, commands, missing, prose, shell

import conformance
from conformance import MaskArgument, Parameter, attention_function
from conformance.adapter.loading import load
from conformance.cases.catalogue import catalogue, find_cases
from conformance.errors import ConformanceError
from conformance.judging.sandbox import check
from conformance.records.findings import STORED
from conformance.requirements import REQUIREMENTS
from conformance.running.examine import failure
from conformance.running.session import Item, Session, modes_of

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent == DOCS]
"""Tutorials are gone through as a whole, in test_walkthroughs."""

EXAMPLES = {
    "numpy_function.py:attention": "numpy",
    "jax_function.py:blockwise_attention": "jax",
    "torch_features.py:windowed_attention": "torch",
    "torch_paged.py:paged_attention": "torch",
    "torch_ranks.py:Gathering": "torch",
    "torch_module.py:CrossAttention": "torch",
    "jax_layer.py:SelfAttention": "jax",
    "anything.py:Loop": "numpy",
}


def narrow(example):
    family = "self" if "Self" in example else "cross"
    ragged = "feature/key-lengths" if "paged" in example else "mask/key-padding"
    cases = (f"{ragged}/{family}", f"plain/no-mask/{family}")
    return shlex.join(["--dtype", "float32", "--case", cases[0], "--case", cases[1]])


# Examples


@pytest.mark.sample(8)
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_conforms_on_the_command_line(example):
    pytest.importorskip(EXAMPLES[example])
    done = shell(f"mha-conformance run docs/examples/{example} --strict {narrow(example)}")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\w+: \d+ conforms$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.sample(8)
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_conforms_under_pytest(example):
    pytest.importorskip(EXAMPLES[example])
    done = shell(
        f"pytest -q --pyargs conformance --implementation docs/examples/{example} {narrow(example)}"
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the fully masked row
@pytest.mark.parametrize(
    "example", [name for name in EXAMPLES if EXAMPLES[name] != "jax" and "ranks" not in name]
)
def test_example_conforms_or_is_unsupported_everywhere(example):
    """In the dtype in which most is checked; JAX would compile for a minute, and ranks take one."""
    pytest.importorskip(EXAMPLES[example])
    adapter, session = load(f"{DOCS}/examples/{example}"), Session()
    verdicts = {
        case.id: session.examine(Item(adapter, case, "float32", "cpu", mode)).verdict
        for case in catalogue()
        for mode in modes_of(adapter, case, "float32").modes
    }
    allowed = {"conforms", "observed", "unsupported"}
    assert not {case: verdict for case, verdict in verdicts.items() if verdict not in allowed}
    assert sum(verdict == "conforms" for verdict in verdicts.values()) > 30


def test_smallest_example_is_ten_lines():
    lines = (DOCS / "examples" / "numpy_function.py").read_text().splitlines()
    code = lines[next(i for i, line in enumerate(lines) if line.startswith("@")) :]
    assert len([line for line in code if line.strip()]) <= 10


@pytest.mark.parametrize(
    "name", ["flipped_mask", "forgotten_scale", "finite_mask", "float64_scale"]
)
def test_mistakes_are_noticed(name):
    adapter = load(f"{DOCS}/examples/mistakes.py:{name}")
    (case,) = find_cases("mask/key-padding/cross")
    result = Session().examine(Item(adapter, case, "float32", "cpu", adapter.modes[0]))
    assert result.verdict == "deviates"


# Pages


@pytest.mark.sample(12)
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_programs_run(page, monkeypatch):
    """All programs of a page, in one namespace; `>>>` is compared with what it prints."""
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": page.stem}
    for language, text, line in blocks(page, "python", "pycon"):
        if language == "python" and "KERAS_BACKEND" in text:
            # One process has one backend, and other tests have chosen theirs.
            if importlib.util.find_spec("keras") is None:
                pytest.skip("needs keras")
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()
        elif language == "python":
            for framework in ("torch", "jax", "flax"):
                if re.search(rf"^(import|from) {framework}\b", text, re.MULTILINE):
                    pytest.importorskip(framework)
            # Blank lines in front, so that a traceback has the page's own line numbers.
            if "import judge" in text:
                try:
                    check("bubblewrap")
                except ConformanceError as error:
                    pytest.skip(str(error))
            exec(compile("\n" * (line - 1) + text, str(page), "exec"), names)
        else:
            test = doctest.DocTestParser().get_doctest(text, names, page.stem, str(page), line - 1)
            told: list[str] = []
            doctest.DocTestRunner(verbose=False).run(test, out=told.append, clear_globs=False)
            assert not told, "".join(told)


COMMANDS = [
    (page, *command)
    for page in GUIDES
    for block in blocks(page, "console")
    for command in commands(block.text)
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("page", "command", "wanted"), COMMANDS, ids=[f"{p.stem}-{c[:60]}" for p, c, _ in COMMANDS]
)
def test_commands_print_what_the_page_says(page, command, wanted):
    printed = shell(command).stdout
    assert not [*missing(wanted, printed)], printed


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@for_each(page=PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@for_each(page=PAGES)
def test_names_exist(page):
    """Cases, requirements and files that a page names."""
    requirements = {item.id for item in REQUIREMENTS}
    chapters = {item.chapter for item in REQUIREMENTS}
    parts = {case.chapter for case in catalogue()}
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[a-z]+\.[a-z]+(-[a-z]+)+", name) and name.split(".")[0] in chapters:
            assert name in requirements, name
        elif re.fullmatch(r"[a-z]+/[a-z/-]*", name) and name.split("/")[0] in parts:
            assert find_cases(name), name
        elif re.match(r"(conformance|docs|benchmarks|adapters|tests)/[\w./]+$", name):
            assert (ROOT / name).exists(), name
    for name in re.findall(r"--case ([\w/-]+)", text):
        assert name.startswith(("probe/", f"{STORED}/")) or find_cases(name), name
    for name in re.findall(r"`?(?:docs|benchmarks)/[\w/]+\.py", text):
        assert (ROOT / name.strip("`")).exists(), name


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for file in (*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md"), *DOCS.glob("examples/*.py")):
        assert file.name == "index.md" or f"({file.relative_to(DOCS)})" in index, file


def test_every_public_name_is_in_the_reference():
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    for name in conformance.__all__:
        home = getattr(conformance, name).__module__
        assert f"[`{name}`][{home}.{name}]" in index, name


# Mistakes that docs/adapters.md names, each made here


def module(**changes):
    """The adapter of torch_module.py with something changed."""
    pytest.importorskip("torch")
    right = type(load(f"{DOCS}/examples/torch_module.py:CrossAttention"))
    return type("Mistake", (right,), changes)()


def padding(name="padding", **meaning):
    """Its mask arguments, with another declaration of the first."""
    first = MaskArgument(name, "batch key", **meaning)
    return first, module().mask_arguments[1]


def row(which, **changes):
    """Its parameter table with one row changed."""
    fields = ("native", "sources", "pattern", "stack", "interleaved")
    return tuple(
        Parameter(**{name: getattr(it, name) for name in fields} | changes)
        if it.native == which
        else it
        for it in module().parameters
    )


def detached(self, layer, query, key, value, masks, mode):
    return layer(query, key.detach(), **masks, **mode.options)


def function(layout="batch heads length head", **changes):
    """The smallest adapter with something changed."""

    @attention_function(
        "numpy", MaskArgument("mask", "batch heads query key", true="attends"), layout=layout
    )
    def attention(query, key, value, mask=True):
        scale = changes.get("scale", query.shape[-1] ** -0.5)
        logits = np.where(mask, query @ key.swapaxes(-1, -2) * scale, changes.get("low", -np.inf))
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found = powers / powers.sum(axis=-1, keepdims=True) @ value
        return found.tolist() if changes.get("listed") else found

    attention.name = "attention"
    return attention


MISTAKES = {
    "other polarity, as observed": (
        lambda: module(mask_arguments=padding(true="attends")),
        "plain/no-mask/cross",
        "declared padding[bool] attends, observed blocks",
    ),
    "other polarity, as diagnosed": (
        lambda: module(mask_arguments=padding(true="attends")),
        "mask/key-padding/cross",
        "likely cause: equals the answer with the mask inverted",
    ),
    "other argument": (
        lambda: module(mask_arguments=padding("pad", true="blocks")),
        "mask/key-padding/cross",
        "TypeError: CrossAttentionModule.forward() got an unexpected keyword argument 'pad'",
    ),
    "numbers": (
        lambda: module(mask_arguments=padding(true="blocks", number="added")),
        "plain/no-mask/cross",
        "declared padding[0/-inf] added, observed rejected: RuntimeError: masked_fill_ only "
        "supports boolean masks",
    ),
    "missing row": (
        lambda: module(parameters=module().parameters[:-1]),
        "mask/key-padding/cross",
        "the parameter table must hold every canonical weight once: missing ['output_bias'], "
        "repeated [], rows only half there []",
    ),
    "wrong native name": (
        lambda: module(parameters=row("query.weight", native="q.weight")),
        "mask/key-padding/cross",
        "CrossAttentionModule and its parameter table differ: only the layer has query.weight; "
        "only the table has q.weight",
    ),
    "no bind": (
        lambda: module(framework="numpy"),
        "plain/no-mask/cross",
        "parameters are arguments in numpy: Mistake needs bind(layer, parameters)",
    ),
    "not transposed, shape tells": (
        lambda: module(
            parameters=row("query.weight", pattern="embed heads head -> embed (heads head)")
        ),
        "mask/key-padding/narrow",
        "query.weight has shape [15, 8], the table makes [8, 15]",
    ),
    "not transposed, shape does not tell": (
        lambda: module(
            parameters=row("query.weight", pattern="embed heads head -> embed (heads head)")
        ),
        "mask/key-padding/cross",
        "deviates: the output is not the definition's",
    ),
    "lost gradient": (
        lambda: module(call=detached),
        "mask/key-padding/cross",
        "deviates: there is no gradient.key",
    ),
    "promoted": (
        lambda: function(scale=np.float64(0.4472135955)),
        "plain/no-mask/cross",
        "deviates: inputs are float32, but output is float64",
    ),
    "other layout": (
        lambda: function(layout="batch length heads head"),
        "mask/key-padding/cross",
        "ValueError: operands could not be broadcast together",
    ),
    "leaking mask, as observed": (
        lambda: function(low=-10.0),
        "plain/no-mask/cross",
        "declared mask[bool] attends, observed unexplained",
    ),
    "leaking mask, as seen": (
        lambda: function(low=-10.0),
        "mask/key-padding/cross",
        "a blocked key moves output",
    ),
    "no scale": (
        lambda: function(scale=1.0),
        "mask/key-padding/cross",
        "likely cause: equals the answer without the scale",
    ),
    "list": (
        lambda: function(listed=True),
        "mask/key-padding/cross",
        "returned list, not an array of numpy",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_give_the_errors_that_the_page_shows(mistake):
    make, name, text = MISTAKES[mistake]
    assert text in (DOCS / "adapters.md").read_text(encoding="utf-8")
    adapter, (case,) = make(), find_cases(name)
    result = Session().examine(Item(adapter, case, "float32", "cpu", adapter.modes[0]))
    assert text in failure(result, "mistake")


def test_the_scale_above_is_the_right_one():
    """Else the promotion would not be the only mistake."""
    assert math.isclose(0.4472135955, find_cases("plain/no-mask/cross")[0].shape.default_scale)

"""The tutorials of the documentation, gone through as readers do: in order, in an empty folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pages
import pytest
import records

TUTORIALS = sorted((pages.DOCS / "tutorials").glob("*.md"), reverse=True)
"""The porter's first: it takes a third of the time of the others."""
NEEDS = {"porter": ("torch", "flax"), "maintainer": ("flax",)}


def written(text: str) -> str:
    """The name in the first line of a file, `# mine.py`."""
    return text.partition("\n")[0].removeprefix("# ")


def patched(folder: Path, text: str) -> None:
    """Apply a block of changes: one place, whose old lines are found once."""
    first, second, *lines = text.splitlines(keepends=True)
    assert first[4:] == second[4:], "one file"
    file = folder / first[4:].strip()
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    code = file.read_text(encoding="utf-8")
    assert code.count(old) == 1, old
    file.write_text(code.replace(old, new), encoding="utf-8")


def a_gate_of_everything(folder: Path) -> None:
    """The kernel is mended: its tests pass, and what it cannot be asked is counted on the page."""
    assert pages.shell("pytest -q", folder).returncode == 0
    gate = "mha-conformance gate mine.py:my_attention --baseline conformance.toml"
    done = pages.shell(f"{gate} --format json 2> errors.txt", folder)
    assert done.returncode == 0, done.stdout
    page = (pages.DOCS / "tutorials" / "kernel-author.md").read_text(encoding="utf-8")
    unsupported = json.loads(done.stdout)["items"]["unsupported"]
    assert f"`unsupported`: {unsupported:,} items" in page


def figures_of_masks(folder: Path) -> None:
    """The figures that the page leads to show what it says of them."""
    heads = (folder / "heads.svg").read_text(encoding="utf-8")
    assert "blocked: this query may not attend this key" in heads
    assert all(f">head {head}<" in heads for head in range(4))
    report = records.looked_at((folder / "both.html").read_text(encoding="utf-8"))
    _, heading, figure = report.partition("One mask, passed unchanged to every implementation</h3>")
    assert heading
    shown = re.findall(r'aria-label="(tutorial-\d), ([^"]*)"', figure.partition("</section>")[0])
    assert [text for name, text in shown if name == "tutorial-1"] == [
        "1 = may attend: 100% on blocked keys, NaN",
        "1 = blocked: as meant",
        "0 and −inf, added: ignored",
    ]
    assert [text for name, text in shown if name == "tutorial-2"] == [
        "1 = may attend: as meant",
        "1 = blocked: 100% on blocked keys",
        "0 and −inf, added: 100% on blocked keys",
    ]


def weights_of_another_layout(folder: Path) -> None:
    """What `convert` wrote is Flax's: a kernel for each projection, with an axis for the heads."""
    from safetensors.numpy import load_file

    kernels = load_file(folder / "flax.safetensors")
    assert kernels["query/kernel"].shape == kernels["key/kernel"].shape == (8, 2, 4)
    assert kernels["out/kernel"].shape == (2, 4, 8)


EFFECTS = {
    "kernel-author": a_gate_of_everything,
    "learner": figures_of_masks,
    "porter": weights_of_another_layout,
}
"""What a page says of the files that its commands leave. The maintainer's panel is looked at in
`browser/screenshots.py`."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_reader_gets_what_the_page_shows(page, tmp_path):
    for framework in NEEDS.get(page.stem, ("torch",)):
        pytest.importorskip(framework)
    for language, text, line in pages.blocks(page, "python", "diff", "console"):
        if language == "python":
            (tmp_path / written(text)).write_text(text, encoding="utf-8")
        elif language == "diff":
            patched(tmp_path, text)
        for command, wanted in pages.commands(text) if language == "console" else ():
            printed = pages.shell(command, tmp_path).stdout
            missing = [*pages.missing(wanted, printed)]
            assert not missing, f"{page.name}, line {line}: $ {command}\n{missing}\n\n{printed}"
    if page.stem in EFFECTS:
        EFFECTS[page.stem](tmp_path)


def test_the_attention_of_the_readme_conforms(tmp_path):
    pytest.importorskip("torch")
    (block,) = pages.blocks(pages.ROOT / "README.md", "python")
    (tmp_path / written(block.text)).write_text(block.text, encoding="utf-8")
    command = "mha-conformance run mine.py:my_attention --case mask/key-padding --dtype float32"
    done = pages.shell(f"{command} --strict", tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^my_attention: \d+ conforms", done.stdout, re.MULTILINE), done.stdout


def test_the_message_of_the_readme_is_what_a_run_ends_with(tmp_path):
    pytest.importorskip("torch")
    readme = pages.ROOT / "README.md"
    (block,) = pages.blocks(readme, "python")
    division = " / math.sqrt(query.shape[-1])"
    assert block.text.count(division) == 1
    (tmp_path / "mine.py").write_text(block.text.replace(division, ""), encoding="utf-8")
    shown = readme.read_text(encoding="utf-8").partition("these lines, among others:\n\n")[2]
    wanted = [line[4:] for line in shown.partition("\n\n")[0].splitlines()]
    assert len(wanted) > 4
    # It is the worst of the whole run, too; here are two cases beside each other.
    cases = (
        "--case plain/no-mask/wide-head --case plain/no-mask/cross --dtype float64 --dtype float32"
    )
    printed = pages.shell(f"mha-conformance run mine.py:my_attention {cases}", tmp_path).stdout
    assert not [*pages.missing(wanted, printed)], printed


def test_every_block_of_a_tutorial_is_gone_through():
    """A block in another language would be shown and not tried."""
    for page in TUTORIALS:
        fences = page.read_text(encoding="utf-8").count("\n```")
        assert fences == 2 * len(pages.blocks(page, "python", "diff", "console")), page


MISTAKES = {
    "window with one key fewer": (
        "(ahead < -left)",
        "(ahead <= -left)",
        "feature/window-causal-with-sinks/gqa",
        "the window counts the query's own key",
    ),
    "sinks that are capped, too": (
        "sinks[:, None, None]",
        "(sinks if softcap is None else softcap * torch.tanh(sinks / softcap))[:, None, None]",
        "feature/soft-cap-causal-with-sinks/gqa",
        "the soft cap applied to the sinks too",
    ),
    "cap that is lost beside a window": (
        "if softcap is not None:",
        "if softcap is not None and left < 0:",
        "feature/window-causal-with-soft-cap/gqa",
        "without the soft cap",
    ),
    "pages of the first entry": (
        "used = pages[",
        "used = block_table[0][",
        "feature/key-lengths-causal/gqa",
        "of the first batch entry for all",
    ),
    "key heads in turn": (
        "repeat_interleave(heads // cache.shape[2], dim=1)",
        "repeat(1, heads // cache.shape[2], 1)",
        "plain/no-mask/gqa",
        "key/value heads tiled instead of repeated",
    ),
}
"""What is written wrongly, in the example of a paged kernel; the case at level core that is to
notice it, and what it says."""


@pytest.mark.night
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_paged_example_is_found_named_and_reproduced(mistake, tmp_path):
    pytest.importorskip("torch")
    right, wrong, case, named = MISTAKES[mistake]
    code = (pages.DOCS / "examples" / "torch_paged.py").read_text(encoding="utf-8")
    assert code.count(right) == 1
    (tmp_path / "paged.py").write_text(code, encoding="utf-8")
    (tmp_path / "broken.py").write_text(code.replace(right, wrong), encoding="utf-8")
    asked = f"--level core --case {case} --dtype float32"
    done = pages.shell(f"mha-conformance gate paged.py:paged_attention {asked}", tmp_path)
    assert done.returncode == 0, done.stdout
    done = pages.shell(f"mha-conformance gate broken.py:paged_attention {asked}", tmp_path)
    assert done.returncode == 1, done.stdout
    assert named in done.stdout
    reproduce = f"mha-conformance reproduce {case} broken.py:paged_attention --dtype float32"
    done = pages.shell(f"{reproduce} -o shown.py", tmp_path)
    assert done.returncode == 1, done.stdout
    assert len((tmp_path / "shown.py").read_text(encoding="utf-8").splitlines()) <= 40
    assert "more than rounding can explain" in pages.shell("python shown.py", tmp_path).stdout

"""The gate, as programs and people meet it: the commands, and the plugin's options."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from test_cli import MINIATURES, mha, mini
from test_suite_plugin import conformance

from conformance.cli import main
from conformance.errors import ExitCode
from conformance.records.record import encode_line, read, save
from conformance.reports.gate.baseline import read_baseline

NARROW = ("--dtype", "float32", "--case", "mask/shared/self", "--case", "plain/no-mask/self")
QUICK = ("--no-isolate", *NARROW)
replace = Path.replace
EMPTY = "nothing deviates: the baseline is empty\n"


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """The command in this process, which is enough where nothing is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments, expect):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert ExitCode(code) == expect, printed
        return printed

    return run


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Records of what is right, and of what inverts its mask."""
    folder = tmp_path_factory.mktemp("records")
    for name in ("Correct", "Inverted"):
        mha("run", mini(name), *QUICK, "--record", f"{name}.json", cwd=folder)
    return {name: folder / f"{name}.narrowed.json" for name in ("Correct", "Inverted")}


def test_a_record_of_what_has_changed_since_is_refused(tmp_path, here):
    """Otherwise a gate is green of code that nobody ran."""
    example = Path(__file__).parents[1] / "docs" / "examples" / "numpy_function.py"
    text = example.read_text()
    (tmp_path / "mine.py").write_text(text)
    mha("run", "mine.py:attention", *NARROW, "--record", "r.json", cwd=tmp_path)
    gate = ("gate", "--from-record", "r.narrowed.json")
    here(*gate, expect=ExitCode.OK)
    (tmp_path / "mine.py").write_text(f"# A comment.\n{text}")
    here(*gate, expect=ExitCode.OK)
    (tmp_path / "mine.py").write_text(text.replace("-0.5", "-0.4"))
    told = here(*gate, expect=ExitCode.USAGE).err
    assert "mine.py has changed since it was measured; run again" in told
    (tmp_path / "mine.py").unlink()
    here(*gate, expect=ExitCode.OK)


@pytest.fixture
def known(records, tmp_path, here):
    """A folder with the baseline of what inverts its mask."""
    options = ["--from-record", records["Inverted"], "--reason", "It was published so."]
    here("baseline", "update", *options, expect=ExitCode.OK)
    return tmp_path


def test_a_kernel_is_wrong_then_known_then_fixed(tmp_path):
    kernel = tmp_path / "mine.py"
    source = MINIATURES.read_text(encoding="utf-8")
    spec = "mine.py:Correct"

    def gate(expect, *more):
        return mha("gate", spec, *QUICK, *more, cwd=tmp_path, expect=expect).stdout

    wrong = "np.where(mask, logits, -np.inf)"
    assert source.count(wrong) == 1
    kernel.write_text(source.replace(wrong, "np.where(~mask, logits, -np.inf)"), encoding="utf-8")
    told = gate(ExitCode.DEVIATES)
    assert "changed for the worse" in told
    assert "equals the answer with the mask inverted" in told
    assert "mha-conformance run mine.py:Correct --case mask/shared/" in told

    update = ["baseline", "update", spec, *QUICK]
    mha(*update, "--reason", "Mine is the other way round.", cwd=tmp_path, expect=ExitCode.OK)
    assert "Mine is the other way round." in gate(ExitCode.OK, "-v")

    kernel.write_text(source, encoding="utf-8")
    told = gate(ExitCode.DEVIATES)
    assert "out of date" in told
    assert "fixed: line 1" in told


def test_a_record_is_judged_without_running(records, known, here):
    def gate(name, expect):
        return here("gate", "--from-record", records[name], expect=expect).out

    assert "known deviations" in gate("Inverted", ExitCode.OK)
    assert "fixed" in gate("Correct", ExitCode.DEVIATES)


def test_a_part_of_a_record_may_be_judged(records, here):
    options = ("--from-record", records["Correct"])
    here("gate", "Correct", *options, expect=ExitCode.OK)
    told = here("gate", "Corect", *options, expect=ExitCode.USAGE)
    assert "did you mean Correct" in told.err


def test_reasons_that_are_missing_are_asked_for(records, here):
    options = ("--from-record", records["Inverted"])
    told = here("baseline", "update", *options, expect=ExitCode.OK).out
    assert "the gate holds once these say why: line 1" in told
    assert "no reason: line 1" in here("gate", *options, expect=ExitCode.DEVIATES).out


def test_a_journal_is_judged_and_is_incomplete(records, tmp_path, here):
    found = read(records["Correct"])
    journal = tmp_path / "r.json.journal"
    lines = [msgspec.json.encode(found.header), *(encode_line(r, {}) for r in found.results[:-1])]
    journal.write_bytes(b"".join(line + b"\n" for line in lines))
    told = here("gate", "--from-record", journal, expect=ExitCode.INCOMPLETE).out
    assert "1 not verified" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "which implementation"),
        (("nobody",), "nobody"),
        (("--from-record", "none.json"), "none.json"),
        (("x", "--from-record", "{record}", "-x"), "-x"),
    ],
)
@pytest.mark.parametrize("command", [("gate",), ("baseline", "update")])
def test_wrong_usage_is_one_line(records, tmp_path, here, command, arguments, told):
    arguments = [part.format(record=records["Correct"]) for part in arguments]
    printed = here(*command, *arguments, expect=ExitCode.USAGE).err
    assert told in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "conformance.toml").exists()


def test_baseline_asks_what_to_do(here):
    assert "update" in here("baseline", expect=ExitCode.USAGE).err


def test_a_broken_baseline_is_told_before_anything_is_run(tmp_path, here):
    (tmp_path / "conformance.toml").write_text("[[known]]\nverdict = 'wrong'\n", encoding="utf-8")
    assert "line 1" in here("gate", mini("Nobody"), expect=ExitCode.USAGE).err


def test_a_version_that_there_is_not_is_told_before_anything_is_run(tmp_path):
    entry = "case = '*'\nverdict = 'deviates'\nreason = 'x'\nwhen = 'torch_version > \"2\"'\n"
    (tmp_path / "conformance.toml").write_text(f"[[known]]\n{entry}", encoding="utf-8")
    done = mha("gate", mini("Correct"), *QUICK, cwd=tmp_path, expect=ExitCode.USAGE)
    assert "torch_version" in done.stdout + done.stderr
    assert "numpy_version" in done.stdout + done.stderr


def test_the_record_is_written_although_the_gate_is_red(tmp_path):
    options = ["--record", "r.json", *QUICK]
    mha("gate", mini("Inverted"), *options, cwd=tmp_path, expect=ExitCode.DEVIATES)
    assert read(tmp_path / "r.narrowed.json").complete


def test_the_advice_after_a_record_runs_nothing_again(tmp_path, here):
    options = ["--record", "r.json", *QUICK]
    told = mha("gate", mini("Inverted"), *options, cwd=tmp_path, expect=ExitCode.DEVIATES).stdout
    assert "\nconformance.toml: no such file, nothing is known yet\n" in told
    (advice,) = re.findall(r"^  mha-conformance (.*) --reason '...'$", told, re.MULTILINE)
    assert advice == "baseline update --from-record r.narrowed.json --baseline conformance.toml"
    here(*advice.split(), "--reason", "x", expect=ExitCode.OK)
    here("gate", *advice.split()[2:], expect=ExitCode.OK)


def test_an_update_names_a_record_only_if_it_stays(tmp_path):
    def update(*more):
        command = ("baseline", "update", mini("Correct"), *QUICK, *more)
        return mha(*command, cwd=tmp_path, expect=ExitCode.OK).stdout

    told = update()
    assert "record:" not in told
    assert "Correct: " not in told
    assert told.endswith("conformance.toml: nothing to edit\n" + EMPTY)
    assert f"record: {tmp_path / 'r.narrowed.json'}\n" in update("--record", "r.json")


def test_an_update_never_judges_an_earlier_record(records, tmp_path):
    """Nothing is selected, so nothing is written; what lies there is of another run."""
    shutil.copy(records["Inverted"], tmp_path / "r.narrowed.json")
    command = ["baseline", "update", mini("Correct"), *QUICK, "-k", "nothing", "--record", "r.json"]
    mha(*command, cwd=tmp_path, expect=ExitCode.NOTHING_VERIFIED)
    assert not (tmp_path / "conformance.toml").exists()


def test_an_update_that_empties_the_file_says_so(known, records, here):
    told = here("baseline", "update", "--from-record", records["Correct"], expect=ExitCode.OK).out
    assert told.endswith("conformance.toml: written\n" + EMPTY)


def test_what_is_not_there_verifies_nothing(tmp_path):
    done = mha("gate", mini("Unready"), *QUICK, cwd=tmp_path, expect=ExitCode.NOTHING_VERIFIED)
    assert "nothing was verified" in done.stdout


def test_who_dies_is_not_excused(tmp_path):
    text = "[[known]]\ncase = ['mask/*', 'plain/*']\n"
    text += "verdict = 'deviates'\nreason = 'x'\nstrict = false\n"
    (tmp_path / "conformance.toml").write_text(text, encoding="utf-8")
    options = ("--case", "mask/shared/self", "--case", "plain/no-mask/self", "--dtype", "float32")
    told = mha("gate", mini("Dies"), *options, cwd=tmp_path, expect=ExitCode.DEVIATES).stdout
    assert "not verified, 1 item: crashed" in told


@pytest.mark.night
def test_several_processes_judge_as_one_does(known):
    done = mha("gate", mini("Inverted"), *QUICK, "-n", "2", cwd=known, expect=ExitCode.OK)
    assert "holds" in done.stdout


# In pytest


def test_pytest_passes_with_what_is_known(known):
    options = ("--implementation", mini("Inverted"), *QUICK, "--junitxml", "junit.xml")
    done = conformance(known, *options, "--conformance-baseline", "conformance.toml", expect=0)
    assert " known" in done.stdout.splitlines()[-1]
    assert "known: It was published so." in (known / "junit.xml").read_text(encoding="utf-8")
    assert "gate: Inverted: holds" in done.stdout


def test_pytest_fails_what_is_new_and_only_that(known, records):
    text = (known / "conformance.toml").read_text(encoding="utf-8")
    assert '"output.equals-definition", ' in text
    text = text.replace('"output.equals-definition", ', "")
    (known / "conformance.toml").write_text(text, encoding="utf-8")
    options = ["--implementation", mini("Inverted"), *QUICK, "--junitxml", "junit.xml"]
    done = conformance(known, *options, "--conformance-baseline", "conformance.toml", expect=1)
    failures = done.stdout.partition("= FAILURES =")[2].partition("= conformance =")[0]
    assert "output.equals-definition (must)" in failures
    assert "weights.equal-definition (must)" not in failures
    suite = ElementTree.parse(known / "junit.xml").getroot()[0]
    assert int(suite.get("failures")) > 0
    assert int(suite.get("failures")) < int(suite.get("tests"))


def test_pytest_fails_at_the_end_if_the_baseline_is_out_of_date(known):
    options = ("--implementation", mini("Correct"), *QUICK)
    done = conformance(known, *options, "--conformance-baseline", "conformance.toml", expect=1)
    assert "fixed" in done.stdout


def test_pytest_says_what_is_wrong_with_a_baseline(tmp_path):
    (tmp_path / "b.toml").write_text("known = 1", encoding="utf-8")
    options = ("--implementation", mini("Correct"), *QUICK)
    done = conformance(tmp_path, *options, "--conformance-baseline", "b.toml", expect=4)
    assert "b.toml" in done.stderr


# The table of a project


TABLE = """
[tool.mha-conformance]
implementations = ["{implementation}"]
cases = ["mask/shared/self", "plain/no-mask/self"]
dtypes = ["float32"]
baseline = "known.toml"
record = "made.json"
"""


def test_the_table_of_a_project_says_what_the_gate_asks(tmp_path):
    text = TABLE.format(implementation=mini("Inverted"))
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    done = mha("gate", "--no-isolate", cwd=tmp_path, expect=ExitCode.DEVIATES)
    assert "gate: Inverted: changed for the worse" in done.stdout
    assert "known.toml: no such file" in done.stdout
    # What the table chooses is the whole.
    made = read(tmp_path / "made.json")
    assert made.header.provenance.selection == ""
    assert made.header.provenance.chosen.startswith("--case ")
    assert {result.dtype for result in made.results} == {"float32"}
    assert {result.case for result in made.results} == {"mask/shared/self", "plain/no-mask/self"}
    # What is given is not taken from the table; the rest is.
    options = ("--case", "plain/no-mask/self", "--record", "other.json", "--no-isolate")
    mha("gate", mini("Correct"), *options, cwd=tmp_path, expect=ExitCode.OK)
    (result,) = read(tmp_path / "other.narrowed.json").results
    assert result.id == "Correct:plain/no-mask/self:float32:cpu:default"


def test_what_the_table_leaves_out_later_is_less_verified(tmp_path, here):
    table = f'implementations = ["{mini("Correct")}"]\ncases = ["plain/no-mask/self"]\n'
    table = f'[tool.mha-conformance]\n{table}level = "full"\nrecord = "r.json"\n'
    dtypes = 'dtypes = ["float32", "float16"]\n'
    (tmp_path / "pyproject.toml").write_text(table + dtypes, encoding="utf-8")
    here("baseline", "update", "--no-isolate", expect=ExitCode.OK)
    counts = read_baseline(tmp_path / "conformance.toml").verified
    assert {place.split(":")[0] for place in counts["Correct"]} == {"float32", "float16", "*"}
    assert "all that pyproject.toml asks" in here("gate", "--no-isolate", expect=ExitCode.OK).out
    (tmp_path / "pyproject.toml").write_text(table + 'dtypes = ["float32"]\n', encoding="utf-8")
    told = here("gate", "--no-isolate", expect=ExitCode.DEVIATES).out
    assert "less verified: Correct at float16:cpu" in told
    # An option restricts a run, as before, and what it leaves out is not lost.
    here("gate", "--no-isolate", "--dtype", "float32", expect=ExitCode.OK)


def test_a_level_that_the_table_chooses_is_the_whole(tmp_path, here):
    table = f'[tool.mha-conformance]\nimplementations = ["{mini("Correct")}"]\nrecord = "r.json"\n'
    table += 'cases = ["plain/no-mask/self"]\n'
    for level in ("default", "core"):
        (tmp_path / "pyproject.toml").write_text(f'{table}level = "{level}"\n', encoding="utf-8")
        if level == "core":
            # Nothing that was counted before is asked.
            told = here("gate", "--no-isolate", expect=ExitCode.DEVIATES).out
            assert "not counted: Correct: " in told
        here("baseline", "update", "--no-isolate", expect=ExitCode.OK)
        told = here("gate", "--no-isolate", expect=ExitCode.OK).out
        assert "all that pyproject.toml asks" in told
        assert "narrowed" not in told
    assert read(tmp_path / "r.json").header.provenance.chosen.endswith("--level core")
    places = read_baseline(tmp_path / "conformance.toml").verified["Correct"]
    assert {"core:float32:cpu:default", "core:*:cpu:*"} <= {*places}


PROMISING = """
import torch
from conformance import attention_function

@attention_function("torch", dtypes=("float32", "bfloat16"), accuracy={accuracy}, promises={same})
def mine(query, key, value):
    stored = query.dtype
    query, key, value = (array.to({inside}) for array in (query, key, value))
    weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
    return (weights @ value).to(stored)
"""
EXACT, ROUNDING = "torch.float32", "stored"
SAME = "{'runs': 'equal bits'}"
STRICT = "{'bfloat16': 'A'}"


@pytest.mark.night
@pytest.mark.parametrize(
    ("accuracy", "inside", "same", "told"),
    [
        ("''", ROUNDING, SAME, "bfloat16: pinned A, now C"),
        ("{'bfloat16': 'A', 'float32': 'TF32'}", EXACT, SAME, "float32: pinned A0, now TF32"),
        (STRICT, EXACT, "{}", "runs: pinned equal bits, now nothing"),
    ],
)
def test_a_promise_that_is_withdrawn_is_red(tmp_path, here, accuracy, inside, same, told):
    """What is less accurate conforms as soon as less is promised, in the same findings."""
    pytest.importorskip("torch")
    cases = '["logits/large/self", "probe/repeatability"]'
    table = f'implementations = ["mine.py:mine"]\ncases = {cases}\nlevel = "full"\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.mha-conformance]\n{table}", encoding="utf-8")

    def judged(accuracy, inside, expect, same=SAME, command=("gate",)):
        text = PROMISING.format(accuracy=accuracy, inside=inside, same=same)
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        return here(*command, expect=expect).out

    judged(STRICT, EXACT, ExitCode.OK, command=("baseline", "update"))
    promised = read_baseline(tmp_path / "conformance.toml").promised["mine"]["cpu"]
    assert promised == {"float32": "A0", "bfloat16": "A", "runs": "equal bits"}
    if inside == ROUNDING:
        assert "new: mine deviates" in judged(STRICT, ROUNDING, ExitCode.DEVIATES)
    printed = judged(accuracy, inside, ExitCode.DEVIATES, same)
    assert f"less promised: mine on cpu: {told}\n" in printed
    if same == SAME:
        assert "new:" not in printed
        assert "less verified" not in printed


def test_what_has_another_name_is_not_counted(records, tmp_path, here):
    made = read(records["Correct"])
    provenance = msgspec.structs.replace(made.header.provenance, selection="")
    header = msgspec.structs.replace(made.header, provenance=provenance)
    path = tmp_path / "made.json"
    save(path, msgspec.structs.replace(made, header=header))
    here("baseline", "update", "--from-record", path, expect=ExitCode.OK)
    here("gate", "--from-record", path, expect=ExitCode.OK)
    baseline = tmp_path / "conformance.toml"
    text = baseline.read_text(encoding="utf-8")
    assert "[verified.Correct]" in text
    baseline.write_text(text.replace("verified.Correct", "verified.Renamed"), encoding="utf-8")
    told = here("gate", "--from-record", path, expect=ExitCode.DEVIATES).out
    assert "not counted: Correct: conformance.toml has numbers of others, or" in told


def test_a_baseline_that_is_misspelt_is_no_empty_one(records, here):
    record = ("--from-record", records["Correct"])
    (line,) = here(
        "gate", *record, "--baseline", "known.tmol", expect=ExitCode.USAGE
    ).err.splitlines()
    assert "known.tmol: no such file" in line


def test_a_run_without_names_takes_the_table_and_one_with_a_name_nothing(tmp_path):
    text = TABLE.format(implementation=mini("Inverted"))
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    mha("run", "--shard", "1/2", "--no-isolate", cwd=tmp_path, expect=ExitCode.OK)
    (result,) = read(tmp_path / "made.shard-1-of-2.json").results
    assert result.id == "Inverted:plain/no-mask/self:float32:cpu:default"
    options = ("--case", "mask/shared/self", "--dtype", "float64", "--no-isolate")
    mha("run", mini("Correct"), *options, cwd=tmp_path, expect=ExitCode.OK)
    assert not (tmp_path / "made.narrowed.json").exists()
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (line,) = mha("run", cwd=tmp_path, expect=ExitCode.USAGE).stderr.splitlines()
    assert "which implementation?" in line


def test_a_record_is_judged_whatever_the_table_names(records, tmp_path, here):
    text = TABLE.format(implementation="nobody.py:nothing")
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    record = ("--from-record", records["Inverted"])
    here("baseline", "update", *record, "--reason", "so", expect=ExitCode.OK)
    assert read_baseline(tmp_path / "known.toml").entries
    here("gate", *record, expect=ExitCode.OK)
    (tmp_path / "none.toml").touch()
    here("gate", *record, "--baseline", "none.toml", expect=ExitCode.DEVIATES)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("implementation = ['ours']", "unknown key 'implementation'; did you mean implementations"),
        ("implementations = 'ours'", "Expected `array`, got `str` - at `$.implementations`"),
        ("implementations = [1]", "Expected `str`, got `int` - at `$.implementations[0]`"),
        ("dtypes = ['float31']", "unknown dtype 'float31'; did you mean float32"),
        ("level = 'corr'", "unknown level 'corr'; did you mean core"),
        ("device = 'cuda'", "unknown device 'cuda'"),
        ("baseline = true", "Expected `str`, got `bool` - at `$.baseline`"),
        ("implementations", "cannot be read"),
    ],
)
def test_what_is_wrong_in_the_table_is_one_line(tmp_path, here, table, told):
    text = f"[tool.mha-conformance]\n{table}\n"
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    for command in (("gate", "ours"), ("baseline", "update", "ours")):
        (line,) = here(*command, expect=ExitCode.USAGE).err.splitlines()
        assert line.startswith("mha-conformance: pyproject.toml: ")
        assert told in line


@pytest.mark.parametrize("table", ["", "tool = 3", "[tool.mha-conformance]\nlevel = 'core'"])
def test_without_implementations_in_the_table_one_is_named(tmp_path, here, table):
    (tmp_path / "pyproject.toml").write_text(table, encoding="utf-8")
    (line,) = here("gate", expect=ExitCode.USAGE).err.splitlines()
    assert "which implementation?" in line


# Writing


def test_a_baseline_is_written_in_the_folder_that_is_named(records, tmp_path, here):
    file = tmp_path / "new" / "b.toml"
    options = ["--from-record", records["Inverted"], "--baseline", file, "--reason", "so"]
    here("baseline", "update", *options, expect=ExitCode.OK)
    assert read_baseline(file).entries
    assert list(file.parent.iterdir()) == [file]


def test_a_link_and_permissions_stay(known, records, tmp_path, here, monkeypatch):
    real = tmp_path / "elsewhere" / "real.toml"
    real.parent.mkdir()
    shutil.move(known / "conformance.toml", real)
    real.chmod(0o600)
    (known / "conformance.toml").symlink_to(real)
    moved = []
    monkeypatch.setattr(Path, "replace", lambda own, to: moved.append(own) or replace(own, to))
    here("baseline", "update", "--from-record", records["Correct"], expect=ExitCode.OK)
    # Beside the target: it may be on another file system, across which nothing is renamed.
    assert [own.parent for own in moved if own.name.startswith(real.name)] == [real.parent]
    assert (known / "conformance.toml").is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert not read_baseline(real).entries


def test_a_baseline_that_cannot_be_written_is_one_line(records, tmp_path, here):
    (tmp_path / "file").write_text("", encoding="utf-8")
    options = ["--from-record", records["Inverted"], "--baseline", tmp_path / "file" / "b.toml"]
    printed = here("baseline", "update", *options, expect=ExitCode.USAGE).err
    assert len(printed.splitlines()) == 1


def test_help_is_quick():
    program = "import sys\nfrom conformance.cli import main\n"
    program += "try: main(['gate', '--help'])\nexcept SystemExit: pass\n"
    program += "print({'tomlkit', 'rich', 'numpy', 'pytest', 'packaging'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"

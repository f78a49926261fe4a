"""A small factory of records and reports, for the tests of what is made of them."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from pathlib import Path

import msgspec
import numpy as np

from conformance.experiments import TOPICS
from conformance.records.findings import (
    NOTHING,
    CaseResult,
    Entry,
    Figures,
    Finding,
    Phrase,
    Worst,
)
from conformance.records.header import (
    SCHEMA,
    CausalInfo,
    Header,
    Implementation,
    MaskInfo,
    Provenance,
)
from conformance.records.record import Record, seal_of
from conformance.reports import model as data
from conformance.reports.page.html import render_html as rendered
from conformance.reports.writing import build
from conformance.running.provenance import requirements

SUBJECTS = {
    "NaN in a blocked key (mask, bool)": Phrase(
        "leak",
        {
            "number": Phrase("number.nan"),
            "input": Phrase("input.key"),
            "argument": "mask",
            "form": Phrase("form.bool"),
        },
    ),
    "attn_mask, bool": Phrase(
        "mask.meaning", {"argument": "attn_mask", "form": Phrase("form.bool")}
    ),
    "attn_mask, float32 0/1": Phrase(
        "mask.meaning",
        {"argument": "attn_mask", "form": Phrase("form.zero-one", {"dtype": "float32"})},
    ),
    "flag alone, equal lengths": Phrase(
        "causal.alone", {"flag": "flag", "lengths": Phrase("lengths.equal")}
    ),
    "flag alone, fewer queries than keys": Phrase(
        "causal.alone", {"flag": "flag", "lengths": Phrase("lengths.fewer-queries")}
    ),
    "flag with attn_mask causal, equal lengths": Phrase(
        "causal.with-triangle",
        {
            "flag": "flag",
            "argument": "attn_mask",
            "triangle": Phrase("causal.square"),
            "lengths": Phrase("lengths.equal"),
        },
    ),
    "flag with attn_mask, equal lengths": Phrase(
        "causal.beside",
        {"flag": "flag", "argument": "attn_mask", "lengths": Phrase("lengths.equal")},
    ),
    "flag with padding, equal lengths": Phrase(
        "causal.beside", {"flag": "flag", "argument": "padding", "lengths": Phrase("lengths.equal")}
    ),
    "key_mask, bool": Phrase("mask.meaning", {"argument": "key_mask", "form": Phrase("form.bool")}),
    "mask, 1 = blocked": Phrase(
        "same-mask", {"argument": "mask", "written": Phrase("written.one-blocks")}
    ),
    "mask, 1 = may attend": Phrase(
        "same-mask", {"argument": "mask", "written": Phrase("written.one-attends")}
    ),
    "mask, bool": Phrase("mask.meaning", {"argument": "mask", "form": Phrase("form.bool")}),
    "mask, bool: gradients": Phrase(
        "fully-masked.gradients", {"argument": "mask", "form": Phrase("form.bool")}
    ),
    "mask, bool: output": Phrase(
        "fully-masked.output", {"argument": "mask", "form": Phrase("form.bool")}
    ),
    "mask, float32 0/1": Phrase(
        "mask.meaning", {"argument": "mask", "form": Phrase("form.zero-one", {"dtype": "float32"})}
    ),
    "mask, float32 0/−1e9: output": Phrase(
        "fully-masked.output",
        {
            "argument": "mask",
            "form": Phrase("form.zero-large", {"dtype": "float32", "large": "1e9"}),
        },
    ),
    "mask, float32 0/−inf": Phrase(
        "mask.meaning",
        {"argument": "mask", "form": Phrase("form.zero-infinite", {"dtype": "float32"})},
    ),
    "mask: shapes it refuses": Phrase("shapes.refused", {"argument": "mask"}),
    "mask: shapes it takes": Phrase("shapes.taken", {"argument": "mask"}),
    "returned weights": Phrase("weights.returned"),
    "returned weights are those": Phrase("dropout.returned"),
}
VALUES = {
    "100% on blocked keys": Phrase("same-mask.attends-future", {"percent": 100}),
    "99% on blocked keys": Phrase("same-mask.attends-future", {"percent": 99}),
    "NaN": Phrase("row.nan"),
    "NaN: keys": Phrase("gradients.nan", {"places": [Phrase("place.keys")]}),
    "[batch, key]": Phrase("shapes", {"shapes": ["batch key"]}),
    "[key] [batch, key]": Phrase("shapes", {"shapes": ["key", "batch key"]}),
    "[key] [query]": Phrase("shapes", {"shapes": ["key", "query"]}),
    "[query]": Phrase("shapes", {"shapes": ["query"]}),
    "added": Phrase("mask.added"),
    "after dropout": Phrase("dropout.after"),
    "as if unmasked": Phrase("row.unmasked"),
    "as meant": Phrase("same-mask.as-meant"),
    "attends": Phrase("mask.attends"),
    "blocks": Phrase("mask.blocks"),
    "both": Phrase("combined.both"),
    "causal": Phrase("causal.square"),
    "finite": Phrase("gradients.finite"),
    "flag only": Phrase("combined.only", {"argument": "flag"}),
    "hidden": Phrase("leak.hidden"),
    "ignored": Phrase("mask.ignored"),
    "mean of the values": Phrase("row.mean-of-values"),
    "none": Phrase("weights.none"),
    "per head": Phrase("weights.per-head"),
    "reaches gradients of parameters": Phrase(
        "leak.reaches", {"places": [Phrase("place.gradients", {"of": "parameters"})]}
    ),
    "reaches the output, gradients of key": Phrase(
        "leak.reaches",
        {"places": [Phrase("place.output"), Phrase("place.gradients", {"of": "key"})]},
    ),
    "refused": Phrase("refused"),
    "top-left": Phrase("causal.top-left"),
}


def masks(*meanings: tuple[str, str, Phrase]) -> Phrase:
    """What masks mean: of each the argument, its form, and the meaning."""
    return Phrase(
        "mask.meanings",
        {
            "meanings": [
                Phrase("mask.means", {"argument": name, "form": Phrase(form), "meaning": meaning})
                for name, form, meaning in meanings
            ]
        },
    )


def masked_query(row: str, *beside: Phrase) -> Phrase:
    """What a fully masked query gets, and what was seen beside it."""
    more = {"beside": Phrase("beside", {"parts": [*beside]})} if beside else {}
    return Phrase("fully-masked.query", {"row": Phrase(row), **more})


FINITE = Phrase("beside.gradients", {"value": Phrase("gradients.finite")})
BLOCKS, ATTENDS, IGNORED = (Phrase(f"mask.{what}") for what in ("blocks", "attends", "ignored"))
OBSERVED = {
    "mask[0/1]=attends": masks(("mask", "form.zero-one", ATTENDS)),
    "mask[0/1]=blocks": masks(("mask", "form.zero-one", BLOCKS)),
    "mask[bool]=attends": masks(("mask", "form.bool", ATTENDS)),
    "mask[bool]=blocks": masks(("mask", "form.bool", BLOCKS)),
    "mask[bool]=blocks other[0/1]=attends": masks(
        ("mask", "form.bool", BLOCKS), ("other", "form.zero-one", ATTENDS)
    ),
    "mask[bool]=ignored": masks(("mask", "form.bool", IGNORED)),
    "nan": masked_query("row.nan"),
    "nan; NaN in gradients of query, key": masked_query(
        "row.nan", Phrase("beside.nan-in-gradients", {"arrays": ["query", "key"]})
    ),
    "nan; gradients finite": masked_query("row.nan", FINITE),
    "output bias; gradients finite": masked_query("row.output-bias", FINITE),
    "zeros": masked_query("row.zeros"),
}

OUTPUT = "output.equals-definition"
GRADIENT = "gradient.inputs-equal-definition"
POLARITY = "mask.polarity-is-as-declared"
MASKED = "observed.fully-masked-row"
NASTY = "<script>alert('1')</script>|`a`*b*_c_[d](e)&#64;"


def implementation(name: str = "mine", **changes: object) -> Implementation:
    fields: dict = {
        "name": name,
        "title": name.title(),
        "documentation": "https://example.org/docs",
        "framework": "torch",
        "spec": f"path/to/{name}.py:Attention",
        "versions": {"torch": "2.9"},
        "modes": ["train", "eval"],
        "dtypes": ["float64", "float32"],
        "masks": [MaskInfo("mask", ["batch heads query key"], "attends", None)],
    }
    return Implementation(**fields | changes)


def figures(size: float, accuracy: str = "A0", limit: float = 8.0) -> Figures:
    return Figures("output", size, size / 4, 0.0, limit, accuracy)


def result(
    *findings: Finding,
    name: str = "mine",
    case: str = "plain/no-mask/self",
    dtype: str = "float32",
    mode: str = "train",
) -> CaseResult:
    return CaseResult(name, case, dtype, "cpu", mode, list(findings))


def good(requirement: str = OUTPUT, size: float = 2.0) -> Finding:
    return Finding(requirement, "conforms", figures=figures(size))


def bad(requirement: str = OUTPUT, size: float = 99.0, **changes: object) -> Finding:
    fields: dict = {
        "detail": "the output is not the definition's",
        "figures": figures(size, ""),
        "worst": Worst("output", (0, 1, 2), "0.5", "0.25", "0.001"),
    }
    return Finding(requirement, "deviates", **fields | changes)


def provenance(**changes: object) -> Provenance:
    fields: dict = {
        "suite": "1.0",
        "catalogue": "abc",
        "created": "2026-01-02T03:04:05+00:00",
        "run": "run-1",
        "python": "3.11.0",
        "platform": "Linux x86_64",
        "device": "cpu",
        "device_model": "a CPU",
        "packages": {"numpy": "2.0"},
        "command": "mha-conformance run mine",
    }
    return Provenance(**fields | changes)


def record(
    *results: CaseResult,
    name: str = "env",
    implementations: list[Implementation] | None = None,
    complete: bool = True,
    planned: int | None = None,
    **changes: object,
) -> Record:
    if implementations is None:
        names = dict.fromkeys(item.implementation for item in results) or ["mine"]
        implementations = [implementation(own) for own in names]
    header = Header(
        SCHEMA,
        name,
        provenance(**changes),
        implementations,
        len(results) if planned is None else planned,
        requirements=requirements(),
        topics=list(TOPICS),
    )
    return Record(header, complete, list(results))


def loaded(own: Record, arrays: dict | None = None) -> data.Loaded:
    return Path(f"{own.header.name}.json"), own, arrays or {}


def report(*results: CaseResult, **changes: object) -> data.Report:
    return build([loaded(record(*results, **changes))])


def save(folder: Path, own: Record, file: str = "") -> Path:
    path = folder / (file or f"{own.header.name}.json")
    path.write_bytes(msgspec.json.encode(own))
    return path


def resealed(document: dict) -> str:
    """The text of a record that was edited, with a seal as if it had been written so."""
    text = json.dumps({name: value for name, value in document.items() if name != "seal"})
    return json.dumps(json.loads(text) | {"seal": seal_of(text.encode())})


def phrased(table: dict[str, Phrase], text: str | Phrase) -> Phrase:
    """The phrase that a table has for a text; what nobody says stands for itself."""
    if isinstance(text, Phrase):
        return text
    return table.get(text) or (Phrase("text", {"text": text}) if text else NOTHING)


def observed(requirement: str, value: str | Phrase, **where: str) -> CaseResult:
    return result(Finding(requirement, "conforms", value=phrased(OBSERVED, value)), **where)


def entry(
    experiment: str,
    subject: str,
    value: str,
    evidence: str = "",
    declared: str = "",
    *,
    agrees: bool = True,
    code: str = "",
) -> Entry:
    """An entry by what the tables above say for its phrases."""
    about = phrased(SUBJECTS, subject)
    seen, said = (phrased(VALUES, text) for text in (value, declared))
    return Entry(about, seen, evidence, said, agrees, code)


def backends(*values: str) -> data.Report:
    names = [f"keras-{backend}" for backend in ("tensorflow", "jax", "torch")[: len(values)]]
    return report(
        *(
            observed(POLARITY, f"mask[bool]={value}", name=name)
            for name, value in zip(names, values, strict=True)
        ),
        implementations=[
            implementation(name, title=f"keras.Attention ({name.partition('-')[2]})")
            for name in names
        ],
    )


def full() -> tuple[data.Loaded, list[str], list[str]]:
    """A record with something for every section and a nasty name in every place, what else was
    expected, and problems."""
    names = ["plain", NASTY]
    results, arrays = [], {}
    for name in names:
        results += [
            result(good(), bad(GRADIENT, detail=NASTY, cause=Phrase(NASTY)), name=name),
            result(Finding(OUTPUT, "error", detail=NASTY), name=name, case=f"a/{NASTY}/self"),
            result(Finding(OUTPUT, "crashed", detail=NASTY), name=name, dtype="float64"),
            result(Finding(OUTPUT, "unsupported", detail=NASTY), name=name, case="a/b/self"),
            observed(
                POLARITY,
                masks(("mask", "form.bool", phrased({}, NASTY))),
                name=name,
                case="a/c/self",
            ),
            observed(
                MASKED, masked_query("row.nan", phrased({}, NASTY)), name=name, case="edge/a/self"
            ),
            observed("observed.causal-alignment", NASTY, name=name, case="a/d/self"),
            observed("observed.returned-weights", NASTY, name=name, case="a/e/self"),
        ]
        item = results[-8]
        for part in ("output", "want", "noise"):
            arrays[f"{item.id}|{part}"] = np.ones(3)
    own = record(
        *results,
        implementations=[
            implementation(
                name,
                title=f"{NASTY} ({name})",
                documentation=f"javascript:{NASTY}",
                versions={NASTY: NASTY},
                causal=CausalInfo(NASTY, "top-left"),
                masks=[MaskInfo(NASTY, ["batch key"], "attends", NASTY)],
                unavailable=NASTY if name == NASTY else "",
            )
            for name in names
        ],
        selection=NASTY,
        command=f"{NASTY}\n```\nmore",
        device_model=NASTY,
        packages={NASTY: NASTY},
        complete=False,
        planned=99,
    )
    return loaded(own, arrays), [NASTY], [NASTY]


def full_report() -> data.Report:
    """A report of it."""
    own, expected, problems = full()
    return build([own], expected, problems)


REPORTS = {
    "empty": lambda: build([]),
    "small": lambda: report(result(good())),
    "backends": lambda: backends("attends", "attends", "blocks"),
    "full": full_report,
}


def _unpacked(text: str, name: str) -> bytes:
    (found,) = re.findall(rf'<script type="text/plain" id="{name}">(.*?)</script>', text, re.DOTALL)
    return gzip.decompress(base64.b64decode(found))


def held(text: str) -> dict:
    """The data in the page, as its script reads it, with every finding as an object."""
    page = json.loads(_unpacked(text, "contents"))
    line, _, content = _unpacked(text, "findings-of").partition(b"\n")
    head = json.loads(line)
    columns: dict[str, list[int]] = {}
    for name, many, wide in head["numbers"]:
        octets = np.frombuffer(content[: many * wide], dtype=np.uint8).reshape(wide, many)
        columns[name] = [int(n) for n in octets.T @ 256 ** np.arange(wide)]
        content = content[many * wide :]
    assert not content
    lists, items, at = head["lists"], [], 0
    for column, case, dtype, mode, many in zip(
        *(columns[name] for name in ("column", "case", "dtype", "mode", "many")), strict=True
    ):
        findings = []
        for place in range(at, at + many):
            own = {name: values[place] for name, values in columns.items() if name in _OF_FINDINGS}
            exact, worst = head["exact"][own["exact"]]
            limit = lists["limits"][own["limit"]]
            findings.append(
                {
                    "requirement": own["requirement"],
                    "verdict": own["verdict"],
                    "detail": lists["texts"][own["text"]][0],
                    "figures": (exact or {"max_ratio": lists["ratios"][own["max"]]})
                    if limit
                    else None,
                    "worst": worst,
                }
            )
        at += many
        items.append(
            {
                "column": column,
                "case": lists["cases"][case],
                "dtype": lists["in"][dtype],
                "mode": lists["modes"][mode],
                "findings": findings,
            }
        )
    return page | {
        "items": items,
        "cards": json.loads(_unpacked(text, "cards-of")),
        "cases": head["cases"],
        "axes": head["axes"],
    }


_OF_FINDINGS = ("requirement", "verdict", "text", "max", "limit", "exact")


def render_html(*given: object, **options: object) -> str:
    """The page as it is when every part of it was looked at."""
    return looked_at(rendered(*given, **options))  # type: ignore[arg-type]


def looked_at(text: str) -> str:
    """A page with all its parts in place."""
    for name, part in json.loads(_unpacked(text, "contents"))["parts"].items():
        empty = f'<div class="part" data-part="{name}"></div>'
        text = text.replace(empty, empty.replace("></", f">{part}</"))
    return text


if __name__ == "__main__":
    # Most of a page is compressed in it; this prints a page as a reader sees it.
    print(looked_at(Path(sys.argv[1]).read_text(encoding="utf-8")))

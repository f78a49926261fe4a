"""Causes that an observation names by itself, beside what the adapter declares."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conformance.records.card import Entry
from conformance.records.findings import Finding

_KEPT = re.compile(
    r"(?P<share>\d+)% of the weights are 0, the others are (?P<least>\S+) to (?P<most>\S+) times"
)
_MEAN = re.compile(r"(-?\d+\.\d+) ± ")
"""What `conformance.experiments.dropout` says as evidence of the two."""

_POLARITY = re.compile(r"declared (\S+)\[(\S+)\] (\w+), observed (\w+)")

_FORMS = {"bool": "as booleans", "0/1": "as numbers 0 and 1", "0/-inf": "as numbers 0 and -inf"}

_MASKED_ROW = {
    "nan": "a softmax over nothing: exp(-inf - -inf), or a division by a sum of 0",
    "mean of values": "blocked logits get a large finite number instead of -inf, and where all are "
    "blocked they are equal",
    "zeros": "the row's output is set to 0, the output bias included",
    "as if unmasked": "a row that is masked altogether is answered without the mask",
}


def cause(finding: Finding) -> str:
    """What the observation says, or ""."""
    if finding.requirement == "mask.polarity-is-as-declared":
        return _polarity(finding)
    if finding.requirement == "observed.fully-masked-row":
        return _MASKED_ROW.get(finding.value.split(";")[0], "")
    if finding.requirement == "observed.causal-alignment" and finding.value in (
        "top-left",
        "bottom-right",
    ):
        return f"the causal flag is aligned {finding.value}"
    if finding.requirement == "observed.returned-weights":
        return {
            "averaged": "the returned weights are averaged over heads",
            "none": "no weights are returned",
        }.get(finding.value, "")
    return ""


def _polarity(finding: Finding) -> str:
    told = []
    for name, form, declared, observed in _POLARITY.findall(finding.detail):
        given = f"{name} {_FORMS.get(form, form)}"
        if observed == "ignored":
            told.append(f"{given} is ignored")
        elif {declared, observed} == {"attends", "blocks"}:
            told.append(f"{given} is taken the other way round: True {observed}")
        elif observed == "added":
            told.append(f"{given} is added, and blocks nothing")
        elif declared == "added" and observed == "attends":
            told.append(f"{given} is taken for a boolean: what is not 0 attends")
        elif declared == "added" and observed == "blocks":
            told.append(f"{given} is taken for a boolean: what is not 0 blocks")
    return "; ".join(told)


def of_entries(finding: Finding, entries: Sequence[Entry]) -> str:
    """Of what an experiment decides: dropout, by what became of the weights; else what it was."""
    wrong = [entry for entry in entries if not entry.agrees]
    if len(wrong) == 1 and wrong[0].subject == "dropout" and wrong[0].value in ("on", "off"):
        return f"dropout is {wrong[0].value} where it is declared to be {wrong[0].declared}"
    if finding.requirement != "dropout.is-unbiased" or finding.verdict != "deviates":
        return finding.cause
    found = {entry.subject: entry for entry in entries}
    kept, mean = found.get("kept weights"), found.get("mean over draws")
    if kept is None or mean is None:
        return ""
    if kept.value == "not scaled":
        return "dropout does not divide what it keeps by 1 − p"
    shares, means = _KEPT.match(kept.evidence), _MEAN.match(mean.evidence)
    if shares is None or means is None:
        return ""
    if int(shares["share"]) == 0:
        return "dropout acts before the softmax: it drops logits, and no weight becomes 0"
    if shares["least"] == shares["most"]:
        return f"dropout multiplies what it keeps by {shares['least']} instead of 1/(1 − p) = 2"
    return "each row is divided by its sum again after dropout" if float(means[1]) > 0 else ""

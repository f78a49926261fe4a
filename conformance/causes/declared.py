"""Causes that an observation names by itself, beside what the adapter declares."""

from __future__ import annotations

import re
from collections.abc import Sequence

from conformance.records.card import Entry
from conformance.records.findings import Finding
from conformance.records.phrase import NOTHING, Argument, Phrase
from conformance.requirements.examination import Examination
from conformance.requirements.polarity import observations

_KEPT = re.compile(
    r"(?P<share>\d+)% of the weights are 0, the others are (?P<least>\S+) to (?P<most>\S+) times"
)
_MEAN = re.compile(r"(-?\d+\.\d+) ± ")
"""What `conformance.experiments.dropout` says as evidence of the two."""

_FORMS = {"bool": "handed.as-boolean", "0/1": "handed.as-ones", "0/-inf": "handed.as-infinite"}
"""How a mask was handed over."""

_MASKED_ROW = {
    "nan": "masked-row.nan",
    "mean of values": "masked-row.finite-number",
    "zeros": "masked-row.zeros",
    "as if unmasked": "masked-row.unmasked",
}

_RETURNED = {"averaged": "returned.averaged", "none": "returned.none"}


def cause(finding: Finding, ex: Examination) -> Phrase:
    """Return what the observation says, or nothing."""
    if finding.requirement == "mask.polarity-is-as-declared":
        return _polarity(ex)
    if finding.requirement == "observed.fully-masked-row":
        return Phrase(_MASKED_ROW.get(finding.value.split(";")[0], ""))
    if finding.requirement == "observed.causal-alignment" and finding.value in (
        "top-left",
        "bottom-right",
    ):
        return Phrase("causal.alignment", {"alignment": finding.value})
    if finding.requirement == "observed.returned-weights":
        return Phrase(_RETURNED.get(finding.value, ""))
    return NOTHING


def _polarity(ex: Examination) -> Phrase:
    causes = []
    for trial, observed, _ in observations(ex):
        form = Phrase(_FORMS[trial.form])
        about: dict[str, Argument] = {"argument": trial.argument, "form": form}
        if observed == trial.declared:
            continue
        if observed == "ignored":
            causes.append(Phrase("argument.not-applied", about))
        elif {trial.declared, observed} == {"attends", "blocks"}:
            causes.append(Phrase("argument.inverted", {**about, "true": observed}))
        elif observed == "added":
            causes.append(Phrase("argument.added", about))
        elif trial.declared == "added" and observed in ("attends", "blocks"):
            causes.append(Phrase("argument.as-boolean", {**about, "nonzero": observed}))
    if len(causes) > 1:
        return Phrase("argument.several", {"causes": [*causes]})
    return causes[0] if causes else NOTHING


def of_entries(finding: Finding, entries: Sequence[Entry]) -> Phrase:
    """Of what an experiment decides: dropout, by what became of the weights; else what it was."""
    wrong = [entry for entry in entries if not entry.agrees]
    if len(wrong) == 1 and wrong[0].subject == "dropout" and wrong[0].value in ("on", "off"):
        return Phrase(f"dropout.is-{wrong[0].value}")
    if finding.requirement != "dropout.is-unbiased" or finding.verdict != "deviates":
        return finding.cause
    found = {entry.subject: entry for entry in entries}
    kept, mean = found.get("kept weights"), found.get("mean over draws")
    if kept is None or mean is None:
        return NOTHING
    if kept.value == "not scaled":
        return Phrase("dropout.not-rescaled")
    shares, means = _KEPT.match(kept.evidence), _MEAN.match(mean.evidence)
    if shares is None or means is None:
        return NOTHING
    if int(shares["share"]) == 0:
        return Phrase("dropout.of-logits")
    if shares["least"] == shares["most"]:
        return Phrase("dropout.factor", {"factor": float(shares["least"])})
    return Phrase("dropout.renormalised") if float(means[1]) > 0 else NOTHING

"""Causes that follow from an observation and the adapter's declaration alone."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.records.findings import Entry, Finding
from conformance.records.phrase import NOTHING, Argument, Phrase
from conformance.requirements.examination import Examination
from conformance.requirements.meaning import ADDED, ATTENDS, BLOCKS, IGNORED, observations

_FORMS = {
    "form.bool": "handed.as-boolean",
    "form.zero-one": "handed.as-ones",
    "form.zero-infinite": "handed.as-infinite",
}
"""For each form of a mask, the phrase that says how the mask was passed."""

_MASKED_ROW = {
    "row.nan": "masked-row.nan",
    "row.mean-of-values": "masked-row.finite-number",
    "row.zeros": "masked-row.zeros",
    "row.unmasked": "masked-row.unmasked",
}

_RETURNED = {"weights.averaged": "returned.averaged", "weights.none": "returned.none"}

_KEPT = {
    "dropout.not-scaled": "dropout.not-rescaled",
    "dropout.drops-no-weight": "dropout.of-logits",
    "dropout.scaled-unevenly": "dropout.renormalised",
}
"""The cause for each observation about the weights that dropout keeps."""


def cause(finding: Finding, ex: Examination) -> Phrase:
    """Return the cause that the observed value of a finding reveals, or an empty phrase."""
    if finding.requirement == "mask.polarity-is-as-declared":
        return _polarity(ex)
    if finding.requirement == "observed.fully-masked-row":
        return Phrase(_MASKED_ROW.get(finding.value.part("row").id, ""))
    if finding.value.id in ("causal.top-left", "causal.bottom-right"):
        alignment = finding.value.id.removeprefix("causal.")
        return Phrase("causal.alignment", {"alignment": alignment})
    if finding.requirement == "observed.returned-weights":
        return Phrase(_RETURNED.get(finding.value.id, ""))
    return NOTHING


def _polarity(ex: Examination) -> Phrase:
    causes = []
    for argument, form, entry in observations(ex):
        if entry.agrees:
            continue
        handed = Phrase(_FORMS[form.phrase.id])
        about: dict[str, Argument] = {"argument": argument.name, "form": handed}
        meaning = entry.value.id.removeprefix("mask.")
        if entry.value == IGNORED:
            causes.append(Phrase("argument.not-applied", about))
        elif {entry.declared, entry.value} == {ATTENDS, BLOCKS}:
            causes.append(Phrase("argument.inverted", {**about, "true": meaning}))
        elif entry.value == ADDED:
            causes.append(Phrase("argument.added", about))
        elif entry.declared == ADDED and entry.value in (ATTENDS, BLOCKS):
            causes.append(Phrase("argument.as-boolean", {**about, "nonzero": meaning}))
    if len(causes) > 1:
        return Phrase("argument.several", {"causes": [*causes]})
    return causes[0] if causes else NOTHING


def of_entries(finding: Finding, entries: Sequence[Entry]) -> Phrase:
    """Return the cause that an experiment's entries reveal, or else the finding's own cause.

    For a deviation from "dropout.is-unbiased", the fallback is an empty phrase instead.
    """
    wrong = [entry for entry in entries if not entry.agrees]
    if len(wrong) == 1 and wrong[0].value.id in ("dropout.on", "dropout.off"):
        return Phrase("dropout.is-on" if wrong[0].value.id == "dropout.on" else "dropout.is-off")
    if finding.requirement != "dropout.is-unbiased" or finding.verdict != "deviates":
        return finding.cause
    kept = next((it.value for it in entries if it.subject.id == "dropout.kept"), NOTHING)
    if kept.id == "dropout.scaled-by":
        return Phrase("dropout.factor", kept.arguments)
    return Phrase(_KEPT.get(kept.id, ""))

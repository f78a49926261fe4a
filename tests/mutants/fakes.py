"""Attentions in NumPy whose conventions are chosen: doubles that experiments are tried on."""

from __future__ import annotations

import numpy as np

from conformance import attention_function
from conformance.experiments import experiment
from conformance.requirements.laboratory import Laboratory
from conformance.words import say
from mutants.miniatures import MASK


def softmax(logits):
    with np.errstate(all="ignore"):
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)


def blocked(logits, visible):
    """Logits of which the invisible ones are -inf."""
    return np.where(visible, logits, -np.inf)


def fake(logits=None, weights=None, *, scale=None, masks=MASK, returned=lambda w: w, **declared):
    """An adapter of a plain attention, with steps of its own.

    Args:
        logits: (logits, **arguments) to logits, called if there are arguments.
        weights: (weights, **arguments) to weights, likewise.
        scale: of the logits, if not the usual one.
        masks, declared: its declaration.
        returned: the weights that it returns, or None.
    """

    @attention_function("numpy", masks, **({"returns_weights": "per head"} | declared))
    def attend(query, key, value, **arguments):
        factor = query.dtype.type(query.shape[-1] ** -0.5 if scale is None else scale)
        found = np.einsum("bhqd,bhkd->bhqk", query, key) * factor
        with np.errstate(all="ignore"):
            found = logits(found, **arguments) if logits and arguments else found
            applied = softmax(found)
            applied = weights(applied, **arguments) if weights and arguments else applied
            applied = applied.astype(query.dtype)
            context = np.einsum("bhqk,bhkd->bhqd", applied, value)
        other = returned(applied)
        return context if other is None else (context, other.astype(query.dtype))

    attend.name = "fake"
    return attend


def attends(logits, mask):
    """Nonzero attends, in any dtype."""
    return blocked(logits, mask != 0)


def usual(logits, mask):
    """Booleans attend, numbers are added."""
    return blocked(logits, mask) if mask.dtype == np.bool_ else logits + mask


def laboratory(adapter, mode=None, dtype="float32"):
    known = {item.name: item for item in adapter.modes}
    return Laboratory(adapter, dtype, "cpu", known[mode] if mode else adapter.modes[0])


def entries(adapter, name, mode=None):
    """Text of the subject to entry, of one experiment."""
    found = experiment(name).run(laboratory(adapter, mode)).entries
    assert len({entry.subject for entry in found}) == len(found)
    return {say(entry.subject): entry for entry in found}


def values(adapter, name, mode=None):
    """Text of the subject to that of the value."""
    return {subject: say(entry.value) for subject, entry in entries(adapter, name, mode).items()}

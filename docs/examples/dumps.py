"""Write the dumps beside this file: an attention in NumPy, and the mistakes that people make in it.

python docs/examples/dumps.py
"""

from pathlib import Path

import numpy as np


def attention(query, key, value, scale=None, mask=None, axis=-1):
    """Attention of heads `[batch heads length head]`; True in the mask attends."""
    logits = query @ key.swapaxes(-1, -2) * np.float32(scale or query.shape[-1] ** -0.5)
    if mask is not None:
        logits = np.where(mask, logits, np.float32(-np.inf))
    powers = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True) @ value


def main():
    """Write one dump for each mistake."""
    random = np.random.default_rng(0)
    query, key, value = (
        random.standard_normal((2, heads, 12, 8), dtype=np.float32) for heads in (4, 2, 2)
    )
    repeated = [np.repeat(array, 2, axis=1) for array in (key, value)]
    tiled = [np.tile(array, (1, 2, 1, 1)) for array in (key, value)]
    causal = np.tri(12, dtype=bool)
    right = attention(query, *repeated)
    dumps = {
        "right": {"output": right},
        "no-scale": {"output": attention(query, *repeated, scale=1.0)},
        "tiled-heads": {"output": attention(query, *tiled)},
        "softmax-over-queries": {"output": attention(query, *repeated, axis=-2)},
        "causal-off-by-one": {
            "output": attention(query, *repeated, mask=np.tri(12, k=1, dtype=bool)),
            "causal": "top-left",
        },
        "inverted-mask": {
            "output": attention(query, *repeated, mask=causal),
            "mask": causal,
            "mask_true": "blocks",
        },
        "heads-in-another-order": {"output": right[:, [2, 0, 1, 3]]},
    }
    folder = Path(__file__).with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, arrays in dumps.items():
        np.savez(folder / f"{name}.npz", query=query, key=key, value=value, **arrays)


if __name__ == "__main__":
    main()

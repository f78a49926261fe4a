"""Write a small GPT-2 with random weights, as `save_pretrained` does: in files with an index.

    python docs/examples/gpt2_checkpoint.py FOLDER

It stands for a checkpoint that was downloaded, and needs only NumPy and safetensors.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WIDTH, HEADS, LAYERS = 16, 4, 2

SHAPES = {
    "ln_1.weight": (WIDTH,),
    "attn.c_attn.weight": (WIDTH, 3 * WIDTH),
    "attn.c_attn.bias": (3 * WIDTH,),
    "attn.c_proj.weight": (WIDTH, WIDTH),
    "attn.c_proj.bias": (WIDTH,),
    "ln_2.weight": (WIDTH,),
    "mlp.c_fc.weight": (WIDTH, 4 * WIDTH),
    "mlp.c_proj.weight": (4 * WIDTH, WIDTH),
}


def main(folder: Path) -> None:
    """Write the files into a new folder."""
    folder.mkdir(parents=True)
    random, files = np.random.default_rng(0), {}
    for layer in range(LAYERS):
        file = f"model-{layer + 1:05}-of-{LAYERS:05}.safetensors"
        tensors = {
            f"transformer.h.{layer}.{name}": random.standard_normal(shape).astype("float32")
            for name, shape in SHAPES.items()
        }
        if layer == 0:
            tensors["transformer.wte.weight"] = np.ones((50, WIDTH), "float32")
        save_file(tensors, folder / file)
        files |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

# transformers.LlamaModel, and others with "rope_type": "dynamic": once a longer text was read, one
# that is shorter turns by the longer one's frequencies, unless it is shorter than the original
# length. The same tokens so get another answer after other calls; a text of just the original
# length, for which nothing is to be scaled, is far off. Found with transformers 5.24.0, torch
# 2.13.0; of longer texts known as https://github.com/huggingface/transformers/issues/27226
import torch
from transformers import AutoModel, LlamaConfig

config = LlamaConfig(
    vocab_size=9, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    max_position_embeddings=32,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
model = AutoModel.from_config(config).eval()
turn, x = model.rotary_emb, torch.zeros(1)

def sine(tokens):
    """The sines by which a text of so many tokens is rotated, `[token component]`."""
    return turn(x, torch.arange(tokens)[None])[1][0]

want = sine(32)  # the original length, for which nothing is scaled
sine(64)
got = sine(32)
far = (got - want).abs()
at = divmod(far.argmax().item(), far.shape[1])
print(f"token {at[0]}, component {at[1]}: got {got[at]:.4f}, want {want[at]:.4f}, "
      f"apart {far[at]:.4f}")
assert far.max() < 1e-6, "the answer depends on what was read before"

# transformers.LlamaModel, and others with rotary embeddings: model.to(torch.bfloat16) rounds the
# frequencies of the rotation too, a buffer, and angles are far off at positions of some hundreds.
# A model that is made with dtype=torch.bfloat16 keeps them in float32. Found with transformers
# 5.23.0, torch 2.13.0; known as https://github.com/huggingface/transformers/issues/25681
import torch
from transformers import AutoModel, LlamaConfig

config = LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=1)
wide = AutoModel.from_config(config)
made, cast = AutoModel.from_config(config, dtype=torch.bfloat16), wide.to(torch.bfloat16)
x, position = torch.zeros(1, dtype=torch.float64), torch.tensor([[2000]])

def angle(model):
    """The angle, in radians, of the second pair at position 2000."""
    frequency = model.rotary_emb.inv_freq.double()[1]
    cosine = model.rotary_emb(x, position)[0][0, 0, 1]
    assert abs(cosine - (2000 * frequency).cos()) < 1e-3
    return 2000 * frequency.item()

got, want = angle(cast), angle(made)
print(f"radians: got {got:.4f}, want {want:.4f}, apart {abs(got - want):.4f}")
assert abs(got - want) < 0.01, "the frequencies are rounded to bfloat16"

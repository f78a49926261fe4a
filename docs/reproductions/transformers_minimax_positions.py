# transformers.MiniMaxModel whose first layer is linear attention, fed beside its cache: positions
# begin at 0 again. The model takes the first from past_key_values.get_seq_length(), that of layer
# 0, and a linear layer caches no tokens. With position_ids, outputs are those of the whole text.
# Found with transformers 5.23.0, torch 2.13.0, by feeding a text in steps. Nothing found upstream.
import torch
from transformers import MiniMaxConfig, MiniMaxModel

layers = ["linear_attention", "full_attention"]
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, head_dim=8, block_size=16)
config = MiniMaxConfig(vocab_size=16, num_hidden_layers=2, num_key_value_heads=2,
                       layer_types=layers, num_local_experts=2, num_experts_per_tok=1,
                       initializer_range=0.2, pad_token_id=0, bos_token_id=0, eos_token_id=1,
                       **sizes)
torch.manual_seed(0)
model, text = MiniMaxModel(config).eval(), torch.randn(1, 8, 32)

def last(*lengths):
    """The output for the last token, of the text in pieces of these lengths."""
    cache, begin = None, 0
    with torch.no_grad():
        for length in lengths:
            piece = text[:, begin : begin + length]
            found = model(inputs_embeds=piece, past_key_values=cache, use_cache=True)
            cache, begin = found.past_key_values, begin + length
    return found.last_hidden_state[0, -1, 0].item()

want, got = last(8), last(7, 1)
print(f"got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-4, "a token beside the cache is taken for the first one"

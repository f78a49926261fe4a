# transformers.MistralModel with sliding_window=1 beside a DynamicCache: a token sees those before
# it, and two at once raise. DynamicSlidingWindowLayer.update keeps
# keys[:, :, -sliding_window + 1 :], and -0 is the begin: all of them. Found with transformers
# 5.23.0, torch 2.13.0. Nothing found upstream.
import torch
from transformers import DynamicCache, MistralConfig, MistralModel

config = MistralConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=1, num_key_value_heads=1, sliding_window=1)
torch.manual_seed(0)
model = MistralModel(config).eval()

def last(cache, *steps):
    """The output for the last token."""
    with torch.no_grad():
        for tokens in steps:
            found = model(torch.tensor([tokens]), past_key_values=cache).last_hidden_state
    return found[0, -1, 0].item()

want = last(DynamicCache(config=config), [1, 2, 3])
got = last(DynamicCache(config=config), [1, 2], [3])
print(f"got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-5, "a window that shows the token itself shows the others too"

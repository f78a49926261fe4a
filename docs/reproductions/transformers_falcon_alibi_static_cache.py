# transformers.FalconModel with alibi=True beside a StaticCache: raises, because ALiBi is made for
# the tokens so far, and the mask for all that the cache can hold. Bloom was given as many columns.
# Found with transformers 5.23.0, torch 2.13.0. Nothing found upstream.
import torch
from transformers import FalconConfig, FalconModel, StaticCache

config = FalconConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                      alibi=True, multi_query=False)
model = FalconModel(config).eval()

def raised(cache):
    try:
        model(torch.arange(3)[None], past_key_values=cache)
    except RuntimeError as error:
        print(error)
        return 1
    return 0

want = raised(None)
got = raised(StaticCache(config=config, max_cache_len=8))
print(f"errors: got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "a StaticCache and ALiBi raise"

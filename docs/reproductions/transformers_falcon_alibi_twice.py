# transformers.FalconModel with alibi=True, attn_implementation="eager": ALiBi is added twice, by
# the attention and with the mask, into which FalconModel.forward puts it for SDPA
# (modeling_falcon.py: "We take care to integrate alibi bias in the causal_mask here"). Found with
# transformers 5.23.0, torch 2.13.0. That eager and SDPA differ was, for another cause and closed,
# https://github.com/huggingface/transformers/issues/29946; of this nothing was found upstream.
import numpy as np
import torch
from transformers import FalconConfig, FalconModel

config = FalconConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                      alibi=True, multi_query=False, attn_implementation="eager")
model = FalconModel(config).eval()
torch.nn.init.zeros_(model.h[0].self_attention.query_key_value.weight)  # logits are ALiBi alone
seen = model(torch.arange(8)[None], use_cache=False, output_attentions=True).attentions[0]
slope = 2.0**-8 / 8**0.5  # one head, and divided by the root of the head size
powers = np.exp(slope * np.arange(8))
got = (seen[0, 0, 7, 7] / seen[0, 0, 7, 0]).log().item() / 7  # of neighbouring keys
want = np.log(powers[7] / powers[0]) / 7
print(f"slope: got {got:.3e}, want {want:.3e}, apart {abs(got - want):.3e}")
assert abs(got - want) < 0.1 * want, "ALiBi counts twice"

# transformers.LlamaModel that decodes beside its cache in float32: bits of a text depend on how
# many others are decoded with it, as torch.nn.Linear multiplies up to three rows otherwise. No
# documentation promises more, and each answer is right to rounding.
# Found with transformers 5.23.0, torch 2.13.0, AMD EPYC with AVX-512. In bfloat16, and for whole
# texts, bits were equal.
import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model, text = LlamaModel(config).eval(), torch.randn(8, 33, 256)

def last(text):
    """The output for the last token, beside a cache of those before."""
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(inputs_embeds=text[:, :-1], past_key_values=cache, use_cache=True)
        found = model(inputs_embeds=text[:, -1:], past_key_values=cache, use_cache=True)
    return found.last_hidden_state

whole = last(text)
alone = torch.cat([last(one) for one in text.split(1)])
at = (alone - whole).abs().flatten().argmax()
got, want = alone.flatten()[at].item(), whole.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}")
assert got == want, "a text has other bits alone than in a batch"

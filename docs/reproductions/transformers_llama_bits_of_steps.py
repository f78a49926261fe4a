# transformers.LlamaModel beside its cache: nearly every token of a text that is fed in steps has
# other bits than in the whole text, so a trainer scores what a generator wrote otherwise than it.
# The attention takes another path for one query; for fewer than four texts, the linear layers do,
# too. No documentation promises more, and each answer is right to rounding.
# Found with transformers 5.23.0, torch 2.13.0, AMD EPYC with AVX-512, also in bfloat16.
import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model, text = LlamaModel(config).eval(), torch.randn(4, 64, 256)
cache, steps = DynamicCache(config=config), []
with torch.no_grad():
    whole = model(inputs_embeds=text).last_hidden_state
    for token in text.split(1, dim=1):
        found = model(inputs_embeds=token, past_key_values=cache, use_cache=True)
        steps.append(found.last_hidden_state)
steps = torch.cat(steps, dim=1)
other = (steps != whole).any(-1).double().mean().item()
at = (steps - whole).abs().flatten().argmax()
got, want = steps.flatten()[at].item(), whole.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of tokens differ")
assert got == want, "tokens have other bits in steps than all at once"

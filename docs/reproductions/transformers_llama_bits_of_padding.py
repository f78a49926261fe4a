# transformers.LlamaModel with padding before a text, masked and with the positions of `generate`:
# the text has other bits than without padding, so that a batch of texts of several lengths does not
# give what each gives alone. No documentation promises more, and each answer is right to rounding.
# Found with transformers 5.23.0, torch 2.13.0, AMD EPYC with AVX-512, also in bfloat16.
import torch
from transformers import LlamaConfig, LlamaModel

torch.manual_seed(0)
config = LlamaConfig(vocab_size=16, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model, text = LlamaModel(config).eval(), torch.randn(4, 64, 256)
pads = 6
padded = torch.cat([torch.zeros(4, pads, 256), text], dim=1)
real = torch.ones(4, pads + 64, dtype=torch.long)
real[:, :pads] = 0
places = (real.cumsum(-1) - 1).clamp(min=0)
with torch.no_grad():
    whole = model(inputs_embeds=text).last_hidden_state
    found = model(inputs_embeds=padded, attention_mask=real, position_ids=places)
behind = found.last_hidden_state[:, pads:]
other = (behind != whole).any(-1).double().mean().item()
at = (behind - whole).abs().flatten().argmax()
got, want = behind.flatten()[at].item(), whole.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of tokens differ")
assert got == want, "a text has other bits behind padding"

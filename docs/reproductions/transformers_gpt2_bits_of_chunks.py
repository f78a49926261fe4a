# transformers' GPT2Model on a CPU, as in a prefill in chunks: eight tokens at a time beside a cache
# have other bits than the same tokens in the whole text. No documentation promises more, and each
# answer is right to rounding. Found with transformers 5.24.0, torch 2.13.0, Intel Xeon with
# AVX-512. Upstream: https://github.com/huggingface/transformers/issues/27040 and 25420, closed.
import torch
from transformers import DynamicCache, GPT2Config, GPT2Model

torch.manual_seed(0)
config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
model, text = GPT2Model(config).eval(), torch.randint(0, 100, (2, 40))
with torch.no_grad():
    whole = model(text).last_hidden_state
    cache = DynamicCache()
    chunks = [model(part, past_key_values=cache).last_hidden_state for part in text.split(8, 1)]
chunked = torch.cat(chunks, 1)
other = (chunked != whole).any(-1).double().mean().item()
at = (chunked - whole).abs().flatten().argmax()
got, want = chunked.flatten()[at].item(), whole.flatten()[at].item()
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of tokens differ")
assert got == want, "a token in a chunk has other bits"

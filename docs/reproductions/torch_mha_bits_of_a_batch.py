# torch.nn.MultiheadAttention with batch_first=True: an entry alone has other bits than in a batch.
# With many tokens, on an AMD EPYC: tokens are moved to the first axis; then an array of one entry
# lies in memory as before, and the projection adds its bias within the matrix product, and after it
# for several entries. With few tokens, on an Intel Xeon too: the matrix product has other bits for
# fewer rows, also without biases and among batches of 2 and 3. No documentation promises more, and
# each answer is right to rounding. Found with torch 2.13.0, both with AVX-512; with many tokens
# also in half precision.
import torch

torch.manual_seed(0)
attention = torch.nn.MultiheadAttention(256, 4, batch_first=True)
torch.nn.init.normal_(attention.in_proj_bias)
far = []
for tokens in (144, 7, 1):
    query, key, value = (torch.randn(4, tokens, 256) for _ in range(3))
    with torch.no_grad():
        whole = attention(query, key, value)[0]
        alone = [attention(*one)[0] for one in zip(query.split(1), key.split(1), value.split(1))]
    alone = torch.cat(alone)
    other = (alone != whole).any(-1).double().mean().item()
    at = (alone - whole).abs().flatten().argmax()
    got, want = alone.flatten()[at].item(), whole.flatten()[at].item()
    far.append(abs(got - want))
    print(f"{tokens} tokens: got {got:.9f}, want {want:.9f}, apart {far[-1]:.2g}; "
          f"{other:.0%} of rows differ")
assert not any(far), "an entry has other bits alone than in a batch"

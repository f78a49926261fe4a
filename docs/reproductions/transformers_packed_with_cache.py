# transformers.LlamaModel, and others: sequences that are packed into one are told apart by
# position_ids that begin again, but not with use_cache, which is on unless a model is trained with
# gradient checkpointing: the empty cache that the model makes turns the detection off
# (masking_utils.py: "and past_key_values is None"). Found with transformers 5.23.0, torch 2.13.0.
# Of a mask of ones, which does the same, https://github.com/huggingface/transformers/pull/46634
import torch
from transformers import LlamaConfig, LlamaModel

torch.manual_seed(0)
model = LlamaModel(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8,
                               num_hidden_layers=1, num_attention_heads=1)).eval()
positions = torch.tensor([[0, 1, 2, 0, 1]])  # of three tokens, and of two

def moved(**options):
    """How much the second sequence changes with the first."""
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 4, 5]])
    with torch.no_grad():
        one, other = (
            model(row[None], position_ids=positions, **options).last_hidden_state for row in ids
        )
    return (one - other)[:, 3:].abs().max().item()

got, want = moved(), moved(use_cache=False)
print(f"the second moved by: got {got:.3e}, want {want:.3e}, apart {abs(got - want):.3e}")
assert got == want, "the second sequence sees the first, unless use_cache=False"

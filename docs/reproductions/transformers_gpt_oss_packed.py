# transformers.GptOssModel: sequences that are packed into one, with position_ids that begin again,
# see each other; in LlamaModel they do not. GptOssModel.forward does not hand position_ids on to
# create_causal_mask. Found with transformers 5.23.0, torch 2.13.0; known as
# https://github.com/huggingface/transformers/pull/39997. The same holds for FalconModel.
import torch
from transformers import GptOssConfig, GptOssModel, LlamaConfig, LlamaModel

sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
positions = torch.tensor([[0, 1, 2, 0, 1]])  # of three tokens, and of two

def moved(model):
    """How much the second sequence changes with the first."""
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 4, 5]])
    with torch.no_grad():
        one, other = (
            model.eval()(row[None], position_ids=positions, use_cache=False).last_hidden_state
            for row in ids
        )
    return (one - other)[:, 3:].abs().max().item()

torch.manual_seed(0)
got = moved(GptOssModel(GptOssConfig(num_local_experts=2, num_experts_per_tok=1, **sizes)))
want = moved(LlamaModel(LlamaConfig(**sizes)))
print(f"the second moved by: got {got:.3e}, want {want:.3e}, apart {abs(got - want):.3e}")
assert got == want, "the second sequence sees the first"

# transformers.MixtralModel with YaRN or dynamic NTK raises: the configuration has head_dim=None, as
# in files of Mixtral, for hidden_size // num_attention_heads, and these two kinds read it as it is.
# Linear scaling and Llama 3's do not. MiniMax, Ministral and HunYuan do the same; with LongRoPE,
# the configuration itself is refused. Found with transformers 5.24.0; nothing found upstream.
import torch
from transformers import MixtralConfig, MixtralModel

sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
             num_hidden_layers=1, num_local_experts=2, vocab_size=8, pad_token_id=0)
yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 64}

def answer(**more):
    torch.manual_seed(0)
    config = MixtralConfig(**sizes, **more, max_position_embeddings=256, rope_parameters=dict(yarn))
    with torch.no_grad():
        return MixtralModel(config)(torch.arange(8)[None]).last_hidden_state[0, -1, 0].item()

want, got, told = answer(head_dim=8), float("nan"), ""
try:
    got = answer()
except TypeError as error:
    told = f"TypeError: {error}"
print(f"got {got:.3f}, want {want:.3f}, apart {abs(got - want):.3f}", told)
assert abs(got - want) < 1e-6, "it raised"

# transformers.models.gpt_oss.modeling_gpt_oss.GptOssAttention with attn_implementation="sdpa": the
# sinks are left out without a word, and their gradient is missing. GptOssModel refuses SDPA, the
# layer does not; a soft cap, which SDPA lacks as well, raises in sdpa_attention_forward. Found with
# transformers 5.23.0, torch 2.13.0. Nothing found upstream.
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

def output(implementation):
    """One token that sees itself, and a sink of the same logit, 0."""
    config = GptOssConfig(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2,
                          attention_bias=False, attn_implementation=implementation)
    layer = GptOssAttention(config, layer_idx=0)
    torch.nn.init.zeros_(layer.q_proj.weight)
    for part in (layer.v_proj, layer.o_proj):
        torch.nn.init.eye_(part.weight)
    torch.nn.init.zeros_(layer.sinks)
    angles = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    return layer(torch.ones(1, 1, 2), angles, None)[0][0, 0, 0].item()

got, want = output("sdpa"), output("eager")
print(f"got {got:.3f}, want {want:.3f}, apart {abs(got - want):.3f}")
assert got == want, "the sink takes no weight"

# transformers.modeling_rope_utils: with rope_parameters for each kind of layer, as in Gemma 3, YaRN
# does not read "truncate", which it looks for one level too high: the ends of its ramp are rounded
# although they are not to be. Found with transformers 5.24.0, torch 2.13.0.
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "truncate": False,
        "original_max_position_embeddings": 4096}
sizes = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 32768}
one = LlamaConfig(**sizes, rope_parameters=dict(yarn))
layers = {"full_attention": dict(yarn),
          "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
each = Gemma3TextConfig(**sizes, head_dim=64, rope_parameters=layers)

want, _ = ROPE_INIT_FUNCTIONS["yarn"](one, "cpu")
got, _ = ROPE_INIT_FUNCTIONS["yarn"](each, "cpu", layer_type="full_attention")
pair = (got / want - 1).abs().argmax()
apart = (got / want - 1).abs()[pair].item()
print(f"frequency of pair {pair}: got {got[pair]:.6f}, want {want[pair]:.6f}, apart {apart:.4f}")
assert apart < 1e-6, "truncate is not read where layers have parameters of their own"

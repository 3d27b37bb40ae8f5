"""llama: rotary positions, RMSNorm, gated SiLU, grouped-query attention, no biases."""

from bloomery.families.family import Family, HuggingFace

TENSORS: dict[str, str | tuple[str, ...]] = {
    "embed.tokens": "model.embed_tokens",
    "layers.N.attention_norm": "model.layers.N.input_layernorm",
    "layers.N.attention.qkv": (
        "model.layers.N.self_attn.q_proj",
        "model.layers.N.self_attn.k_proj",
        "model.layers.N.self_attn.v_proj",
    ),
    "layers.N.attention.out": "model.layers.N.self_attn.o_proj",
    "layers.N.mlp_norm": "model.layers.N.post_attention_layernorm",
    "layers.N.mlp.gate": "model.layers.N.mlp.gate_proj",
    "layers.N.mlp.up": "model.layers.N.mlp.up_proj",
    "layers.N.mlp.down": "model.layers.N.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
FIELDS: dict[str, str | tuple[str, ...]] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "dropout": "attention_dropout",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
}
DEFAULTS: dict[str, object] = {
    "num_kv_heads": None,
    "head_dim": None,
    "dropout": 0.0,
    "norm_eps": 1e-6,
    "init_std": 0.02,
    "rope_theta": 10000.0,
    "tie_embeddings": False,
}
"""Without num_key_value_heads there are as many as heads, and without head_dim hidden_size is shared by them."""
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "hidden_act": (("silu",), "the MLP is a gated SiLU here"),
    "attention_bias": ((False,), "the linear layers of attention have no such biases here"),
    "attention_dropout": ((0,), "a recipe's dropout is that of residuals and embeddings too"),
    "partial_rotary_factor": ((1,), "positions turn the whole head here"),
}
CONSTANTS = {"hidden_act": "silu", "attention_bias": False, "bos_token_id": None, "eos_token_id": None}

_HF = HuggingFace(
    architecture="LlamaForCausalLM",
    prefix="model.",
    tensors=TENSORS,
    fields=FIELDS,
    defaults=DEFAULTS,
    only=ONLY
    | {
        "mlp_bias": ((False,), "the linear layers of the MLP have no biases here"),
        "sliding_window": ((), "attention looks at the whole sequence here"),
    },
    constants=CONSTANTS | {"mlp_bias": False},
)

LLAMA = Family(
    name="llama",
    defaults={"dropout": 0.0, "norm_eps": 1e-5, "tie_embeddings": False},
    hf=_HF,
    reads=("num_kv_heads", "head_dim", "rope_theta"),
    positions="rotary",
    norm="rms",
    bias=False,
    qkv_bias=False,
    activation="silu",
    gated=True,
)

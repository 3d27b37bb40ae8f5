"""bloom: ALiBi instead of positions, a norm after the embedding. In transformers `qkv` has our layout."""

from bloomery.families.family import Family, HuggingFace


def alibi_slopes(num_heads: int) -> list[float]:
    """One number a head. A geometric row for a power of two; otherwise the row of the power below, then every second
    slope of the row of twice that power."""

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    below = 1 << (num_heads.bit_length() - 1)
    return geometric(below) + geometric(2 * below)[0::2][: num_heads - below]


_HF = HuggingFace(
    architecture="BloomForCausalLM",
    prefix="transformer.",
    tensors={
        "embed.tokens": "transformer.word_embeddings",
        "embed.norm": "transformer.word_embeddings_layernorm",
        "layers.N.attention_norm": "transformer.h.N.input_layernorm",
        "layers.N.attention.qkv": "transformer.h.N.self_attention.query_key_value",
        "layers.N.attention.out": "transformer.h.N.self_attention.dense",
        "layers.N.mlp_norm": "transformer.h.N.post_attention_layernorm",
        "layers.N.mlp.up": "transformer.h.N.mlp.dense_h_to_4h",
        "layers.N.mlp.down": "transformer.h.N.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": ("hidden_size", "n_embed"),
        "num_layers": ("n_layer", "num_hidden_layers"),
        "num_heads": ("n_head", "num_attention_heads"),
        "seq_length": "seq_length",
        "dropout": ("hidden_dropout", "attention_dropout"),
        "norm_eps": "layer_norm_epsilon",
        "init_std": "initializer_range",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={"seq_length": 2048, "dropout": 0.0, "norm_eps": 1e-5, "init_std": 0.02, "tie_embeddings": True},
    only={
        "apply_residual_connection_post_layernorm": ((False,), "the residual is taken before the norm"),
        "slow_but_exact": ((False,), "sums are not sliced; set it to false if another rounding is acceptable"),
    },
    constants={"apply_residual_connection_post_layernorm": False, "bos_token_id": None, "eos_token_id": None},
)

BLOOM = Family(
    name="bloom",
    defaults={"dropout": 0.1, "norm_eps": 1e-5, "tie_embeddings": True},
    hf=_HF,
    positions="alibi",
    embedding_norm=True,
)

"""gpt2: learned positions, LayerNorm, GELU. In transformers its linear layers are Conv1D."""

from bloomery.families.family import Family, HuggingFace

_HF = HuggingFace(
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    conv1d=True,
    tensors={
        "embed.tokens": "transformer.wte",
        "embed.positions": "transformer.wpe",
        "layers.N.attention_norm": "transformer.h.N.ln_1",
        "layers.N.attention.qkv": "transformer.h.N.attn.c_attn",
        "layers.N.attention.out": "transformer.h.N.attn.c_proj",
        "layers.N.mlp_norm": "transformer.h.N.ln_2",
        "layers.N.mlp.up": "transformer.h.N.mlp.c_fc",
        "layers.N.mlp.down": "transformer.h.N.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    fields={
        "vocab_size": "vocab_size",
        "seq_length": ("n_positions", "n_ctx"),
        "hidden_size": ("n_embd", "hidden_size"),
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "dropout": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "norm_eps": "layer_norm_epsilon",
        "init_std": "initializer_range",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={"ffn_hidden_size": None, "dropout": 0.1, "norm_eps": 1e-5, "init_std": 0.02, "tie_embeddings": True},
    only={
        "activation_function": (
            ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            "gpt2 has the tanh form of GELU here (gelu_new)",
        ),
        "scale_attn_weights": ((True,), "scores are always divided by the root of the head size"),
        "scale_attn_by_inverse_layer_idx": ((False,), "scores are not divided by the number of the layer"),
        "add_cross_attention": ((False,), "there is no encoder to look at"),
    },
    constants={"activation_function": "gelu_new", "bos_token_id": None, "eos_token_id": None},
)

GPT2 = Family(name="gpt2", defaults={"dropout": 0.1, "norm_eps": 1e-5, "tie_embeddings": True}, hf=_HF)

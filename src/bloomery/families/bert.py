"""bert: an encoder that predicts masked tokens and, with a second head, how two segments belong together. In
transformers a norm is named after the part whose output it follows, and the bias of the head has two names."""

from bloomery.families.family import Family, HuggingFace

_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
"""transformers computes with the second, and takes the first where that is missing."""

_HF = HuggingFace(
    architecture="BertForPreTraining",
    prefix="bert.",
    tensors={
        "embed.tokens": "bert.embeddings.word_embeddings",
        "embed.positions": "bert.embeddings.position_embeddings",
        "embed.token_types": "bert.embeddings.token_type_embeddings",
        "embed.norm": "bert.embeddings.LayerNorm",
        "layers.N.attention.qkv": (
            "bert.encoder.layer.N.attention.self.query",
            "bert.encoder.layer.N.attention.self.key",
            "bert.encoder.layer.N.attention.self.value",
        ),
        "layers.N.attention.out": "bert.encoder.layer.N.attention.output.dense",
        "layers.N.attention_norm": "bert.encoder.layer.N.attention.output.LayerNorm",
        "layers.N.mlp.up": "bert.encoder.layer.N.intermediate.dense",
        "layers.N.mlp.down": "bert.encoder.layer.N.output.dense",
        "layers.N.mlp_norm": "bert.encoder.layer.N.output.LayerNorm",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.weight": "cls.predictions.decoder.weight",
        "head.bias": _BIASES,
        "pooler.dense": "bert.pooler.dense",
        "order_head": "cls.seq_relationship",
    },
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "dropout": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "norm_eps": "layer_norm_eps",
        "init_std": "initializer_range",
        "tie_embeddings": "tie_word_embeddings",
        "second_head": "second_head",
    },
    defaults={
        "dropout": 0.1,
        "norm_eps": 1e-12,
        "init_std": 0.02,
        "tie_embeddings": True,
        "second_head": "sentence_order",
    },
    only={
        "hidden_act": (("gelu",), "bert has the exact GELU here"),
        "position_embedding_type": (("absolute",), "bert has learned positions here"),
        "type_vocab_size": ((2,), "bert has two token types here"),
        "is_decoder": ((False,), "bert is an encoder here"),
    },
    constants={"hidden_act": "gelu", "type_vocab_size": 2, "pad_token_id": None},
    without_second_head="BertForMaskedLM",
    missing_remedy=(
        "a bert here is a BertForPreTraining or a BertForMaskedLM; others lack heads. Make one, whose missing parts "
        "are then new: transformers' BertForPreTraining.from_pretrained(DIR).save_pretrained(NEW)"
    ),
)

BERT = Family(
    name="bert",
    defaults={"dropout": 0.1, "norm_eps": 1e-12, "tie_embeddings": True},
    hf=_HF,
    reads=("second_head",),
    encoder=True,
    activation="gelu",
    embedding_norm=True,
    token_types=2,
    scaled_residual_init=False,
)

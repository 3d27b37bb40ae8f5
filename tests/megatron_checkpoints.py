"""Checkpoints as Megatron-LM and Megatron-DeepSpeed write them, cut from tensors of ours by code of their own."""

from __future__ import annotations

import argparse
import enum
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.config.recipe import ModelSection
from model_samples import small_model

Row = tuple[str, Tensor, str]
"""Name, whole tensor, and how tensor-parallel ranks share it: rows, columns, gated (rows of two halves) or same."""


POSITIONS = enum.Enum("PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums")
"""BigScience's arguments hold one of these, of a module that is not here."""


def _save(saved: object, path: Path) -> None:
    """While its objects are made, the modules of Megatron are there."""
    module = types.ModuleType("megatron.enums")
    module.PositionEmbeddingType = POSITIONS  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("megatron", "megatron.enums")}
    sys.modules |= {"megatron": types.ModuleType("megatron"), "megatron.enums": module}
    try:
        torch.save(saved, path)
    finally:
        for name, known in before.items():
            del sys.modules[name]
            if known is not None:
                sys.modules[name] = known


def arguments(config: ModelSection, **more: Any) -> argparse.Namespace:
    """What a training of Megatron has in mind when it saves, in part."""
    family = config.family
    own: dict[str, Any] = {"gpt2": {"position_embedding_type": "learned_absolute"}}
    own["bloom"] = {"position_embedding_type": POSITIONS["alibi"], "embed_layernorm": True}
    own["llama"] = {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
        "group_query_attention": True, "num_query_groups": config.num_kv_heads, "rotary_base": 10000,
        "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    own["bert"] = {"apply_residual_connection_post_layernorm": True, "bias_gelu_fusion": False}
    usual = {
        "num_layers": config.num_layers, "hidden_size": config.hidden_size, "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads, "seq_length": config.seq_length, "kv_channels": config.head_size,
        "encoder_seq_length": config.seq_length, "max_position_embeddings": config.seq_length,
        "layernorm_epsilon": config.norm_eps,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.02, "make_vocab_size_divisible_by": 32,
        "padded_vocab_size": config.vocab_size, "vocab_file": "nowhere/vocab.json", "num_experts": None, "bf16": False,
        "micro_batch_size": 4, "global_batch_size": 8, "train_samples": 160, "train_iters": 20, "seed": 7,
        "optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine", "lr_decay_samples": None,
        "lr_decay_iters": None, "lr_warmup_samples": 32, "lr_warmup_iters": 0, "lr_warmup_fraction": None,
        "weight_decay": 0.01, "start_weight_decay": 0.01, "end_weight_decay": 0.01, "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 0.5, "log_interval": 1,
        "data_path": ["train"], "split": "80,20,0",
        "eval_interval": 1000, "eval_iters": 0, "DDP_impl": "local", "params_dtype": torch.float32,
        "rotary_percent": 1.0,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "consumed_train_samples": 24,
        "path": Path("somewhere"), "save_interval": 3,
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **own[family], **more})


def theirs(tensors: Mapping[str, Tensor], config: ModelSection, before: str = "model.", after: str = "") -> list[Row]:
    """All tensors in the order of the model; `before` and `after` choose weights or one of the moments."""

    def get(name: str) -> Tensor:
        return tensors[f"{before}{name}{after}"]

    def both(name: str, ours: str, how: str, bias: str | None = None) -> Iterator[Row]:
        yield f"{name}.weight", get(f"{ours}.weight"), how
        if f"{before}{ours}.bias{after}" in tensors:
            yield f"{name}.bias", get(f"{ours}.bias"), bias or how

    gated, is_bert = config.family == "llama", config.family == "bert"
    rows: list[Row] = [("word_embeddings.weight", get("embed.tokens.weight"), "rows")]
    if config.family in ("gpt2", "bert"):
        rows.append(("position_embeddings.weight", get("embed.positions.weight"), "same"))
    if is_bert:
        rows.append(("tokentype_embeddings.weight", get("embed.token_types.weight"), "same"))
    if config.family == "bloom":
        rows += both("word_embeddings.norm", "embed.norm", "same")
    norms = [f"layers.{n}.{name}_norm" for n in range(config.num_layers) for name in ("attention", "mlp")]
    norms = ["embed.norm", *norms] if is_bert else [*norms, "final_norm"]
    for n in range(config.num_layers):
        name, ours = f"layers.{n}", f"layers.{n}"
        rows += both(f"{name}.input_layernorm", norms[2 * n], "same")
        rows += both(f"{name}.self_attention.query_key_value", f"{ours}.attention.qkv", "rows")
        rows += both(f"{name}.self_attention.dense", f"{ours}.attention.out", "columns", "same")
        rows += both(f"{name}.post_attention_layernorm", norms[2 * n + 1], "same")
        if gated:
            two = torch.cat((get(f"{ours}.mlp.gate.weight"), get(f"{ours}.mlp.up.weight")))
            rows.append((f"{name}.mlp.dense_h_to_4h.weight", two, "gated"))
        else:
            rows += both(f"{name}.mlp.dense_h_to_4h", f"{ours}.mlp.up", "rows")
        rows += both(f"{name}.mlp.dense_4h_to_h", f"{ours}.mlp.down", "columns", "same")
    rows += both("final_layernorm", norms[-1], "same")
    if gated:
        rows.append(("output_layer.weight", get("head.weight"), "rows"))
    if is_bert:
        rows += both("pooler.dense", "pooler.dense", "same")
        rows.append(("lm_head.bias", get("head.bias"), "rows"))
        rows += [*both("lm_head.dense", "head.dense", "same"), *both("lm_head.layernorm", "head.norm", "same")]
        rows += both("binary_head", "order_head", "same")
    return rows


def part(row: Row, rank: int, ranks: int) -> Tensor:
    _, whole, how = row
    if how == "same":
        return whole.clone()
    if how == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    return whole.chunk(ranks, dim=1 if how == "columns" else 0)[rank].clone()


def stage_of(name: str, config: ModelSection, stages: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * stages // config.num_layers
    return 0 if "embeddings" in name else stages - 1


def _older(name: str, tensor: Tensor, config: ModelSection, version: float) -> Tensor:
    """Rows of queries, keys and values as before version 2."""
    if "query_key_value" not in name or version >= 2:
        return tensor
    split = tensor.view(-1, 3, config.head_size, *tensor.shape[1:])
    return (split.transpose(0, 1) if version < 1 else split.transpose(1, 2)).reshape(tensor.shape)


_CORE = {
    "query_key_value": "linear_qkv", "self_attention.dense": "self_attention.linear_proj",
    "dense_h_to_4h": "linear_fc1", "dense_4h_to_h": "linear_fc2", "post_attention_layernorm": "pre_mlp_layernorm",
}  # fmt: skip


def _nested(tensors: Mapping[str, Tensor], first: int, *, core: bool) -> dict[str, Any]:
    """A model as it is saved, whose layers count from 0: nested modules, or the flat names of megatron-core."""
    model: dict[str, Any] = {} if core else {"language_model": {"embedding": {}, "encoder": {}}}
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            name = name.replace(f"layers.{number}.", f"layers.{number - first}.", 1)
        key, _, rest = name.partition(".")
        if core:
            for old, new in _CORE.items():
                name = name.replace(old, new)
            place = "embedding." if "embeddings" in key else "" if key == "output_layer" else "decoder."
            model["output_layer.weight" if "for_head" in key else place + name] = tensor
        elif "for_head" in key or key in ("lm_head", "binary_head"):
            model.setdefault(key, {})[rest] = tensor
        elif key in ("pooler", "output_layer"):
            model["language_model"].setdefault(key, {})[rest] = tensor
        elif "embeddings" in key:
            model["language_model"]["embedding"].setdefault(key, {})[rest] = tensor
        else:
            model["language_model"]["encoder"][name] = tensor
    return model


def write_legacy(
    folder: Path, tensors: Mapping[str, Tensor], config: ModelSection, *, tp: int, pp: int, version: float = 3.0,
    chunks: int = 1, bf16: bool = False, core: bool = False,
) -> Path:  # fmt: skip
    """iter_0000003/mp_rank_TT[_PPP]/model_optim_rng.pt with a plain optimizer; in fp32, or with masters of weights in
    bf16. `chunks`: virtual stages of each rank."""
    kinds = {"weight": theirs(tensors, config)} | {
        moment: theirs(tensors, config, "optim.", f".{moment}") for moment in ("exp_avg", "exp_avg_sq")
    }
    last = pp * chunks - 1
    for rank in range(tp):
        for stage in range(pp):
            mine: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
            models = {}
            for chunk in range(chunks):
                virtual = chunk * pp + stage
                for kind, rows in kinds.items():
                    own = {row[0]: row for row in rows if stage_of(row[0], config, pp * chunks) == virtual}
                    if virtual == last > 0 and config.tie_embeddings and config.family != "bert":
                        own["word_embeddings_for_head.weight"] = rows[0]  # the copy of the last stage
                    cut = {name: _older(name, part(row, rank, tp), config, version) for name, row in own.items()}
                    mine[kind] |= cut
                    if kind == "weight":
                        first = min((int(n.split(".")[1]) for n in cut if n.startswith("layers.")), default=0)
                        saved = {name: each.bfloat16() if bf16 else each for name, each in cut.items()}
                        models[f"model{chunk}" if chunks > 1 else "model"] = _nested(saved, first, core=core)
            order = [name for name in mine["weight"] if mine["weight"][name].ndim > 1]
            groups = [order, [name for name in mine["weight"] if name not in order]]
            numbers = {name: i for i, name in enumerate(name for group in groups for name in group)}
            optimizer: dict[str, Any] = {
                "state": {i: {k: mine[k][name] for k in ("exp_avg", "exp_avg_sq")} for name, i in numbers.items()},
                "param_groups": [{"params": [numbers[name] for name in group], "step": 3} for group in groups],
            }
            if bf16:
                masters = [[mine["weight"][name] for name in group] for group in groups]
                optimizer = {"optimizer": optimizer, "fp32_from_fp16_params": masters}
            path = folder / "iter_0000003" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            path.mkdir(parents=True)
            more = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            content = {
                "args": arguments(config, **more), "checkpoint_version": version, "iteration": 3, **models,
                "optimizer": optimizer, "opt_param_scheduler": {"num_steps": 24},
            }  # fmt: skip
            _save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def _pipe_name(name: str, config: ModelSection) -> str:
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        return f"{int(number) + 3}.{rest}"
    if name.startswith("final_layernorm."):
        return name.replace("final_layernorm", str(config.num_layers + 4))
    return f"tied_modules.embed.{name}"


def write_deepspeed(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: ModelSection,
    *,
    tp: int,
    pp: int,
    dp: int,
    universal: bool = False,
) -> Path:
    """global_step3: layer files in bf16, the shards of BF16_Optimizer in fp32; or what DeepSpeed merges of them."""
    step = folder / "global_step3"
    step.mkdir(parents=True)
    kinds = {"fp32": theirs(tensors, config)} | {
        moment: theirs(tensors, config, "optim.", f".{moment}") for moment in ("exp_avg", "exp_avg_sq")
    }
    layers: dict[tuple[int, int], dict[str, Tensor]] = {}
    for row in kinds["fp32"]:
        name = _pipe_name(row[0], config).replace("tied_modules.embed.", "1.")
        for rank in range(tp):
            layer, _, rest = name.partition(".")
            layers.setdefault((int(layer), rank), {})[rest] = part(row, rank, tp).bfloat16()
    for (layer, rank), content in layers.items():
        torch.save(content, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    for stage in range(pp):
        for rank in range(tp):
            names = [row[0] for row in kinds["fp32"] if stage_of(row[0], config, pp) == stage]
            names += ["word_embeddings.weight"] if stage == pp - 1 > 0 else []
            cut = {
                kind: {row[0]: part(row, rank, tp) for row in rows if row[0] in names} for kind, rows in kinds.items()
            }
            many = [[n for n in names if (cut["fp32"][n].ndim > 1) is is_matrix] for is_matrix in (True, False)]
            mp = stage * tp + rank
            shapes = [{_pipe_name(n, config): cut["fp32"][n].shape for n in group} for group in many]
            more = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "deepspeed": True,
                "zero_stage": 0,
            }
            saved = {
                "args": arguments(config, **more), "checkpoint_version": 3.0, "iteration": 3, "module": None,
                "param_shapes": shapes, "lr_scheduler": {"num_steps": 24}, "global_steps": 3,
            }  # fmt: skip
            _save(saved, step / f"mp_rank_{mp:02d}_model_states.pt")
            if not universal:
                _write_zero(step, cut, many, mp=mp, dp=dp)
    if universal:
        for kind, rows in kinds.items():
            for row in rows:
                place = step / "zero" / _pipe_name(row[0], config)
                place.mkdir(parents=True, exist_ok=True)
                torch.save({"param": row[1].clone(), "cat_dim": 0}, place / f"{kind}.pt")
                torch.save(3, place / "step.pt")
    (folder / ("latest_universal" if universal else "latest")).write_text("global_step3")
    return folder


def _write_zero(
    step: Path, cut: Mapping[str, Mapping[str, Tensor]], groups: list[list[str]], *, mp: int, dp: int
) -> None:
    flats: dict[str, list[list[Tensor]]] = {}
    for kind, tensors in cut.items():
        flats[kind] = []
        for group in groups:
            flat = torch.cat([tensors[name].flatten() for name in group])
            flat = torch.cat((flat, torch.full((-flat.numel() % (2 * dp),), 7.0)))  # padding
            flats[kind].append([each.clone() for each in flat.chunk(dp)])
    for replica in range(dp):
        states = {
            i: {"step": 3, **{kind: flats[kind][i][replica] for kind in ("exp_avg", "exp_avg_sq")}}
            for i in range(len(groups))
        }
        saved = {
            "base_optimizer_state": {"state": states, "param_groups": []},
            "single_partition_of_fp32_groups": [flats["fp32"][i][replica] for i in range(len(groups))],
        }
        name = f"bf16_zero_pp_rank_{replica}_mp_rank_{mp:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": saved}, step / name)


def made_of(folder: Path, config: ModelSection, **layout: Any) -> Path:
    """A checkpoint of Megatron-LM with the weights of `hf_folder`."""
    tensors = {f"model.{name}": each.detach() for name, each in small_model(config).named_parameters()}
    moments = ("exp_avg", "exp_avg_sq")
    tensors |= {
        f"optim.{name[6:]}.{moment}": torch.zeros_like(each) for name, each in tensors.items() for moment in moments
    }
    return write_legacy(folder, tensors, config, **layout)

"""A checkpoint of ours as megatron-core's `torch_dist`. Holds one tensor at a time."""

import argparse
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from bloomery.base.doing import doing
from bloomery.base.errors import Problem, RecipeError
from bloomery.base.storage import write_atomically, writing, written_to
from bloomery.checkpoint.folder import find_checkpoint
from bloomery.checkpoint.load import Checkpoint, read_checkpoint
from bloomery.config.recipe import Recipe
from bloomery.families.registry import FAMILIES
from bloomery.interop.hf.folder import move_all, require_empty, staged
from bloomery.interop.megatron.checkpoint import KINDS, MOMENTS
from bloomery.interop.megatron.weights import their_name
from bloomery.sizing.parameters import padded_vocab_size, parameter_shapes
from bloomery.sizing.schedule import TrainingPlan

_TRACKER = "latest_checkpointed_iteration.txt"


class _Chunks(DefaultSavePlanner):
    """Keys of megatron-core, in which all layers of a weight are a stack, each layer a chunk of it."""

    def __init__(self, saved: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.saved, self.dtype, self.sources = saved, dtype, dict[MetadataIndex, list[str]]()
        self.layers = saved.recipe.model.num_layers

    def create_local_plan(self) -> SavePlan:
        chunks: dict[tuple[str, int | None], list[tuple[str, tuple[int, ...]]]] = {}
        for ours, shape in parameter_shapes(self.saved.recipe.model):
            chunks.setdefault(_key_of(their_name(ours, self.saved.recipe.model)), []).append((ours, shape))
        items = [self._item(prefix, *at, sources) for prefix in ("", *KINDS) for at, sources in chunks.items()]
        self.plan = SavePlan(items)
        return self.plan

    def _item(self, prefix: str, key: str, layer: int | None, sources: Any) -> WriteItem:
        """`sources`: our tensors, which are joined: a gate stands before `up`."""
        size = (sum(shape[0] for _, shape in sources), *sources[0][1][1:])
        inside = (0,) * len(size)
        stacked = layer is not None
        offset, chunk, whole = ((layer, *inside), (1, *size), (self.layers, *size)) if stacked else (inside, size, size)
        index = MetadataIndex(prefix + key, torch.Size(offset), layer or 0)  # type: ignore[arg-type]
        kind = KINDS.get(prefix)
        self.sources[index] = [f"optim.{ours}.{kind}" if kind in MOMENTS else f"model.{ours}" for ours, _ in sources]
        where = ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk))  # type: ignore[arg-type]
        properties = TensorProperties(torch.float32 if prefix else self.dtype)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(where, properties, torch.Size(whole)))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        data = write_item.tensor_data
        assert data is not None
        whole = torch.cat([self.saved.read(ours) for ours in self.sources[write_item.index]])
        return whole.to(data.properties.dtype).view(data.chunk.sizes)


def _key_of(name: str) -> tuple[str, int | None]:
    """The key, and which of its layers this is. Norms before a projection are parts of it there."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"decoder.layers.{rest}", int(layer)
    return {"word": "embedding.", "posi": "embedding.", "fina": "decoder."}.get(name[:4], "") + name, None


def export_megatron(checkpoint: Path, output: Path, dtype: torch.dtype) -> tuple[Path, int]:
    """`output`/iter_NNNNNNN and the tracker: weights, masters, moments and arguments; how many tensors. RecipeError for
    a model that megatron-core does not have; StorageError if `output` holds something."""
    require_empty(output, "an export replaces nothing")
    saved = read_checkpoint(find_checkpoint(checkpoint))
    family, step = FAMILIES[saved.recipe.model.family], int(saved.state["step"])
    if family.encoder or family.positions == "alibi":
        rule = "megatron-core has neither ALiBi nor a BERT with norms after the residuals"
        raise RecipeError(Problem(f"the model is a {family.name}", rule, "export it for Hugging Face"))
    with (
        doing(f"converting {saved.folder}"),
        written_to("OUT"),
        staged(output, partial(move_all, last=_TRACKER)) as made,
    ):
        folder, planner = made / f"iter_{step:07d}", _Chunks(saved, dtype)
        with writing(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
            updates = {"state": {"common_step": int(saved.read("optim.step"))}}
            common = {"checkpoint_version": 3.0, "iteration": step, "optimizer": updates, "args": _arguments(saved)}
            torch.save(common, folder / "common.pt")
        backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backends |= {"common_backend": "torch", "common_backend_version": 1}
        write_atomically(folder / "metadata.json", json.dumps(backends))
        write_atomically(made / _TRACKER, str(step))
    return output / f"iter_{step:07d}", len(planner.sources)


def _arguments(saved: Checkpoint) -> argparse.Namespace:
    """What Megatron takes with --use-checkpoint-args, and the position in the data."""
    recipe: Recipe = saved.recipe
    model, family, lr, batch = recipe.model, FAMILIES[recipe.model.family], recipe.lr, recipe.batch
    optimizer, plan = recipe.optimizer, TrainingPlan.of(recipe)
    return argparse.Namespace(
        num_layers=model.num_layers, encoder_num_layers=model.num_layers, hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size, num_attention_heads=model.num_heads, kv_channels=model.head_size,
        group_query_attention=model.num_kv_heads != model.num_heads, num_query_groups=model.num_kv_heads,
        seq_length=model.seq_length, max_position_embeddings=model.seq_length,
        padded_vocab_size=padded_vocab_size(model),
        position_embedding_type="rope" if family.positions == "rotary" else "learned_absolute",
        rotary_base=int(model.rope_theta), normalization="RMSNorm" if family.norm == "rms" else "LayerNorm",
        norm_epsilon=model.norm_eps, layernorm_epsilon=model.norm_eps, swiglu=family.gated, qk_layernorm=family.qk_norm,
        add_bias_linear=family.bias, add_qkv_bias=family.qkv_bias, hidden_dropout=model.dropout,
        untie_embeddings_and_output_weights=not model.tie_embeddings, attention_dropout=model.dropout,
        make_vocab_size_divisible_by=model.vocab_multiple, init_method_std=model.init_std, seed=recipe.seed,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, bf16=recipe.precision == "bf16",
        micro_batch_size=batch.micro_batch_size, global_batch_size=batch.global_batch_size, lr=lr.peak,
        consumed_train_samples=int(saved.state["consumed_samples"]), consumed_valid_samples=0, min_lr=plan.lr.min,
        train_samples=plan.train_samples, lr_decay_style=lr.schedule, lr_warmup_samples=plan.lr.warmup_samples,
        lr_decay_samples=plan.lr.decay_samples, weight_decay=optimizer.weight_decay, adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1], adam_eps=optimizer.eps, clip_grad=optimizer.clip_grad_norm or 0.0,
    )  # fmt: skip

"""Our parameters and the tensors of Megatron: names, and how its tensor-parallel ranks share them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem
from bloomery.config.recipe import ModelSection
from bloomery.families.registry import FAMILIES
from bloomery.interop.megatron.checkpoint import MASTER, MODEL, Found
from bloomery.sizing.parameters import parameter_shapes

_MODULES = {
    "embed.tokens": "word_embeddings",
    "embed.positions": "position_embeddings",
    "embed.token_types": "tokentype_embeddings",
    "embed.norm": "word_embeddings.norm",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.gate": "mlp.linear_fc1",
    "mlp.up": "mlp.linear_fc1",
    "mlp.down": "mlp.linear_fc2",
    "final_norm": "final_layernorm",
    "head": "output_layer",
    "head.dense": "lm_head.dense",
    "head.norm": "lm_head.layernorm",
    "pooler.dense": "pooler.dense",
    "order_head": "binary_head",
}
"""Those of a layer without its number."""
_BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "lm_head.bias", "linear_qkv.", "linear_fc1.")
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def their_name(ours: str, model: ModelSection) -> str:
    """A BERT here is post-norm. With its residuals taken after the norms Megatron's is that too, one norm ahead."""
    if ours == "head.bias":
        return "lm_head.bias"
    module, _, part = ours.rpartition(".")
    layer, number = "", 0
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        number = int(layer) + (module == "mlp_norm")
    if FAMILIES[model.family].encoder and module in ("embed.norm", "mlp_norm"):
        module, layer = ("attention_norm", str(number)) if number < model.num_layers else ("final_norm", "")
    elif FAMILIES[model.family].encoder and module == "attention_norm":
        module = "mlp_norm"
    return f"{f'layers.{layer}.' if layer else ''}{_MODULES[module]}.{part}"


class Weights:
    """Of a checkpoint, as ours. DataError with everything that is missing, of another shape or without a place."""

    def __init__(self, found: Found, model: ModelSection) -> None:
        self.found, self.model = found, model
        self.shapes = dict(parameter_shapes(model))
        version = found.state.get("checkpoint_version", 0 if found.layout == "Megatron-LM" else 3.0)
        self._version = float(version) if found.layout != "megatron-core" else 3.0
        theirs = {ours: their_name(ours, model) for ours in self.shapes}
        self._theirs, has = theirs, found.tensors[MODEL]
        missing = [f"{name} (ours: {ours})" for ours, name in theirs.items() if name not in has]
        tied = ["output_layer.weight"] if model.tie_embeddings else []
        unused = sorted(has.keys() - {*theirs.values(), *tied})
        self._refuse(missing, "tensors are missing", "copy all its files, or correct `model`")
        self._refuse(unused, f"tensors have no place in a {model.family}", "it would compute something else")
        for kind, tensors in found.tensors.items():
            lacking = [name for name in theirs.values() if tensors and name not in tensors]
            self._refuse(lacking, f"tensors have no {kind}", "import the weights alone: --weights-only")

    def read(self, ours: str, kind: str) -> Tensor:
        """In fp32. `kind` MODEL means the masters, where it has some."""
        name = self._theirs[ours]
        has_master = kind == MODEL and name in self.found.tensors[MASTER]
        parts = [part.float() for part in self.found.parts(MASTER if has_master else kind, name)]
        if "linear_qkv." in name and self._version < 2:
            parts = [self._heads_first(part) for part in parts]
        if FAMILIES[self.model.family].gated and "linear_fc1." in name:
            parts = [part.chunk(2)[".up." in ours] for part in parts]
        made = _merged(name, parts)
        if made.shape != self.shapes[ours]:
            self._refuse([f"{name} is {tuple(made.shape)}, not {self.shapes[ours]}"], "tensor has another shape", "")
        if not bool(made.isfinite().all()):
            self._refuse([f"{kind} of {name}"], "tensor is not finite", "import an earlier checkpoint")
        return made.contiguous()

    def _heads_first(self, part: Tensor) -> Tensor:
        """Rows of a checkpoint before version 2: [3, heads, size] in version 0, [heads, size, 3] in version 1."""
        size, rest = self.model.head_size, part.shape[1:]
        if self._version < 1:
            return part.view(3, -1, size, *rest).transpose(0, 1).flatten(0, 2)
        return part.view(-1, size, 3, *rest).transpose(1, 2).flatten(0, 2)

    def _refuse(self, wrong: Sequence[str], what: str, remedy: str) -> None:
        if wrong:
            text = f"{len(wrong)} {what}: {', '.join(wrong[:5])}"
            raise DataError(Problem(text, "", remedy or "correct `model`", str(self.found.folder)))


def _merged(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Of what every rank has a copy, a difference (there was such a bug) is averaged, as DeepSpeed does."""
    if len(parts) == 1 or name.endswith(_BY_COLUMNS):
        return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
    if any(word in name for word in _BY_ROWS):
        return torch.cat(list(parts))
    return parts[0] if all(map(parts[0].equal, parts)) else torch.stack(list(parts)).mean(0)


def model_rows(found: Found) -> int | None:
    """Of the embedding, with the padding of the vocabulary."""
    name = "word_embeddings.weight"
    return sum(part.shape[0] for part in found.parts(MODEL, name)) if name in found.tensors[MODEL] else None

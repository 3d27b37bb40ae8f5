"""How our parameters become Hugging Face tensors, and back. Nothing here computes: values are renamed, cut, joined and
transposed, so a round trip is exact."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.config.recipe import ModelSection
from bloomery.families.family import HuggingFace
from bloomery.families.registry import FAMILIES
from bloomery.sizing.parameters import HEAD, padded_vocab_size, parameter_shapes

_EMBEDDING = "embed.tokens.weight"
_VOCABULARY = (_EMBEDDING, HEAD, "head.bias")
_BUFFER = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq|position_ids|token_type_ids)$")
"""Constants that versions of transformers have saved with the weights."""


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and the tensors that hold it there."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    """The tensors that are written."""
    names: tuple[tuple[str, ...], ...]
    """Of each tensor that is read: its names, the best last."""
    export: Callable[[Tensor], Sequence[Tensor]] = lambda t: [t]
    load: Callable[[Sequence[Tensor]], Tensor] = lambda ts: ts[0]
    keys: tuple[str, ...] = ()
    """Of the tensors in a state that is read."""

    def loaded(self, read: Callable[[str], Tensor]) -> Tensor:
        return self.load([read(key) for key in self.keys]).contiguous()


def entries_of(config: ModelSection) -> list[Entry]:
    """How each parameter becomes tensors there, one by one. RecipeError if Hugging Face has no such model."""
    hf = FAMILIES[config.family].hf
    if not hf.architecture:
        rule = "transformers has no such model, as far as its package says"
        raise RecipeError(Problem(f"model.family is {config.family}", rule, "load it with bloomery.load_model"))
    if "ffn_hidden_size" not in hf.fields and config.ffn_hidden_size != 4 * config.hidden_size:
        what = f"model.ffn_hidden_size is {config.ffn_hidden_size}"
        rule = f"Hugging Face's {hf.architecture} supports only 4 * hidden_size = {4 * config.hidden_size}"
        raise RecipeError(Problem(what, rule, "train with that width, or keep the checkpoint as it is"))
    return [_entry(name, shape, hf, config) for name, shape in parameter_shapes(config)]


def _entry(ours: str, shape: tuple[int, ...], hf: HuggingFace, config: ModelSection) -> Entry:
    theirs = _their_names(ours, hf)
    if ours in _VOCABULARY:  # the padding is dropped on the way out and zero on the way in
        written = theirs[:1] if config.tie_embeddings else theirs  # copies are left out, as save_pretrained does
        rows, padding = config.vocab_size, padded_vocab_size(config) - config.vocab_size
        return Entry(
            ours,
            shape,
            written,
            (theirs,),
            lambda t: [t[:rows]] * len(written),
            lambda ts: torch.cat((ts[0], ts[0].new_zeros(padding, *ts[0].shape[1:]))) if padding else ts[0],
        )
    plain = Entry(ours, shape, theirs, tuple((name,) for name in theirs))
    if len(theirs) == 3:
        return replace(plain, export=lambda t: _split_qkv(t, config), load=lambda ts: _join_qkv(ts, config))
    if hf.conv1d and ".attention.qkv." in ours:  # t() leaves a bias as it is
        return replace(
            plain,
            export=lambda t: [torch.cat(_split_qkv(t, config)).t()],
            load=lambda ts: _join_qkv(ts[0].t().chunk(3), config),
        )
    if hf.conv1d and ours.startswith("layers.") and len(shape) == 2:
        return replace(plain, export=lambda t: [t.t()], load=lambda ts: ts[0].t())
    return plain


def _their_names(ours: str, hf: HuggingFace) -> tuple[str, ...]:
    layer = ours.split(".")[1] if ours.startswith("layers.") else ""
    generic = ours.replace(f".{layer}.", ".N.", 1) if layer else ours
    module, _, part = generic.rpartition(".")
    found, ending = (hf.tensors[generic], "") if generic in hf.tensors else (hf.tensors[module], f".{part}")
    names = (found,) if isinstance(found, str) else found
    return tuple(name.replace(".N.", f".{layer}.") + ending for name in names)


def _split_qkv(fused: Tensor, config: ModelSection) -> list[Tensor]:
    """Query, key and value rows, each by head, of [num_kv_heads, q_per_kv + 2, head_dim] rows (weight or bias)."""
    groups = fused.reshape(config.num_kv_heads, -1, config.head_size, *fused.shape[1:])
    return [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]


def _join_qkv(parts: Sequence[Tensor], config: ModelSection) -> Tensor:
    """The inverse of `_split_qkv`."""
    groups = [part.reshape(config.num_kv_heads, -1, config.head_size, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 2)


def to_hf(read: Callable[[str], Tensor], config: ModelSection) -> Iterator[tuple[str, Tensor]]:
    """Their tensors by name, one after the other. `read`: one of our parameters."""
    for entry in entries_of(config):
        yield from zip(entry.theirs, entry.export(read(entry.ours)), strict=True)


def their_shapes(config: ModelSection) -> dict[str, tuple[int, ...]]:
    """Every tensor of the exported model, in the order of `to_hf`."""
    shapes = {entry.ours: entry.shape for entry in entries_of(config)}
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in to_hf(lambda ours: torch.empty(shapes[ours]), config)}


def sources_of(shapes: Mapping[str, tuple[int, ...]], config: ModelSection) -> list[Entry]:
    """How to make each of our parameters of a state that has tensors of these shapes. DataError with every tensor that
    is missing or of another shape."""
    expected, hf = their_shapes(config), FAMILIES[config.family].hf
    sources, missing, wrong = [], [], []
    for entry in entries_of(config):
        keys = []
        for written, names in zip(entry.theirs, entry.names, strict=False):
            found = [key for name in names for key in _spellings(name, hf.prefix) if key in shapes]
            keys += found[-1:]
            if not found:
                missing.append(written)
            elif shapes[found[-1]] != expected[written]:
                wrong.append(f"{found[-1]} is {shapes[found[-1]]} instead of {expected[written]}")
        sources.append(replace(entry, keys=tuple(keys)))
    remedy = "config.json and weights must be of one model: copy them together"
    problems = []
    if missing:
        what = f"the Hugging Face state lacks {len(missing)} of {len(expected)} tensors: {', '.join(missing[:8])}"
        rule = "every parameter of the recipe's model must be there"
        problems.append(Problem(what, rule, hf.missing_remedy or remedy))
    if wrong:
        what = f"{len(wrong)} tensors of the Hugging Face state have another shape: {'; '.join(wrong[:8])}"
        problems.append(Problem(what, "shapes follow from the recipe's model", remedy))
    if problems:
        raise DataError(problems)
    return sources


def _spellings(name: str, prefix: str) -> list[str]:
    """Keys under which folders have this tensor, the best last: also that of the bare model, without `prefix`, and the
    names of norms that came from TensorFlow (bert-base-uncased has them)."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return [key for each in (old, name) for key in (each.removeprefix(prefix), each)]


def unused_tensors(keys: Iterable[str], sources: Iterable[Entry], config: ModelSection) -> list[str]:
    """Tensors of a state that no parameter is made of, and that are neither buffers nor copies of tied weights."""
    known = {*_their_names(HEAD, FAMILIES[config.family].hf)} if config.tie_embeddings else set()
    for source in sources:
        known |= {*source.keys, *(name for names in source.names for name in names)}
    return sorted(key for key in keys if key not in known and not _BUFFER.search(key))


def embedding_and_head(keys: Container[str], family: str) -> tuple[str, str] | None:
    """Under which keys a state has both; None if it has one, which is then both."""
    hf = FAMILIES[family].hf
    (embedding,), (head,) = _their_names(_EMBEDDING, hf), _their_names(HEAD, hf)
    found = [key for key in _spellings(embedding, hf.prefix) if key in keys]
    return (found[-1], head) if found and head in keys else None

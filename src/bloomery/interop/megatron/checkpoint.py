"""The checkpoints of Megatron-LM and Megatron-DeepSpeed, read: tensors under one set of names, whatever the layout, and
what is saved beside them. docs/import.md has the layouts. Nothing in a file is executed: of every object only its
arguments and fields are kept.

Names are those of megatron-core, with global layer numbers: `layers.7.mlp.linear_fc1.weight`.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.base.bounded import LARGE_BYTES, read_small
from bloomery.base.errors import DataError, Problem

MODEL, MASTER = "model", "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[], Tensor]
KINDS = {"optimizer.state.fp32_param.": MASTER} | {f"optimizer.state.{moment}.": moment for moment in MOMENTS}
"""What stands before a key of megatron-core."""
_PLAIN = re.compile(
    r"(megatron|deepspeed|apex|transformer_engine|numpy|torch|argparse|types|pathlib|signal|collections|_io|enum)\b"
)
"""Packages whose objects are in such files; what they are is not loaded."""
_NAMES = (
    (r"^((module|language_model|embedding|transformer|encoder|decoder)\.|tied_modules\.\w+\.)+", ""),
    (r"\.attention\.", ".self_attention."),
    (r"query_key_value", "linear_qkv"),
    (r"self_attention\.dense", "self_attention.linear_proj"),
    (r"dense_h_to_4h", "linear_fc1"),
    (r"dense_4h_to_h", "linear_fc2"),
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_|post_attention_(layer)?norm\.", "pre_mlp_layernorm."),
    (r"(input|final)_norm\.", r"\1_layernorm."),
    (r"^lm_head\.layer_norm\.", "lm_head.layernorm."),
    (r"^lm_head\.weight$", "output_layer.weight"),
    (r"^output_layer\.bias$", "lm_head.bias"),
)
"""Every spelling -> ours here."""
_WHATEVER = (ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError)
_BUFFER = re.compile(r"_extra_state|inv_freq|word_embeddings_for_head|masked_bias")


@dataclass
class Found:
    """A checkpoint. Tensors are read when they are asked for."""

    folder: Path
    layout: str
    state: dict[str, Any]
    """What is saved beside the tensors."""
    tensors: dict[str, dict[str, dict[int, Tensor | Read]]] = field(
        default_factory=lambda: {kind: defaultdict(dict) for kind in (MODEL, MASTER, *MOMENTS)}
    )
    """By kind, name and tensor-parallel rank; of a tensor that is whole, one part."""
    updates: int | None = None
    """As Adam counts them."""
    unread: str = ""
    """Why states of the optimizer cannot be read, though there are some."""

    @property
    def args(self) -> dict[str, Any]:
        """The command line of the training."""
        args = self.state.get("args")
        return dict(args if isinstance(args, dict) else getattr(args, "__dict__", {}))

    @property
    def is_deepspeed(self) -> bool:
        return self.layout.startswith("DeepSpeed")

    def put(self, kind: str, name: str, part: Tensor | Read, rank: int = 0) -> None:
        """Of several copies the first counts."""
        if not _BUFFER.search(name):
            self.tensors[kind][name].setdefault(rank, part)

    def parts(self, kind: str, name: str) -> list[Tensor]:
        """By tensor-parallel rank."""
        found = [part for _, part in sorted(self.tensors[kind][name].items())]
        with reading(self.folder):
            return [part if isinstance(part, Tensor) else part() for part in found]


class Inert:
    """Stands for an object of any class in a pickle."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"args": state})


def read_checkpoint(folder: Path) -> Found:
    """`folder`: of one step, or one whose tracker names it. DataError if it is none, or cannot be read."""
    for tracker in ("latest_universal", "latest", "latest_checkpointed_iteration.txt"):
        if (folder / tracker).is_file():
            with open(folder / tracker, errors="replace") as file:
                tag = file.read(255).strip()
            folder /= f"iter_{int(tag):07d}" if tag.isascii() and tag.isdecimal() else tag.rpartition("/")[2]
            break
    layouts = {
        ".metadata": _torch_dist,
        "zero/*": _universal,
        "mp_rank_*_model_states.pt": _deepspeed,
        "mp_rank_*/model_optim_rng.pt": _legacy,
    }
    read = next((read for pattern, read in layouts.items() if any(folder.glob(pattern))), None)
    if read is None:
        rule = f"it has {', '.join(layouts)}, or a tracker beside it"
        raise DataError(Problem(f"{folder} is no checkpoint of Megatron", rule, "name the folder of one step"))
    with reading(folder):
        found = read(folder)
    for kind in (MASTER, *MOMENTS) if found.unread else ():
        found.tensors[kind].clear()
    return found


# ---------------------------------------------------------------- files


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Whatever a damaged or forged file leads to within it is one error."""
    try:
        yield
    except (*_WHATEVER, ValueError, pickle.UnpicklingError) as error:
        rule = "nothing in a checkpoint is executed, and files of torch before 1.6 are not read"
        remedy = "copy it again; an old one: torch.load and torch.save it once where you trust it"
        what = f"{place} cannot be read: {type(error).__name__}: {error}"[:400]
        raise DataError(Problem(what, rule, remedy)) from error


def _load(path: Path) -> Any:
    """What torch.save has written, with tensors that are read from the file where they are used."""
    with reading(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        for name in names:
            _refuse_strange(name)
        with torch.serialization.safe_globals([(Inert, name) for name in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _refuse_strange(name: str) -> None:
    if not _PLAIN.match(name):
        raise pickle.UnpicklingError(f"it holds an object of {name}, which no Megatron saves")


class _Metadata(pickle.Unpickler):
    """That of torch.distributed.checkpoint, which is a plain pickle."""

    def find_class(self, module: str, name: str) -> Any:
        _refuse_strange(module)
        return tuple if (module, name) == ("torch", "Size") else Inert


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """In the order in which the model was built."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def plain_name(name: str, first_layer: int = 0) -> str:
    """`first_layer`: the number of the one that is called 0 here."""
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{int(match[1]) + first_layer}", name)


# ---------------------------------------------------------------- Megatron-LM, a file a rank


def _legacy(folder: Path) -> Found:
    """mp_rank_TT or mp_rank_TT_PPP. Layers count from 0 in every stage (model, or model0, model1, ...)."""
    loaded = {
        tuple(map(int, f"{path.parent.name[8:]}_0".split("_")[:2])): _load(path)
        for path in sorted(folder.glob("mp_rank_*/*_rng.pt"))
    }
    found = Found(folder, "Megatron-LM", loaded[0, 0])
    chunks = sorted(key for key in found.state if re.fullmatch(r"model\d*", key))
    starts, layers = {}, 0
    for chunk in chunks:
        for stage in sorted({stage for _, stage in loaded}):
            names = [plain_name(name) for name, _ in _flat(loaded[0, stage][chunk])]
            starts[chunk, stage] = layers
            layers += len({name.split(".")[1] for name in names if name.startswith("layers.")})
    for (rank, stage), saved in loaded.items():
        tensors = [
            (plain_name(name, starts[chunk, stage]), each) for chunk in chunks for name, each in _flat(saved[chunk])
        ]
        for name, each in tensors:
            found.put(MODEL, name, each, rank)
        try:
            _put_numbered(found, rank, tensors, saved.get("optimizer"))
        except LookupError as error:
            found.unread = f"the states of the optimizer do not follow the weights: {error}"
    if not found.state.get("optimizer") and any(folder.glob("mp_rank_*/distrib_optim.pt")):
        found.unread = "moments are in the buckets of distrib_optim.pt"
    return found


def _put_numbered(
    found: Found, rank: int, tensors: Sequence[tuple[str, Tensor]], optimizer: Mapping[str, Any] | None
) -> None:
    """Optimizer states have numbers for names: the weights with decay first, then biases and norms, both in the order
    of the model. LookupError unless shapes, and the masters of 16-bit weights, agree."""
    if not optimizer:
        return
    adam, masters = optimizer.get("optimizer", optimizer), optimizer.get("fp32_from_fp16_params")
    left = {many: [each for each in tensors if (each[1].ndim > 1) is many and "_extra_state" not in each[0]]
            for many in (True, False)}  # fmt: skip
    for number, group in enumerate(adam["param_groups"]):
        for place, key in enumerate(group["params"]):
            state = adam["state"][key]
            name, weight = left[state["exp_avg"].ndim > 1].pop(0)
            master = masters[number][place] if masters else weight
            if state["exp_avg"].shape != weight.shape or not torch.equal(master.to(weight.dtype), weight):
                raise LookupError(f"state {key} is not that of {name}")
            found.updates = int(state.get("step", group.get("step", 0))) or found.updates
            for kind, tensor in ((MASTER, master), *((moment, state[moment]) for moment in MOMENTS)):
                found.put(kind, name, tensor, rank)


# ---------------------------------------------------------------- DeepSpeed


def _pipe_names(names: Sequence[str]) -> dict[str, str]:
    """`3.mlp...` -> `layers.0.mlp...`: layers of a pipeline count from 0 with all that is in it. Blocks are those with
    attention; what is only `weight` (and `bias`) is the last norm."""
    blocks = sorted({int(name.split(".")[0]) for name in names if re.match(r"\d+\..*(layernorm|_norm)\.", name)})
    made = {}
    for name in names:
        number, _, rest = name.partition(".")
        if not number.isdecimal():
            made[name] = plain_name(name)
        elif int(number) in blocks:
            made[name] = plain_name(f"layers.{blocks.index(int(number))}.{rest}")
        else:
            made[name] = plain_name(f"final_layernorm.{rest}" if rest in ("weight", "bias") else rest)
    return made


def _deepspeed(folder: Path) -> Found:
    """Layer by layer, or a module a rank; and the shards of the optimizer."""
    ranks = {int(path.name.split("_")[2]): _load(path) for path in folder.glob("mp_rank_*_model_states.pt")}
    found = Found(folder, "DeepSpeed", ranks[0])
    layers = {path: path.name.split("_") for path in folder.glob("layer_*-model_*-model_states.pt")}
    saved = {
        (f"{int(words[1].split('-')[0])}.{key}", int(words[2].split("-")[0])): tensor
        for path, words in sorted(layers.items())
        for key, tensor in _flat(_load(path))
    }
    if not layers:
        modules = {rank: each.get("module") or {} for rank, each in ranks.items()}
        saved = {(key, rank): tensor for rank, module in modules.items() for key, tensor in _flat(module)}
    names = _pipe_names([name for name, _ in saved])
    for (name, rank), tensor in saved.items():
        found.put(MODEL, names[name], tensor, rank)
    _put_zero_shards(found, ranks)
    return found


def _put_zero_shards(found: Found, ranks: Mapping[int, Any]) -> None:
    """[bf16_]zero_pp_rank_D_mp_rank_M: a D-th of the flat states of rank M, cut by its param_shapes."""
    files: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in found.folder.glob("*zero_pp_rank_*_mp_rank_*_optim_states.pt"):
        replica, rank = re.findall(r"_rank_(\d+)", path.name)
        files[int(rank)][int(replica)] = path
    shapes: dict[int, Any] = {rank: ranks[rank].get("param_shapes") if rank in ranks else None for rank in files}
    if not all(shapes.values()):
        found.unread = "no param_shapes say where a weight lies in the optimizer's shards"
        return
    seen: dict[Any, int] = defaultdict(int)
    names = _pipe_names([name for groups in shapes.values() for group in groups for name in group])
    for rank in sorted(files):
        states = [_load(files[rank][replica])["optimizer_state_dict"] for replica in sorted(files[rank])]
        has = tuple(name for group in shapes[rank] for name in group)
        tensor_rank, seen[has] = seen[has], seen[has] + 1
        for number, group in enumerate(shapes[rank]):
            base = [each["base_optimizer_state"] for each in states]
            adam = [each["state"][number] if isinstance(each, dict) else each[number] for each in base]
            if "step" in adam[0]:
                found.updates = int(adam[0]["step"])
            flats = {MASTER: [each["single_partition_of_fp32_groups"][number] for each in states]}
            flats |= {kind: [each[kind] for each in adam] for kind in MOMENTS}
            for kind, flat in flats.items():
                start = 0
                for name, shape in group.items():
                    cut = partial(_cut, flat, start, tuple(shape), f"{kind} of {name} in {found.folder}")
                    found.put(kind, names[name], cut, tensor_rank)
                    start += torch.Size(shape).numel()


def _cut(flat: Sequence[Tensor], start: int, shape: tuple[int, ...], what: str) -> Tensor:
    """A tensor that begins at `start` of a row of flat parts."""
    pieces, missing, begin = [], torch.Size(shape).numel(), 0
    for part in flat:
        first = max(start - begin, 0)
        piece = part.flatten()[first : first + missing] if first < part.numel() else part[:0]
        pieces.append(piece)
        missing, begin = missing - piece.numel(), begin + part.numel()
    if missing:
        raise DataError(Problem(f"{what}: {missing:,} numbers are missing", remedy="copy every shard"))
    return torch.cat(pieces).view(shape)


def _universal(folder: Path) -> Found:
    """zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt, merged by DeepSpeed, without the padding of the vocabulary."""
    first = _load(min(folder.glob("mp_rank_*_model_states.pt")))
    found = Found(folder, "DeepSpeed universal", first)
    folders = {path.name: path for path in sorted((folder / "zero").iterdir()) if path.is_dir()}

    def read(path: Path) -> Tensor:
        saved = _load(path)
        saved = saved if isinstance(saved, dict) else {"param": saved}
        padding = saved.get("vocab_divisibility_padding_tensor")
        whole: Tensor = saved["param"] if padding is None else torch.cat((saved["param"], padding))
        return whole

    for name, ours in _pipe_names([*folders]).items():
        for kind in (MASTER, *MOMENTS):
            found.put(kind, ours, partial(read, folders[name] / f"{kind}.pt"))
        if (step := folders[name] / "step.pt").is_file():
            found.updates = int(_load(step))
    found.tensors[MODEL] = found.tensors[MASTER]
    return found


# ---------------------------------------------------------------- megatron-core


def _torch_dist(folder: Path) -> Found:
    """torch.distributed.checkpoint with megatron-core's keys; `decoder.layers.mlp...` is the stack of all layers."""
    common = _load(folder / "common.pt")
    found = Found(folder, "megatron-core", common)
    with reading(folder / ".metadata"):
        metadata = _Metadata(io.BytesIO(read_small(folder / ".metadata", LARGE_BYTES))).load()
        places = {
            (key.fqn, tuple(vars(key).get("offset") or ())): place for key, place in metadata.storage_data.items()
        }
        entries = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
    for key, entry in entries.items():
        prefix = next((prefix for prefix in KINDS if key.startswith(prefix)), "")
        kind, name = KINDS.get(prefix, MODEL), key.removeprefix(prefix)
        boxes = [(tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks]
        if re.search(r"optimizer\.", name) or (prefix and entry.size != getattr(entries.get(name), "size", None)):
            found.unread = f"{key} is not laid out like its weight"
            continue
        stacked = re.match(r"((?:en|de)coder\.layers)\.(?!\d)", name)
        for layer in range(entry.size[0]) if stacked else [None]:
            plain = plain_name(name.replace("layers.", f"layers.{layer}.", 1) if stacked else name)
            found.put(kind, plain, partial(_chunks, folder, key, entry.size, boxes, places, layer))
    state = common.get("optimizer") or {}
    state = state.get("optimizer", state) if isinstance(state, dict) else {}
    step = (state.get("state") or {}).get("common_step") or next(iter(state.get("param_groups") or [{}])).get("step")
    found.updates = int(step) if step is not None else None
    return found


def _chunks(folder: Path, key: str, shape: Sequence[int], boxes: Any, places: Any, layer: int | None) -> Tensor:
    """One tensor, or one layer of a stack, of its chunks."""
    first, end = (0, shape[0] if shape else 1) if layer is None else (layer, layer + 1)
    whole: Tensor | None = None
    missing = torch.Size(shape).numel() // (1 if layer is None else shape[0])
    for offset, size in boxes:
        if offset and not (offset[0] < end and first < offset[0] + size[0]):
            continue
        place = places[key, offset]
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            tensor = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True).view(size)
        if layer is not None:
            tensor, offset = tensor[layer - offset[0]], offset[1:]
        whole = tensor.new_empty(shape if layer is None else shape[1:]) if whole is None else whole
        whole[tuple(slice(start, start + length) for start, length in zip(offset, tensor.shape, strict=True))] = tensor
        missing -= tensor.numel()
    if whole is None or missing:
        raise DataError(Problem(f"{key}: {missing:,} numbers are missing in {folder}", remedy="copy every file"))
    return whole

"""Checkpoints of the real megatron-core: what it saves is continued here, and what is exported here is loaded there.

docs/orders.md says how to run this.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from bloomery.checkpoint.load import load_model, read_checkpoint
from conftest import Workshop
from megatron_checkpoints import arguments
from test_import_checkpoint import go_on, trained

REASON = "needs the package megatron-core (pip install --no-deps megatron-core==0.16.1), see docs/orders.md"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    saving = pytest.importorskip("megatron.core.dist_checkpointing", reason=REASON)
    optimizers = pytest.importorskip("megatron.core.dist_checkpointing.optimizer", reason=REASON)
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation", reason=REASON)
    state = pytest.importorskip("megatron.core.parallel_state", reason=REASON)
    models = pytest.importorskip("megatron.core.models.gpt", reason=REASON)
    specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs", reason=REASON)
    configs = pytest.importorskip("megatron.core.transformer.transformer_config", reason=REASON)


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """megatron-core in this process. To save, it waits for a CUDA device, and measures memory with psutil."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr("megatron.core.dist_checkpointing.strategies.filesystem_async._process_memory", lambda: 0)
    monkeypatch.setattr(
        "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork", lambda *_, **__: contextlib.nullcontext()
    )
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    state.initialize_model_parallel()
    yield
    state.destroy_model_parallel()
    dist.destroy_process_group()


def their_model(family: str, config: Any) -> Any:
    gated = family == "llama"
    made = configs.TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads, ffn_hidden_size=config.ffn_hidden_size, use_cpu_initialization=True,
        normalization="RMSNorm" if gated else "LayerNorm", gated_linear_unit=gated, add_bias_linear=not gated,
        activation_func=F.silu if gated else lambda x: F.gelu(x, approximate="tanh"),
        hidden_dropout=0.0, attention_dropout=0.0, layernorm_epsilon=config.norm_eps, bias_activation_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    positions = {"position_embedding_type": "rope"} if gated else {}
    spec = specs.get_gpt_layer_local_spec(normalization=made.normalization)
    return models.GPTModel(
        made, spec, vocab_size=config.vocab_size, max_sequence_length=config.seq_length,
        share_embeddings_and_output_weights=not gated, **positions,
    ).eval()  # fmt: skip


def their_names(config: Any) -> dict[str, tuple[str, ...]]:
    """Names of megatron-core -> ours; two are joined."""
    names: dict[str, tuple[str, ...]] = {"embedding.word_embeddings": ("embed.tokens",), "output_layer": ("head",)}
    names |= {"embedding.position_embeddings": ("embed.positions",), "decoder.final_layernorm": ("final_norm",)}
    for n in range(config.num_layers):
        up = ("mlp.gate", "mlp.up") if config.family == "llama" else ("mlp.up",)
        inner = {"input_layernorm": ("attention_norm",), "self_attention.linear_qkv": ("attention.qkv",),
                 "self_attention.linear_proj": ("attention.out",), "pre_mlp_layernorm": ("mlp_norm",),
                 "mlp.linear_fc1": up, "mlp.linear_fc2": ("mlp.down",)}  # fmt: skip
        names |= {f"decoder.layers.{n}.{a}": tuple(f"layers.{n}.{each}" for each in ours) for a, ours in inner.items()}
    return names


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.usefixtures("one_rank")
def test_what_megatron_core_saves_is_continued(family: str, workshop: Workshop, command: Any) -> None:
    config, tensors, losses = trained(workshop, family, "megatron")
    model, names = their_model(family, config), their_names(config)
    adam = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, part = name.rpartition(".")
            ours = [f"{each}.{part}" for each in names[module]]
            parameter.copy_(torch.cat([tensors[f"model.{each}"] for each in ours]))
            adam.state[parameter] = {
                moment: torch.cat([tensors[f"optim.{each}.{moment}"] for each in ours])
                for moment in ("exp_avg", "exp_avg_sq")
            } | {"step": torch.tensor(3.0)}
    sharded, saved = model.sharded_state_dict(), adam.state_dict()
    numbers = optimizers.get_param_id_to_sharded_param_map(sharded, model.parameters())
    optimizers.optim_state_to_sharding_state(saved, numbers, exclude_keys=("step",))
    saved["state"]["common_step"] = 3
    folder = workshop.folder / "theirs" / "iter_0000003"
    folder.mkdir(parents=True)
    common = {
        "args": arguments(config),
        "iteration": 3,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"num_steps": 24},
    }
    saving.save({"model": sharded, "optimizer": saved, **common}, str(folder))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    out, continued = go_on(workshop, command, folder.parent)
    assert continued == losses[3:]
    first = load_model(read_checkpoint(out / "checkpoints/step-00000003"), device=torch.device("cpu"))
    tokens = torch.arange(config.seq_length)[None]
    mask = torch.ones(1, 1, config.seq_length, config.seq_length).triu(1).bool()
    with torch.no_grad():
        assert torch.allclose(model(tokens, tokens, mask), first(tokens), atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.usefixtures("one_rank")
def test_what_is_exported_is_loaded_by_megatron_core(family: str, workshop: Workshop, command: Any) -> None:
    config, tensors, _ = trained(workshop, family, "megatron")
    code, _, err = command("export", "step3", "theirs", "--format", "megatron")
    assert code == 0, err
    model, names = their_model(family, config), their_names(config)
    adam = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        adam.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    sharded, wanted = model.sharded_state_dict(), adam.state_dict()
    numbers = optimizers.get_param_id_to_sharded_param_map(sharded, model.parameters())
    optimizers.optim_state_to_sharding_state(wanted, numbers)
    strict = validation.StrictHandling.LOG_ALL  # states of modules that megatron-core saves are not weights
    loaded = saving.load({"model": sharded, "optimizer": wanted}, "theirs/iter_0000003", strict=strict)
    model.load_state_dict(loaded["model"], strict=False)
    assert (loaded["iteration"], loaded["args"].consumed_train_samples) == (3, 24)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        module, _, part = name.rpartition(".")
        ours = [f"{each}.{part}" for each in names[module]]
        assert torch.equal(parameter, torch.cat([tensors[f"model.{each}"] for each in ours])), name
        for moment in ("exp_avg", "exp_avg_sq"):
            joined = torch.cat([tensors[f"optim.{each}.{moment}"] for each in ours])
            assert torch.equal(loaded["optimizer"]["state"][number][moment], joined), (name, moment)

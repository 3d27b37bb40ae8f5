"""Tokens per second of the real training loop on one device, against transformers + torch.compile in the same run.

    python benchmarks/throughput.py --models gpt-1.3b bloom-1.3b --batches 16 24 --peer-batches 8 16

Every figure comes from a process of its own, so that none inherits another's memory. Ours is `bloomery train` on random
shards: loader, loss, clipping, AdamW, metrics and all. MFU = tokens/s * (6N + 12Lhs) / peak of the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bloomery.base.accelerator import device_name, memory_bytes, pick_device
from bloomery.config.recipe import ModelSection
from bloomery.data.shards import ShardWriter
from bloomery.families.registry import FAMILIES
from bloomery.sizing.check import load_checked_recipe
from bloomery.sizing.flops import FlopCount, flops_per_token, peak_flops

LOG_EVERY = 5
WRAPPED = str(Path(__file__).with_name("wrapped_rank.py"))
OURS = {
    "bloomery train": ["-m", "bloomery"],
    "one rank by torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "bloomery"],
    "one rank, FSDP2": [WRAPPED, "data"],
    "one rank, FSDP2, TP, CP": [WRAPPED, "all"],
}
"""Ways to run the same training on one device."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["gpt-1.3b", "bloom-1.3b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[16], help="our micro-batch sizes")
    parser.add_argument("--peer-batches", nargs="*", type=int, default=[8, 16], help="transformers' batch sizes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--work-dir", type=Path, default=None, help="for shards and checkpoints; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--override", action="append", default=[], help="of the recipe, for both sides")
    parser.add_argument("--wrapped", action="store_true", help="also as the one rank of a group, wrapped and unwrapped")
    parser.add_argument("--peer", metavar="MODEL:BATCH", help="internal: measure the peer in this process")
    args = parser.parse_args()
    if args.peer:
        name, batch = args.peer.rsplit(":", 1)
        print(json.dumps(measure_peer(name, int(batch), args.steps, args.override)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        for name in args.models:
            for batch in args.batches:
                for who in OURS if args.wrapped else ["bloomery train"]:
                    rows.append(measure_ours(name, batch, args.steps, Path(folder), args.override, who))
                    print(describe(rows[-1]), flush=True)
            for batch in args.peer_batches:
                command = [sys.executable, __file__, "--peer", f"{name}:{batch}", "--steps", str(args.steps)]
                command += [word for text in args.override for word in ("--override", text)]
                done = subprocess.run(command, capture_output=True, text=True)
                last = done.stderr.strip().splitlines()[-1:] or ["no output"]
                row = {"model": name, "who": "transformers + compile", "batch": batch, "failed": last[0][:160]}
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else row)
                print(describe(rows[-1]), flush=True)
    print(summary(rows, args.models))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


def measure_ours(name: str, batch: int, steps: int, folder: Path, overrides: list[str], who: str) -> dict[str, object]:
    """`bloomery train` for some steps; figures from its metrics.jsonl, the first half left out as warm-up."""
    model = load_checked_recipe(name, overrides).recipe.model
    shard, run = folder / f"random-{model.vocab_size}", folder / f"{name}-{batch}"
    words = random_data(shard, model)
    command = [sys.executable, *OURS[who], "train", name, *overrides, "--run-dir", str(run), "--quiet"]
    command += [*words, "data={train: [{path: '" + str(shard) + "'}]}", "train.evaluate=null", "launch=null"]
    command += [f"batch={{micro_batch_size: {batch}, global_batch_size: {batch}}}", f"train.exit_after={steps} steps"]
    command += ["train.for=1000000 steps", "lr.decay=null"]
    command += [
        f"monitor={{log_every: {LOG_EVERY} steps, tensorboard: false}}",
        "checkpoint.phases=[{every: 10000000 steps}]",
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    row: dict[str, object] = {"model": name, "who": who, "batch": batch}
    if done.returncode:
        return {**row, "failed": done.stderr.strip().splitlines()[-1][:300]}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = [record for record in records if record["kind"] == "step"][len(records) // 2 :]
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return {
        **row,
        **figures(model, statistics.median(record["tokens_per_second"] for record in steady)),
        "peak_gb": steady[-1]["peak_memory_bytes"] / 1e9,
        "loss": steady[-1]["losses"]["lm loss"],
        "wall_s": time.monotonic() - started,
    }


def random_data(shard: Path, model: ModelSection) -> list[str]:
    """A shard of random documents, for an encoder of sentences and with a tokenizer; the overrides that go with it."""
    encoder, tokenizer = FAMILIES[model.family].encoder, shard.with_suffix(".words")
    if not shard.with_suffix(".bin").exists():
        random = np.random.default_rng(0)
        lengths = np.array([32] * 128 if encoder else [4096], "<i4")
        with ShardWriter(str(shard), "uint16") as writer:
            for _ in range(2000):
                tokens = random.integers(5 if encoder else 0, model.vocab_size, 4096).astype("<u2")
                writer.append_many(tokens.tobytes(), lengths, np.array([len(lengths)], "<i4"))
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer.mkdir()
        (tokenizer / "vocab.txt").write_text("\n".join([*special, *(f"w{i}" for i in range(5, model.vocab_size))]))
    return [f"tokenizer.path={tokenizer}"] if encoder else ["tokenizer=null", "prepare=[]"]


def measure_peer(name: str, batch: int, steps: int, overrides: list[str]) -> dict[str, object]:
    """transformers' model of the same shape: autocast bf16, whole-model compile, fused AdamW, clipping at 1.0."""
    model_section = load_checked_recipe(name, overrides).recipe.model
    device = pick_device()
    torch.manual_seed(0)
    model = peer_model(model_section, device).train()
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (8, batch, model_section.seq_length)
    tokens = torch.randint(model_section.vocab_size, shape, device=device)
    batches = [{"input_ids": each, "labels": each, "use_cache": False} for each in tokens]
    if FAMILIES[model_section.family].encoder:
        labels = tokens.masked_fill(torch.rand(shape, device=device) > 0.15, -100)
        order, ones = torch.randint(2, shape[:2], device=device), torch.ones_like(tokens[0])
        batches = [
            {"input_ids": a, "labels": b, "next_sentence_label": c, "attention_mask": ones, "token_type_ids": ones}
            for a, b, c in zip(tokens, labels, order, strict=True)
        ]
    seconds = []
    for step in range(steps):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        started = time.monotonic()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(**batches[step % 8]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.monotonic() - started)
    step_seconds = statistics.median(seconds[steps // 2 :])
    return {
        "model": name,
        "who": "transformers + compile",
        "batch": batch,
        **figures(model_section, batch * model_section.seq_length / step_seconds),
        "peak_gb": memory_bytes(device)[1] / 1e9,
        "loss": loss.item(),
    }


def peer_model(section: ModelSection, device: torch.device) -> torch.nn.Module:
    """transformers' model of the same shape."""
    import transformers

    if section.family == "bert":
        config = transformers.BertConfig(
            vocab_size=section.vocab_size,
            hidden_size=section.hidden_size,
            num_hidden_layers=section.num_layers,
            num_attention_heads=section.num_heads,
            intermediate_size=section.ffn_hidden_size,
            max_position_embeddings=section.seq_length,
            hidden_dropout_prob=section.dropout,
            attention_probs_dropout_prob=section.dropout,
        )
        make = transformers.BertForPreTraining
    elif section.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=section.vocab_size,
            n_positions=section.seq_length,
            n_embd=section.hidden_size,
            n_layer=section.num_layers,
            n_head=section.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        make = transformers.GPT2LMHeadModel
    else:
        config = transformers.BloomConfig(
            vocab_size=section.vocab_size,
            hidden_size=section.hidden_size,
            n_layer=section.num_layers,
            n_head=section.num_heads,
            use_cache=False,
        )
        make = transformers.BloomForCausalLM
    with device:
        return make(config)


def figures(model: ModelSection, tokens_per_second: float) -> dict[str, object]:
    name = device_name(pick_device())
    peak = peak_flops(name, "bf16")
    flops = flops_per_token(model, FlopCount.SIX_N_12LHS)
    return {
        "device": name,
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * flops / peak if peak else None,
    }


def describe(row: dict[str, object]) -> str:
    head = f"{row['model']:<12} {row['who']:<24} batch {row['batch']:>3}: "
    if "failed" in row:
        return f"{head}failed: {row['failed']}"
    mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return f"{head}{row['tokens_per_second']:>9,.0f} tokens/s  MFU {mfu} (6N + 12Lhs)  peak {row['peak_gb']:.1f} GB"


def summary(rows: list[dict[str, object]], models: list[str]) -> str:
    lines = []
    for name in models:
        best = {}
        for row in rows:
            if row["model"] == name and "failed" not in row:
                speed = float(str(row["tokens_per_second"]))
                best[row["who"]] = max(best.get(row["who"], 0.0), speed)
        ours, peer = best.get("bloomery train"), best.get("transformers + compile")
        if ours and peer:
            lines.append(
                f"{name}: {ours:,.0f} tokens/s, {ours / peer:.2f}x transformers + compile at its best batch size"
            )
        for who in list(OURS)[1:]:
            if ours and who in best:
                lines.append(f"{name}: {who} {best[who] / ours:.3f}x of bloomery train alone")
    return "\n".join(lines) or "nothing to compare"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()

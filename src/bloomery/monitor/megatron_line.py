"""The log lines of Megatron-DeepSpeed (requirements 10.1), so that existing parsers read our main_log.txt."""

from __future__ import annotations

from bloomery.monitor.record import StepRecord, ValidationRecord, perplexity_of


def iteration_line(record: StepRecord) -> str:
    """One leading space; every field ends with ` |`."""
    fields = [
        f"iteration {record.step:8d}/{record.train_steps:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"consumed tokens: {record.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {record.seconds_per_step:.2f}",
        f"learning rate: {record.lr:.3E}",
        f"global batch size: {record.global_batch:5d}",
    ]
    # The reference prints a loss only if it is > 0, so that a NaN vanishes from the log. Ours is always there.
    fields += [f"{name}: {value:.6E}" for name, value in record.losses.items()]
    if record.loss_scale is not None:
        fields.append(f"loss scale: {record.loss_scale:.1f}")
    fields.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        fields.append(f"num zeros: {record.num_zeros:.1f}")
    fields += [
        f"number of skipped iterations: {record.skipped_steps:3d}",
        f"number of nan iterations: {record.nan_steps:3d}",
        f"samples per second: {record.samples_per_second:.3f}",
        f"TFLOPs: {record.tflops:.2f}",
    ]
    return "".join(f" {field} |" for field in fields)


def validation_box(record: ValidationRecord) -> list[str]:
    """The result between two rules of dashes, one longer than it, as in the reference."""
    line = f" {record.group} loss at iteration {record.step} | "
    for name, loss in record.losses.items():
        line += f"{name} value: {loss:.6E} | {name} PPL: {perplexity_of(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]

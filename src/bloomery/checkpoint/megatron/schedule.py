"""Megatron's flags of the learning rate, of the length of a training and of what happens on the way."""

from __future__ import annotations

from bloomery.base.units import LONGEST_SECONDS
from bloomery.checkpoint.megatron.builder import Builder
from bloomery.checkpoint.megatron.splits import split_flags

_BIGSCIENCE = (
    "tokenizer-name-or-path", "pad-vocab-size-to", "codecarbon-dir", "skip-train-iteration-range",
    *split_flags("train"),
)  # fmt: skip
"""Flags that only BigScience's Megatron-DeepSpeed has."""


def fill_lr(b: Builder) -> None:
    if b.given("lr") is None:
        b.problem(None, "--lr is missing", "a training needs a learning rate", "add --lr 1e-4")
    b.put("lr.peak", b.value("lr", float, 1.0), "lr")
    style = b.value("lr-decay-style", str, "linear").lower()
    if style not in ("constant", "linear", "cosine", "wsd"):
        rule = "a recipe has constant, linear, cosine or wsd"
        b.problem(b.given("lr-decay-style"), f"--lr-decay-style is {style}", rule, "use one of them")
        style = "linear"
    b.put("lr.schedule", style, "lr-decay-style")
    if style == "constant":
        for flag in ("min-lr", "lr-decay-tokens", "lr-decay-samples", "lr-decay-iters"):
            if b.has(flag):
                b.tell("not needed", flag, "a constant rate does not read it")
    else:
        b.put("lr.min", b.value("min-lr", float, 0.0), "min-lr")
        _decay(b)
    _warmup(b, style)
    if style == "wsd":
        _cooldown(b)


def _decay(b: Builder) -> None:
    amount, unit, flag = _decay_amount(b)
    if b.given("lr-decay-tokens") is not None:
        if flag:
            b.tell("not needed", flag, "--lr-decay-tokens overrules it")
        amount, unit, flag = b.value("lr-decay-tokens", int, 1), "tokens", "lr-decay-tokens"
    remark = "" if flag else "Megatron's default: the length of the training"
    b.put("lr.decay", f"{amount} {unit}", *([flag] if flag else []), remark=remark)


def _decay_amount(b: Builder) -> tuple[int, str, str]:
    """(amount, unit, flag) in samples or steps: what the flags say, else the length of the training."""
    for flag, unit in (("lr-decay-samples", "samples"), ("lr-decay-iters", "steps")):
        if b.given(flag) is not None:
            return b.value(flag, int, 1), unit, flag
    for flag, unit in (("train-samples", "samples"), ("train-iters", "steps"), ("train-tokens", "tokens")):
        if b.given(flag) is not None:
            return b.value(flag, int, 1), unit, ""
    return 1, "steps", ""


def _warmup(b: Builder, style: str) -> None:
    names = ("lr-warmup-tokens", "lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    flags = [name for name in names if b.has(name)]
    flags = [name for name in flags if b.value(name, float, 0.0) != 0] or flags[:1]
    if flags[1:] and flags[0] == "lr-warmup-tokens":
        for name in flags[1:]:
            b.tell("not needed", name, "--lr-warmup-tokens overrules it")
    elif len(flags) > 1:
        both = " and ".join(f"--{name}" for name in flags)
        b.problem(b.given(flags[1]), f"{both} are both set", "there is one warm-up", "remove one")
    if not flags:
        b.put("lr.warmup", "0 samples")
    elif flags[0] == "lr-warmup-fraction":
        _warmup_fraction(b)
    elif flags[0] == "lr-warmup-tokens":
        jumps = style != "constant" and not b.has("lr-decay-tokens")
        remark = "the decay begins with its end; in Megatron, without --lr-decay-tokens, as if there were no warm-up"
        text = f"{b.value(flags[0], int, 0)} tokens"
        b.put("lr.warmup", text, flags[0], kind="differs" if jumps else "mapped", remark=remark if jumps else "")
    else:
        kind = "samples" if flags[0].endswith("samples") else "steps"
        b.put("lr.warmup", f"{b.value(flags[0], int, 0)} {kind}", flags[0])


def _warmup_fraction(b: Builder) -> None:
    decay, unit, _ = _decay_amount(b)
    share = b.value("lr-warmup-fraction", float, 0.0)
    if not 0 <= share < 1:
        rule = "it is the part of the decay that is warm-up: at least 0, less than 1"
        b.problem(b.given("lr-warmup-fraction"), f"--lr-warmup-fraction is {share:g}", rule, "use for example 0.01")
        return
    count = round(share * decay, 6)
    if count != int(count):  # Megatron counts samples, so a fraction of a step is exact in samples
        count, unit = count * (b.raw["batch"]["global_batch_size"] if unit == "steps" else 1), "samples"
    b.put("lr.warmup", f"{int(count)} {unit}", "lr-warmup-fraction", remark=f"{share:g} of the decay")


def _cooldown(b: Builder) -> None:
    shape = b.value("lr-wsd-decay-style", str, "exponential")
    if shape != "linear":
        what = f"--lr-wsd-decay-style is {shape}"
        b.problem(b.given("lr-wsd-decay-style"), what, "it is linear here", "use --lr-wsd-decay-style linear")
    flag = b.first("lr-wsd-decay-iters", "lr-wsd-decay-samples")
    b.put("lr.cooldown", f"{b.value(flag, int, 0)} {'steps' if flag.endswith('iters') else 'samples'}", flag)


def fill_train(b: Builder, has_validation: bool) -> None:
    _length(b)
    _exit(b)
    skips, single = b.given("skip-train-iteration-range"), b.given("iterations-to-skip")
    if skips:
        b.put("train.skip", [f"{text} steps" for text in skips.values], "skip-train-iteration-range")
    elif single:
        steps = sorted({b.convert(single, text, int, 0) + 1 for text in single.values})
        remark = "Megatron counts them from 0, a recipe from 1"
        b.put("train.skip", [f"{step}-{step} steps" for step in steps], "iterations-to-skip", remark=remark)
    every, steps_each = b.value("eval-interval", int, 1000), b.value("eval-iters", int, 100)
    if steps_each and has_validation:
        b.put("train.evaluate", {"every": f"{every} steps", "steps": steps_each}, "eval-interval", "eval-iters")
    else:
        for name in ("eval-interval", "eval-iters"):
            if b.has(name):
                b.tell("left out", name, "there is nothing to evaluate" if steps_each else "0 turns it off")


def _length(b: Builder) -> None:
    samples, iters, tokens = (b.given(name) for name in ("train-samples", "train-iters", "train-tokens"))
    if samples and iters:
        what = f"--train-samples is {samples.text} and --train-iters is {iters.text}"
        b.problem(iters, what, "Megatron takes one of them", "remove one")
    elif not samples and not iters and not tokens:
        b.problem(None, "--train-samples is missing", "a training has a length", "add --train-samples or --train-iters")
    if iters and b.given("rampup-batch-size"):
        b.problem(iters, "--train-iters with --rampup-batch-size", "Megatron forbids it", "use --train-samples")
    flag, unit = ("train-samples", "samples") if samples else ("train-iters", "steps")
    count = b.value(flag, int, 1)
    if tokens and _ends_by_tokens(b, flag, count if samples or iters else None):
        remark = "it ends with whichever comes first; the step that would pass it is not taken"
        b.put("train.for", f"{b.value('train-tokens', int, 1)} tokens", "train-tokens", remark=remark)
    else:
        b.put("train.for", f"{count} {unit}", flag)


def _ends_by_tokens(b: Builder, flag: str, count: int | None) -> bool:
    """Whether --train-tokens ends the training before `count` samples or steps (None: there are none) do."""
    mark = next((name for name in _BIGSCIENCE if b.has(name)), "")
    if count is None:
        return True
    if mark:
        why = f"BigScience's Megatron-DeepSpeed, which has --{mark}, reads it and never uses it"
        b.tell("not needed", "train-tokens", why)
        return False
    samples = count * (b.raw["batch"]["global_batch_size"] if flag == "train-iters" else 1)
    if b.value("train-tokens", int, 1) >= samples * b.raw["model"]["seq_length"]:
        b.tell("not needed", "train-tokens", f"it ends with whichever comes first, which is --{flag}")
        return False
    b.tell("not needed", flag, "it ends with whichever comes first, which is --train-tokens")
    return True


def _exit(b: Builder) -> None:
    minutes, interval = b.value("exit-duration-in-mins", int, 0), b.value("exit-interval", int, 0)
    if minutes < 0:
        what = f"--exit-duration-in-mins is {minutes}"
        b.problem(b.given("exit-duration-in-mins"), what, "a job lasts some minutes", "remove it, or use 1190")
    elif minutes * 60 > LONGEST_SECONDS:
        remark = f"{minutes / 60 / 24 / 365:.0f} years are never, so there is no limit"
        b.tell("mapped", "exit-duration-in-mins", remark, path="train.exit_after", result="null")
    elif minutes:
        hours, rest = divmod(minutes, 60)
        text = (f"{hours}h" if hours else "") + (f"{rest}m" if rest or not hours else "")
        b.put("train.exit_after", text, "exit-duration-in-mins")
        if interval:
            b.tell("left out", "exit-interval", "a job ends by one rule: the wall clock")
        return
    elif b.has("exit-duration-in-mins"):
        b.tell("not needed", "exit-duration-in-mins", "0 turns it off")
    if interval:
        remark = "Megatron ends a job at every multiple of it, ours after that many steps of the job"
        b.put("train.exit_after", f"{interval} steps", "exit-interval", kind="differs", remark=remark)
    elif b.has("exit-interval"):
        b.tell("not needed", "exit-interval", "0 turns it off")

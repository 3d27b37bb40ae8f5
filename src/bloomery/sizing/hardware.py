"""Peak arithmetic of accelerators, from their data sheets: dense, by the name that torch reports."""

from __future__ import annotations

import re

_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # Names are matched whole: a laptop part, a MIG slice or an unlisted variant has another peak.
    (r"(Tesla|NVIDIA) V100-SXM[23]-\d+GB", {"fp16": 125}),
    (r"(Tesla|NVIDIA) V100-PCIE-\d+GB", {"fp16": 112}),
    (r"(NVIDIA )?A100-(SXM4|SXM|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", {"fp16": 312, "bf16": 312}),
    (r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM5? ?\d*(GB)?", {"fp16": 989, "bf16": 989, "fp8": 1979}),
    (r"NVIDIA H100 PCIe", {"fp16": 756, "bf16": 756, "fp8": 1513}),
    (r"NVIDIA (H100|H200) NVL", {"fp16": 835, "bf16": 835, "fp8": 1671}),
    (r"NVIDIA H200|NVIDIA GH200 \d+GB", {"fp16": 989, "bf16": 989, "fp8": 1979}),
    (r"NVIDIA B200", {"fp16": 2250, "bf16": 2250, "fp8": 4500}),
    (r"NVIDIA A10G", {"fp16": 70, "bf16": 70}),
    (r"NVIDIA L4", {"fp16": 121, "bf16": 121, "fp8": 242}),
    (r"NVIDIA L40S", {"fp16": 362, "bf16": 362, "fp8": 733}),
    # With fp32 accumulation, which is what training uses; the data sheet's headline figure accumulates in fp16.
    (r"NVIDIA GeForce RTX 4090", {"fp16": 165.2, "bf16": 165.2, "fp8": 330.3}),
    # A card is two devices to torch; this is one of them.
    (r"AMD Instinct MI250X", {"fp16": 191.5, "bf16": 191.5}),
    (r"AMD Instinct MI300X", {"fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}),
    (r"GAUDI2", {"bf16": 432, "fp8": 865}),
    (r"GAUDI3", {"bf16": 1835, "fp8": 1835}),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s without sparsity of one device at a recipe's precision, or None where we do not know: never a guess.

    There is none for fp32, because it depends on whether TF32 is allowed.
    """
    for pattern, peaks in _PEAK_TFLOPS:
        if re.fullmatch(pattern, device_name.strip(), flags=re.IGNORECASE):
            tflops = peaks.get(precision)
            return None if tflops is None else tflops * 1e12
    return None

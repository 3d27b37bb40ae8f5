"""The notebooks of examples/ run from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_goes_from_text_to_samples_and_plots(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "notebooks are kept without outputs"
            exec(compile("".join(cell["source"]), f"{notebook.name}", "exec"), names)
    losses = names["run"].metrics["lm loss"]
    assert losses[-1] < losses[0] - 0.5
    assert len(set(names["samples"])) == 3
    assert (tmp_path / "curves.png").stat().st_size > 10_000

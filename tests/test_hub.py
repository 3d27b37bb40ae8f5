"""Names of the Hub in the place of folders: `hf://org/name`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from export_samples import CASES, checkpoint_of, small_tokenizer

SCRIPT = """
import time
from huggingface_hub import HfApi
from bloomery.cli.main import main
from bloomery.data.tokenizer import Tokenizer
api = HfApi()
for attempt in range(100):
    try:
        api.create_repo("org/model", exist_ok=True)
        break
    except Exception:
        time.sleep(0.2)
api.upload_folder(repo_id="org/model", folder_path="hf")
assert main(["init", "--from", "hf://org/model", "--name", "tuned"]) == 0
assert main(["import", "hf", "hf://org/model@main", "run", "--no-proof"]) == 0
right = Tokenizer.load("hf").content_hash
assert Tokenizer.load("hf://org/model").content_hash == right
assert main(["init", "--from", "hf://org/none"]) == 3
"""


def test_a_model_of_the_hub_in_every_place_where_a_folder_may_stand(tmp_path: Path, hub: str, command: object) -> None:
    (tmp_path / "tok").mkdir()
    checkpoint = checkpoint_of(CASES["gpt2"], tmp_path / "gpt2", small_tokenizer(tmp_path / "tok"))
    assert command("export", str(checkpoint), str(tmp_path / "hf"), "--no-proof")[0] == 0  # type: ignore[operator]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "from: hf://org/model" in (tmp_path / "tuned.yaml").read_text()
    assert (tmp_path / "run" / "checkpoints" / "latest").is_file()
    assert "hf://org/none cannot be downloaded: " in done.stderr
    assert "Traceback" not in done.stderr

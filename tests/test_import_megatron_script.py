"""Scripts of `bloomery import megatron`: run under bash with stubs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bloomery.base.errors import RecipeError
from bloomery.interop.megatron import script as runner
from bloomery.interop.megatron.importer import import_megatron
from megatron_scripts import SMALL, field_of, row_of, script

# ---------------------------------------------------------------- the stubs under which a script runs

HARMFUL = """set -euo pipefail
rm -rf ROOT/victim; /bin/rm -rf ROOT/victim; command rm -rf ROOT/victim; $(echo /bin/rm) -rf ROOT/victim
export PATH=/usr/bin:/bin; rm -rf ROOT/victim; touch ROOT/touched; /usr/bin/env touch ROOT/touched
X=/bin/sh; $X -c 'rm -rf ROOT/victim; /usr/bin/touch ROOT/touched' || true
echo gone > ROOT/victim; cat <<EOT > ROOT/victim
gone
EOT
cd ROOT; echo gone > victim; kill -9 $PPID; module load x; conda activate y; source /nowhere/z; cd /nowhere; unset PATH
python3 -c 'open("ROOT/touched", "w")'; (exec /usr/bin/touch ROOT/touched)
exec torchrun --nproc_per_node 4 pretrain_gpt.py FLAGS --seed 7 > /nowhere/at/all.log 2>&1
"""


def test_a_script_starts_no_program_and_writes_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("here")
    (tmp_path / "in").mkdir()
    done = script(tmp_path / "in", HARMFUL.replace("ROOT", str(tmp_path)))
    assert done.recipe.seed == 7
    assert (tmp_path / "victim").read_text() == "here"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "victim"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["script.slurm"]


JOB = """
$schema: https://azuremlschemas.azureedge.net/latest/commandJob.schema.json
type: command
display_name: bloom-25b
command: >-
  mkdir -p ${{outputs.output}} &&
  python -m torch.distributed.run pretrain_gpt.py FLAGS --seed $SEED --data-path ${{inputs.shards}}/text
environment_variables: {SEED: 7}
distribution: {type: pytorch, process_count_per_instance: 8}
resources: {instance_count: 2}
"""


def test_the_flags_in_a_job_of_azureml(tmp_path: Path) -> None:
    path = tmp_path / "job.yml"
    path.write_text(JOB.replace("FLAGS", " ".join(SMALL)))
    done = import_megatron([], script=path)
    assert (done.recipe.name, done.recipe.seed) == ("bloom-25b", 7)
    assert "inputs_shards" in row_of(done, "--data-path").remark
    done = import_megatron([], script=path, given={"inputs_shards": "shards"})
    assert done.raw["data"]["train"] == [{"path": "shards/text"}]
    for text in ("command: [", "name: x\n", "- a\n"):
        path.write_text(text)
        with pytest.raises(RecipeError, match="is no job"):
            import_megatron([], script=path)


def test_a_script_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_SECONDS", 1)
    began = time.monotonic()
    done = script(
        tmp_path, "pretrain_gpt.py FLAGS --seed 7 &\n(while :; do :; done) &\nwhile :; do echo x >> out; done\n"
    )
    assert done.recipe.seed == 7
    assert "was ended after 1 s" in str(done.warnings[-1])
    assert time.monotonic() - began < 8
    with pytest.raises(RecipeError, match="there is no training in this script"):
        script(tmp_path, 'f() { f | f & }\nX=\'eval "$X"\'\neval "$X"\n')


@pytest.mark.parametrize(
    "start",
    [
        "srun -N 2 --label bash -c 'cd x && torchrun {}'",
        "bash -lc \"python -m torch.distributed.run {}\"",
        "/usr/bin/bash -c '/opt/conda/bin/python {}'",
        "mpirun -np 8 singularity exec --nv x.sif python3 {}",
        "deepspeed --hostfile h --no_python /usr/bin/bash -c \"exec python {}\"",
        "PY=/opt/py/bin/python; OMP_NUM_THREADS=1 $PY -u {} 2>&1 | tee -a /logs/x.log",
        "CMD='accelerate launch {}'; echo $CMD; eval $CMD &> /nowhere/log & wait",
        "sbatch <<EOT\n#!/bin/bash\nsrun {}\nEOT",
        "sbatch --wrap='python {}'",
        "for i in 0; do case $i in 0) run() {{ python \"$@\"; }};; esac; done; run {}",
        "chmod +x inner.sh; echo 'python {}' > inner.sh; srun ./inner.sh",
        "until nc -z h 1; do sleep 9; done; if command -v nvidia-smi; then nohup python {} & fi",
    ],
)  # fmt: skip
def test_the_program_is_reached_through_launchers_and_shells(tmp_path: Path, start: str) -> None:
    text = start.format("pretrain_gpt.py FLAGS --seed ${SEED:-7}")
    assert script(tmp_path, text).recipe.seed == 7


def test_values_that_only_the_machine_knows_stay_as_they_are_written(tmp_path: Path) -> None:
    text = "pretrain_gpt.py FLAGS --data-path /blob/$(whoami)/$ROOT/a --vocab-file $2/v.json --split 9,1,0\n"
    done = script(tmp_path, text)
    assert field_of(done, "data.train") == [{"path": "/blob/$(whoami)/$ROOT/a"}]
    assert field_of(done, "tokenizer.path") == "$2"
    assert {row.flag for row in done.rows_of("left out")} >= {"--data-path", "--vocab-file"}
    assert any("--set ROOT" in str(warning) for warning in done.warnings)
    again = script(tmp_path, text, given={"ROOT": "r", "1": "", "2": "tok"})
    assert field_of(again, "tokenizer.path") == "tok"
    with pytest.raises(RecipeError, match=r"--seed is \$SEED. It has no value .*--set SEED=VALUE"):
        script(tmp_path, "pretrain_gpt.py FLAGS --seed $SEED\n")
    with pytest.raises(RecipeError, match=r"--seed is \$\(wc\). .* known only at run time. Add --seed VALUE"):
        script(tmp_path, "N=$(nvidia-smi -L | wc -l)\npretrain_gpt.py FLAGS --seed $N\n")
    with pytest.raises(
        RecipeError, match=r"\$X has no value. It may hold flags. Give it with --set X=VALUE, or --set X= "
    ):
        script(tmp_path, "pretrain_gpt.py FLAGS --fp16 $X\n")
    done = script(tmp_path, "pretrain_gpt.py FLAGS --fp16 stray $X --seed $SEED\n", "--seed", "5", given={"X": ""})
    assert done.recipe.seed == 5
    assert [str(warning) for warning in done.warnings] == ["'stray' belongs to no flag. It is ignored."]


def test_scripts_source_and_read_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("SEED=7\n")
    text = 'source ./env.sh\nX=$(cat env.sh)\npretrain_gpt.py FLAGS --seed $SEED --save "$(dirname $0)/$X"\n'
    done = script(tmp_path, text)
    assert (done.recipe.seed, row_of(done, "--save").value) == (7, "./SEED=7")


def test_a_script_of_arrays_with_data_that_only_the_machine_knows(tmp_path: Path) -> None:
    text = """#SBATCH --gpus-per-node=8
readarray -t TRAIN < <(find data -name '*.bin' | sort)
DIST=(--nproc_per_node "$SLURM_GPUS_PER_NODE" --nnodes "$SLURM_NNODES")
DATA=(--train-data-path "${TRAIN[@]}" --valid-data-path v --eval-interval 10 --eod-mask-loss)
srun torchrun "${DIST[@]}" pretrain_gpt.py FLAGS --global-batch-size 16 "${DATA[@]}" --fp16
"""
    done = script(tmp_path, text, given={"SLURM_NNODES": "1"})
    assert done.recipe.data is None
    assert {row.flag for row in done.rows_of("left out")} >= {"--train-data-path", "--eval-interval", "--eod-mask-loss"}


def test_two_different_trainings_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        script(tmp_path, "torchrun pretrain_gpt.py FLAGS --seed 1\ntorchrun pretrain_gpt.py FLAGS --seed 7\n")
    assert "lines 1 and 2 are different trainings" in str(caught.value)
    again = "torchrun pretrain_gpt.py FLAGS || torchrun pretrain_gpt.py FLAGS\npython tools/eval.py FLAGS --seed 9\n"
    assert script(tmp_path, again).recipe.seed == 1234
    for text in ("source x\nls\n", "exit 0\npretrain_gpt.py FLAGS\n", "if false; then pretrain_gpt.py FLAGS; fi\n"):
        with pytest.raises(RecipeError, match="there is no training in this script"):
            script(tmp_path, text)

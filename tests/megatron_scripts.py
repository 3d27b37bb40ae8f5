"""Launch scripts for the tests of `import megatron`: flags and values of published trainings and examples, in shell as
people write it there: variables in variables, long quoted strings, a ds_config in a here-document, all in `bash -c`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bloomery.config.load import as_dict, leaves, load_recipe
from bloomery.interop.megatron.flags import Row
from bloomery.interop.megatron.importer import Imported, import_megatron

_SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style cosine --vocab-size 512 --train-iters 100"
)
SMALL = _SMALL.split()


def script(folder: Path, text: str, *more: str, **options: Any) -> Imported:
    file = folder / "script.slurm"
    file.write_text(text.replace("FLAGS", " ".join(SMALL)))
    return import_megatron(more, script=file, **options)


def row_of(done: Imported, flag: str) -> Row:
    (row,) = (row for row in done.rows if row.flag == flag)
    return row


def field_of(done: Imported, path: str) -> Any:
    found: Any = done.raw
    for part in path.split("."):
        found = found[part]
    return found


def different_fields(imported: Imported, shipped: str) -> set[str]:
    """Fields that both have, with different values."""
    theirs = dict(leaves(as_dict(load_recipe(shipped).recipe)))
    return {path for path, value in leaves(imported.raw) if theirs.get(path) is not None and value != theirs[path]}


TR1 = r"""#!/bin/bash
#SBATCH --job-name=tr1-13B-round3
#SBATCH --constraint=v100-32g
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1          # one task a node
#SBATCH --gres=gpu:4
#SBATCH --time 20:00:00
#SBATCH --array=1-10%1
#SBATCH --output=%x-%j.out

set -x -e
source $six_ALL_CCFRWORK/start-tr1-13B

ROUND=3
TESTING=0
OUTPUT=$six_ALL_CCFRSCRATCH/checkpoints/tr1-13B
VOCAB_FILE=$six_ALL_CCFRWORK/gpt2/vocab.json
MERGE_FILE=$six_ALL_CCFRWORK/gpt2/merges.txt
if [[ ${TESTING} == 1 ]]; then
    DATA_PATH=shards/oscar-en-10k
else
    DATA_PATH=shards/oscar-en
fi
cd $six_ALL_CCFRWORK/code/Megatron-DeepSpeed
MASTER_ADDR=`scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1`

GPUS_PER_NODE=4
NNODES=$SLURM_NNODES
PP_SIZE=4
TP_SIZE=2
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=1024
NLAYERS=40
NHIDDEN=5120
NHEADS=32
SEQ_LEN=$((1024 * 2))

if   [[ ${ROUND} == 1 ]]; then SAVE_INTERVAL=10
elif [[ ${ROUND} == 2 ]]; then SAVE_INTERVAL=18
elif [[ ${ROUND} == 3 ]]; then SAVE_INTERVAL=1500
else echo "invalid ROUND: $ROUND"
fi

OPTIMIZER_ARGS=" \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.999 \
    --adam-eps 1e-8 \
    --lr 1e-4 \
    --min-lr 1e-5 \
    --lr-decay-style cosine \
    --lr-decay-samples 126_953_125 \
    --lr-warmup-samples 216_320 \
    --clip-grad 1.0 \
    --weight-decay 1e-1 \
    "
# 20 hours less 10 minutes
EXIT_OPTS="--exit-duration-in-mins 1190"

GPT_ARGS=" \
    --num-layers $NLAYERS \
    --hidden-size $NHIDDEN \
    --num-attention-heads $NHEADS \
    --seq-length $SEQ_LEN \
    --max-position-embeddings $SEQ_LEN \
    --micro-batch-size $MICRO_BATCH_SIZE \
    --rampup-batch-size 16 16 5_000_000 \
    --global-batch-size $GLOBAL_BATCH_SIZE \
    --train-samples 300_000_000 \
    --vocab-file $VOCAB_FILE \
    --merge-file $MERGE_FILE \
    --loss-scale 12 \
    --clip-grad 1.0 \
    --fp16 \
    --checkpoint-activations \
    --seed 42 \
    $OPTIMIZER_ARGS \
    $EXIT_OPTS \
    "
OUTPUT_ARGS=" \
    --log-interval 10 \
    --save-interval $SAVE_INTERVAL \
    --eval-interval ${EVAL_INTERVAL:-1000} \
    --eval-iters 5 \
    --codecarbon-dir $OUTPUT/codecarbon \
    --tensorboard-dir $OUTPUT/tensorboard \
    --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    "
ZERO_STAGE=1
config_json="./ds_config.$SLURM_JOBID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE,
  "train_batch_size": $GLOBAL_BATCH_SIZE,
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": $ZERO_STAGE},
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
           "initial_scale_power": 12},
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
EOT
DEEPSPEED_ARGS=" \
    --deepspeed \
    --deepspeed_config ${config_json} \
    --zero-stage ${ZERO_STAGE} \
    --deepspeed-activation-checkpointing \
    "
export LAUNCHER="python -u -m torch.distributed.launch \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --master_addr $MASTER_ADDR \
    --master_port 6000 \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE \
    --pipeline-model-parallel-size $PP_SIZE \
    $GPT_ARGS \
    $OUTPUT_ARGS \
    --save $OUTPUT/checkpoints \
    --load $OUTPUT/checkpoints \
    --data-path $DATA_PATH \
    --data-impl mmap \
    --split 949,50,1 \
    --distributed-backend nccl \
    $DEEPSPEED_ARGS \
    "
echo $CMD
clear; srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee -a $OUTPUT/main_log.txt
"""

TR11 = r"""#!/bin/bash
#SBATCH --job-name=tr11-176B-ml
#SBATCH --constraint=a100
#SBATCH --nodes=48
#SBATCH --gres=gpu:8
#SBATCH --time 100:00:00             # HH:MM:SS
#SBATCH --array=1-10%1

set -x -e
source $six_ALL_CCFRWORK/start-tr11-176B-ml
variant=main
OUTPUT=$six_ALL_CCFRSCRATCH/checkpoints/tr11-176B-ml
MEGATRON=$six_ALL_CCFRWORK/code/Megatron-DeepSpeed
python ratios.py --split train --output-meg-ds-ratio-file $MEGATRON/data/train-splits.txt
TOKENIZER=tokenizers/bloom
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
TP_SIZE=4
PP_SIZE=12
MICRO_BATCH_SIZE=2  # was 1 till 784
GLOBAL_BATCH_SIZE=2048
NHIDDEN=14336
NLAYERS=70
NHEADS=112
SEQ_LEN=2048
SAVE_INTERVAL=100
TRAIN_SAMPLES=220_000_000  # 450B tokens
LR_DECAY_SAMPLES=200_000_000
LR_WARMUP_SAMPLES=183_105  # 375M tokens

OPTIMIZER_ARGS=" \
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine \
    --lr-decay-samples $LR_DECAY_SAMPLES \
    --lr-warmup-samples $LR_WARMUP_SAMPLES \
    --clip-grad 1.0 --weight-decay 1e-1 \
    "
#    --exit-duration-in-mins 1190 \
EXIT_OPTS=" \
    --exit-duration-in-mins 5990 \
    "
GPT_ARGS=" \
    --pp-partition-method 'type:transformer|embedding' \
    --num-layers $NLAYERS \
    --hidden-size $NHIDDEN \
    --num-attention-heads $NHEADS \
    --seq-length $SEQ_LEN \
    --max-position-embeddings $SEQ_LEN \
    --micro-batch-size $MICRO_BATCH_SIZE \
    --rampup-batch-size 192 16 9_765_625 \
    --global-batch-size $GLOBAL_BATCH_SIZE \
    --train-samples $TRAIN_SAMPLES \
    --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path $TOKENIZER \
    --init-method-std 0.0048 \
    --embed-layernorm \
    --bf16 \
    --seed 42 \
    --position-embedding-type alibi \
    --checkpoint-activations \
    --abort-on-unmet-fused-kernel-constraints \
    --sync-tp-duplicated-parameters \
    --kill-switch-path $MEGATRON/kill-switch \
    --pad-vocab-size-to 250880 \
    $OPTIMIZER_ARGS \
    $EXIT_OPTS \
    "
OUTPUT_ARGS=" \
    --log-interval 1 \
    --save-interval $SAVE_INTERVAL \
    --eval-interval 1000 \
    --eval-iters 1 \
    --tensorboard-dir $OUTPUT/tensorboard/$variant \
    --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard \
    "
ZERO_STAGE=0 # bf16 must use z0
config_json="./ds_config.$SLURM_JOB_ID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE,
  "train_batch_size": $GLOBAL_BATCH_SIZE,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": $ZERO_STAGE
  },
  "bf16": {
    "enabled": true
  },
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
EOT
DEEPSPEED_ARGS=" \
    --deepspeed \
    --deepspeed_config ${config_json} \
    --zero-stage ${ZERO_STAGE} \
    --deepspeed-activation-checkpointing \
    "
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --rdzv_endpoint $MASTER_ADDR:6000 \
    --rdzv_backend c10d \
    --max_restarts 0 \
    --tee 3 \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE \
    --pipeline-model-parallel-size $PP_SIZE \
    $GPT_ARGS \
    $OUTPUT_ARGS \
    --save $OUTPUT/checkpoints/$variant \
    --load $OUTPUT/checkpoints/$variant \
    --train-weighted-split-paths-path $MEGATRON/data/train-splits.txt \
    --valid-weighted-split-paths-path $MEGATRON/data/valid-splits.txt \
    --num-workers 2 \
    --valid-num-workers 0 \
    --data-impl mmap \
    --distributed-backend nccl \
    $DEEPSPEED_ARGS \
    "
export NCCL_ASYNC_ERROR_HANDLING=1
SRUN_ARGS=" --wait=60 --kill-on-bad-exit=1 "
clear; srun $SRUN_ARGS --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
"""

LLAMA2 = r"""#!/bin/bash
# The flags of a Llama 2 in Microsoft's Megatron-DeepSpeed
CONFIG=./tmp/deepspeed.json
TP=2; PP=2; ZERO_STAGE=0
HIDDEN=2048; HEADS=16; KV_HEADS=4
BATCH=32; MICRO_BATCH=4; SEQ=2048
activation_checkpoint="false"
cat <<EOT > $CONFIG
{
  "train_batch_size" : $BATCH,
  "train_micro_batch_size_per_gpu": $MICRO_BATCH,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": $ZERO_STAGE
  },
  "bf16": {
    "enabled": true
  }
}
EOT
ds_args=" --deepspeed --deepspeed_config=$CONFIG --zero-stage=$ZERO_STAGE"
if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--recompute-granularity full --recompute-method uniform ${ds_args}"
fi
torchrun --nproc_per_node ${GPUS:-8} --nnodes 1 pretrain_gpt.py "$@" \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --ds-sequence-parallel-size 1 \
  --num-layers 24 --hidden-size $HIDDEN --ffn-hidden-size 5504 --num-attention-heads $HEADS \
  --micro-batch-size $MICRO_BATCH --global-batch-size $BATCH --seq-length $SEQ --max-position-embeddings $SEQ \
  --train-iters 250000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --optimizer adam \
  --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1 --bf16 --save ./tmp --load ./tmp \
  --data-path 1 shards/books --data-impl mmap --split 949,50,1 --vocab-size 32000 \
  --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizers/llama --distributed-backend nccl \
  --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings \
  --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear \
  --num-key-value-heads $KV_HEADS --rotary-position-embeddings-theta 500000 --use-flash-attn-v2 \
  $ds_args
"""

GPT_TOKENS = r"""#!/bin/bash
# The flags of a GPT-3 XL in Microsoft's Megatron-DeepSpeed, which counts in tokens
seq_len=${1:-2048}
tokens_in_billion=300
train_tokens=$((${tokens_in_billion} * 1000000000))
train_samples=$(( 300 * 1000000000 * 2 / ${seq_len} ))
exit_duration=30000000
num_gpus=$(($(ds_ssh nvidia-smi --query-gpu=name | wc -l)-2))
checkpoint_path="/blob/$(whoami)/gpt_g${num_gpus}"
vocab_path="gpt2/vocab.json"
if [ ! -f "$vocab_path" ]; then
    wget https://example.org/gpt2-vocab.json
fi
options=" \
    --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 2 \
    --init-method-std 0.013 --lr-decay-tokens ${train_tokens} --lr-warmup-tokens $((3000 * 1000000)) \
    --micro-batch-size 2 --global-batch-size 512 --exit-duration-in-mins ${exit_duration} \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length ${seq_len} \
    --max-position-embeddings ${seq_len} --train-tokens ${train_tokens} --train-samples ${train_samples} \
    --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 --weight-decay 0.1 --clip-grad 1.0 \
    --hysteresis 2 --num-workers 0 --fp16 --load ${checkpoint_path} --save ${checkpoint_path} \
    --no-async-tensor-model-parallel-allreduce --log-optimizer-states-to-tensorboard --checkpoint-activations \
    --vocab-file ${vocab_path} --merge-file gpt2/merges.txt --data-path ${2} --data-impl mmap"
sed "s/GBSIZE/512/" template.json \
    | sed "s/ZERO_STAGE/1/" > ds.json
for (( node = 0; node <= num_gpus; node++ ))
do
    iteration=$(ssh -q worker-"$node" cat latest)
done
deepspeed pretrain_gpt.py ${options} --deepspeed --deepspeed_config ds.json --zero-stage 1 \
    --pipeline-model-parallel-size 2 --deepspeed-activation-checkpointing &>> log.txt
"""

# 10.10.100.101
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
export A='b c'                            # launch.env
export NODE_RANK=0
export NNODES=2
export MASTER_ADDR=10.10.100.101
export MASTER_PORT=29500
RANK=$NODE_RANK WORLD_SIZE=$NNODES LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_PORT=$((MASTER_PORT + 1)) PYTHON -m bloomery doctor --node --host 10.10.100.101 DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2) &&
  PYTHON -m bloomery train DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2)

# user@10.10.100.102
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
export A='b c'                            # launch.env
export NODE_RANK=1
export NNODES=2
export MASTER_ADDR=10.10.100.101
export MASTER_PORT=29500
RANK=$NODE_RANK WORLD_SIZE=$NNODES LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_PORT=$((MASTER_PORT + 1)) PYTHON -m bloomery doctor --node --host user@10.10.100.102 DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2) &&
  PYTHON -m bloomery train DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2)

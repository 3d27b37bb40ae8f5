cd @directory@ || exit 2
@setup@
RANK=$NODE_RANK WORLD_SIZE=$NNODES LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_PORT=$((MASTER_PORT + 1)) @check@ @keep_errors@ &&
  @command@ @keep_errors@

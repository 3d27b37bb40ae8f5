#!/usr/bin/env bash
# Bloomery in a virtual environment, at the versions of constraints.txt. Every setting is a variable:
#   VENV=/shared/venv PYTHON=python3.12 TORCH=2.13.0 EXTRAS=fast,hf bash environments/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

: "${VENV:=.venv}"
: "${PYTHON:=python3}"
: "${TORCH:=2.13.0}"                       # pinned, and installed first: any looser requirement would pull another
: "${TORCH_INDEX:=}"                       # an index of wheels for one CUDA version; empty: the default one
: "${EXTRAS:=fast,parquet,s3,gs,abfs,hf,energy,filters,carbon,mlflow,wandb}"

"$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --upgrade pip
"$VENV/bin/python" -m pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
"$VENV/bin/python" -m pip install --constraint <(grep -v '^torch==' constraints.txt) ".[${EXTRAS}]"
"$VENV/bin/bloomery" --version

#!/usr/bin/env bash
# The whole reproduction. Every stage resumes: run it again and it goes on where it stopped.
#
#   bash run_all.sh                                      the toy: trains its teacher and students, roughly a quarter of an hour on 2 cores
#   TASK=bc5cdr MODEL=SmolLM2-135M-Instruct CORPUS=BC5CDR bash run_all.sh      a real model on real abstracts, 1.5 hours
#
# Settings by environment: TASK, MODEL, WORK, SEEDS (students' seeds, toy), PY (python), CORPUS (bc5cdr).
set -euo pipefail
cd "$(dirname "$0")"
TASK=${TASK:-toy}; WORK=${WORK:-work/$TASK}; SEEDS=${SEEDS:-1}; PY=${PY:-python}

# characterize, ablate, knock in: run NAME's model; further arguments go to characterize.py
study() {
  local model=$1 size=$2; shift 2
  $PY characterize.py --work "$WORK" --model "$model" "$@"
  $PY ablate.py --work "$WORK" --model "$model" --size "$size"
  $PY knockin.py --work "$WORK" --model "$model" --size "$size"
}

if [ "$TASK" = toy ]; then
  S=$WORK/students; FP="--precision fp32"
  $PY data/toy/prepare.py --work "$WORK"
  # the teacher: first it learns to copy, then to code from lists that are new in every episode
  $PY distill.py --work "$WORK" --student "$WORK/init/teacher" --scratch --data "$WORK/train/copy.jsonl" --name teacher-copy $FP --steps 600 --batch 32
  $PY distill.py --work "$WORK" --student "$S/teacher-copy" --data "$WORK/train/episodes.jsonl" --name teacher $FP --steps 650 --batch 32 --micro 8
  study "$S/teacher" 0 --also-trace train,dev --max-new-tokens 128
  # the students: another family and tokenizer; copying is learned once a seed and shared by both arms. Their budget, 80 steps
  # of 16 on the teacher's 160 train traces, was fixed before any arm was compared: with an endless stream or a few hundred
  # steps every arm gets every decision right and nothing is left to compare.
  for seed in $(seq 0 $((SEEDS - 1))); do
    $PY distill.py --work "$WORK" --student "$WORK/init/student" --scratch --data "$WORK/train/copy.jsonl" --name "base-s$seed" $FP --steps 500 --batch 32 --seed "$seed"
    for lam in 0 0.3; do
      arm=$([ "$lam" = 0 ] && echo cot || echo mistill)
      $PY distill.py --work "$WORK" --teacher "$S/teacher" --student "$S/base-s$seed" --lam "$lam" --name "$arm-s$seed" $FP --steps 80 --batch 16 --seed "$seed"
      study "$S/$arm-s$seed" 3 --max-new-tokens 192
    done
  done
  $PY evaluate.py --work "$WORK" --model "$S/teacher"
elif [ "$TASK" = bc5cdr ]; then
  : "${MODEL:?a model folder, hub id or .gguf file}" "${CORPUS:?folder with the BC5CDR files}"
  $PY data/bc5cdr/prepare.py --corpus "$CORPUS" --work "$WORK"
  # a small instruct model is no coder: make it one on traces written from the gold mentions, then study it on its own traces
  $PY distill.py --work "$WORK" --student "$MODEL" --traces "$WORK/gold.jsonl" --prefix frozen --refresh 8 --name coder \
    --precision fp32 --steps 105 --batch 4 --micro 2 --lr 2e-4 --warmup 8 --save-every 15
  study "$WORK/students/coder" 0 --limit 20 --max-new-tokens 160 --batch 8
  $PY evaluate.py --work "$WORK" --model "$WORK/students/coder"
else
  echo "error: TASK=$TASK is none of toy, bc5cdr" >&2; exit 1
fi
echo "report: $WORK/report.md"

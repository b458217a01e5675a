#!/usr/bin/env bash
# The whole reproduction. Every stage resumes: run it again and it goes on where it stopped.
#
#   bash run_all.sh                                      the toy: trains two reasoners and the students; 10 min 29 s on 2 quiet cores, longer on slow ones
#   SEEDS=5 LAMBDAS="0.1 0.3 1" PRECISIONS="fp32-master bf16" KINDS="cross same" bash run_all.sh      claims 14-17 in full, hours
#   TASK=bc5cdr MODEL=M SECOND=N CORPUS=BC5CDR bash run_all.sh      one or two real models on real abstracts, about an hour a model
#
# Settings by environment: TASK, MODEL, WORK, PY (python), CORPUS and SECOND (bc5cdr: its folder; a second model); for the toy's students SEEDS, LAMBDAS, PRECISIONS, KINDS, STEPS (of an arm).
set -euo pipefail
cd "$(dirname "$0")"
TASK=${TASK:-toy}; WORK=${WORK:-work/$TASK}; PY=${PY:-python}; S=$WORK/students
SEEDS=${SEEDS:-1}; LAMBDAS=${LAMBDAS:-0.3}; PRECISIONS=${PRECISIONS:-fp32}; KINDS=${KINDS:-cross}; STEPS=${STEPS:-90}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# what a finished run looks like: the code, the settings and every stage's manifest
state() { { cat ./*.py data/*/prepare.py run_all.sh; echo "$TASK $SEEDS $LAMBDAS $PRECISIONS $KINDS $STEPS ${MODEL:-} ${SECOND:-}"; find "$WORK" -name manifest.json | sort | xargs cat; } 2>/dev/null | sha256sum; }
if [ -f "$WORK/report.md" ] && [ "$(cat "$WORK/.finished" 2>/dev/null)" = "$(state)" ]; then
  echo "everything is done: $WORK/report.md"; exit 0
fi

# two lanes, each with half of the cores: two small trainings side by side are faster than one after the other
lanes() {
  local pids=() lane
  rm -f "$WORK/.failed"
  for lane in "$@"; do ( trap '[ $? = 0 ] || touch "$WORK/.failed"' EXIT; export OMP_NUM_THREADS=$(( ($(nproc) + 1) / 2 )); $lane ) > >(sed -u "s/^/[${lane%% *}] /") 2>&1 & pids+=($!); done
  for lane in "${pids[@]}"; do wait "$lane"; done
}

# what one model does: MODEL, arguments of characterize.py; and what it does under interventions: MODEL, heads of a set (0: the selected), arguments of ablate.py
observe() { $PY characterize.py --work "$WORK" --model "$@"; }
intervene() {
  $PY ablate.py --work "$WORK" --model "$1" --size "$2" "${@:3}"
  $PY knockin.py --work "$WORK" --model "$1" --size "$2"
}

train() { $PY distill.py --work "$WORK" --print-every 50 "$@"; }
lesson() { train --data "$WORK/train/$1.jsonl" --precision fp32 "${@:2}"; }
ready() { until grep -qs '"done": true' "$1/manifest.json"; do [ ! -e "$WORK/.failed" ] || exit 1; sleep 1; done; }     # what the other lane makes

# from random weights to copying. FOLDER under init/, name, seed
copier() {
  lesson copy --student "$WORK/init/$1" --scratch --name "$2-near" --steps 330 --batch 32 --muon 0.02 --seed "$3"
  lesson far --student "$S/$2-near" --name "$2" --steps 64 --batch 16 --micro 4 --muon 0.02 --seed "$3"
}
# ... and on to a reasoner: coding from short lists, each note with its own, then from long ones. Each list is new, so that it has to be read
reasoner() {
  copier "$1" "$1-copy" 0
  lesson short --student "$S/$1-copy" --name "$1-short" --steps 120 --batch 32 --micro 16 --muon 0.02
  lesson long --student "$S/$1-short" --name "$1" --steps 96 --batch 32 --prefix shared --muon 0.01 --lr 1e-3 --decay 0.6
}
teacher() { reasoner teacher; observe "$S/teacher" --also-trace train,dev --max-new-tokens 160; }
second() { reasoner second; observe "$S/second" --max-new-tokens 160; intervene "$S/second" 0; }

# a seed's arms from one shared start, a student that can copy. Their budget, 120 steps of 16 on the teacher's 160 train traces, was fixed
# on the CoT arm alone before any arm was compared: there it has learned some of the fine and contrast decisions and not all (0.47 and
# 0.75 on dev; the region of a finding, which the one list fixes, it has learned by heart: 1.00). With an endless stream every arm gets
# every decision right and nothing is left to compare
arm() {
  local pool=$1 lam=$2 precision=$3 seed=$4 name=$1-$2-$3-s$4 start=$S/base-s$4
  if [ "$5" = same ]; then name=same-$name start=$S/teacher-short; fi      # the teacher's family; codes from short lists already
  ready "$start"; ready "$WORK/runs/teacher"
  train --teacher "$S/teacher" --student "$start" --lam "$lam" --pool "$pool" --precision "$precision" --name "$name" --prefix shared --steps "$STEPS" --batch 16 --eval-every 20 --seed "$seed"
  observe "$S/$name" --max-new-tokens 240 --early 0
  intervene "$S/$name" 3 --robust off --controls 50
}
arms() {                                             # every second one of all arms, so that two lanes share them
  local lane=$1 n=0 seed precision lam kind
  for seed in $(seq 0 $((SEEDS - 1))); do for precision in $PRECISIONS; do for kind in $KINDS; do
    for what in "top 0" $(for lam in $LAMBDAS; do echo "top_$lam random_$lam"; done); do
      set -- ${what//_/ }
      if [ $((n++ % 2)) = "$lane" ]; then arm "$1" "$2" "$precision" "$seed" "$kind"; fi
    done
  done; done; done
}
left() { teacher; arms 0; }
right() { local seed; for seed in $(seq 0 $((SEEDS - 1))); do copier student "base-s$seed" "$seed"; done; second; arms 1; intervene "$S/teacher" 0 --exhaustive 2; }

if [ "$TASK" = toy ]; then
  $PY data/toy/prepare.py --work "$WORK"
  lanes left right
  $PY evaluate.py --work "$WORK" --model "$S/teacher"
elif [ "$TASK" = bc5cdr ]; then
  : "${MODEL:?a model folder, hub id or .gguf file}" "${CORPUS:?folder with the BC5CDR files}"
  $PY data/bc5cdr/prepare.py --corpus "$CORPUS" --work "$WORK"
  # a small instruct model is no coder: make it one on traces written from the gold mentions, then study it on its own traces.
  # A second one of another family (SECOND) tells which claims two models share
  coder() { train --student "$1" --traces "$WORK/gold.jsonl" --prefix frozen --refresh 8 --precision fp32 --micro 2 --save-every 15 --name "$2" "${@:3}"
            observe "$S/$2" --limit 40 --max-new-tokens 160 --batch 8; intervene "$S/$2" 0; }
  coder "$MODEL" coder --steps 105 --batch 4 --lr 2e-4 --warmup 8
  [ -z "${SECOND:-}" ] || coder "$SECOND" second --steps 210 --batch 2 --lr 5e-5 --warmup 10     # at 2e-4 Gemma 3 gives every note one answer
  $PY evaluate.py --work "$WORK" --model "$S/coder"
else
  echo "error: TASK=$TASK is none of toy, bc5cdr" >&2; exit 1
fi
state > "$WORK/.finished"
echo "report: $WORK/report.md"

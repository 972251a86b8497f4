#!/usr/bin/env bash
# Trains llama-1b on 1, 2 or 4 H200s under several plans, with PyTorch in the same run, and prints
# one table: step time, memory, both beside the prediction, and how far the losses lie from one GPU's.
#
#   SHARDC=path/to/shardc REFEREE=path/to/torch_train.py bench/h200.sh GPUS [MODEL] [BATCH_PER_GPU] [SEQ] [STEPS]
#
# REFEREE is a script that takes --model --batch --seq --mode --compile and prints one JSON line; without
# it the PyTorch rows are left out. Logs and metrics go to $OUT (default: ./out).
set -u
GPUS=${1:?how many GPUs}; MODEL=${2:-llama-1b}; BATCH=${3:-4}; SEQ=${4:-4096}; STEPS=${5:-20}
SHARDC=${SHARDC:-target/release/shardc}; OUT=${OUT:-out}; mkdir -p "$OUT"
source "$(dirname "$0")/cuda_env.sh"
chmod +x "$SHARDC"
tokens=$(mktemp --suffix=.bin)
random_tokens "$tokens"

row() { # NAME CLUSTER GLOBAL_BATCH PIN
  local log="$OUT/$1.log" metrics="$OUT/$1.jsonl"
  if ! timeout "${ROW_TIMEOUT:-150}" "$SHARDC" train "$MODEL" --cluster "$2" --batch "$3" --seq "$SEQ" --precision bf16 \
      --data "$tokens" --steps "$STEPS" --lr 1e-4 --seed 1 --pin "$4" --metrics "$metrics" >"$log" 2>&1; then
    echo "== $1 failed:"; tail -5 "$log"
  fi
}

global=$((BATCH * GPUS))
row single-own cuda:1 "$BATCH" "dp=1"
row reference cuda:1 "$global" "dp=1,microbatch=$BATCH"
if [ "$GPUS" -gt 1 ]; then
  for zero in 0 1 3; do row "dp$GPUS-zero$zero" "cuda:$GPUS" "$global" "dp=$GPUS,zero=$zero,microbatch=$BATCH"; done
  row "tp$GPUS" "cuda:$GPUS" "$global" "tp=$GPUS,dp=1,microbatch=$BATCH"
  [ "$GPUS" -eq 4 ] && row tp2-dp2 "cuda:4" "$global" "tp=2,dp=2,microbatch=$BATCH"
  row free "cuda:$GPUS" "$global" "microbatch=$BATCH"
fi
if [ -n "${REFEREE:-}" ]; then
  timeout 150 python3 "$REFEREE" --model "$MODEL" --batch "$BATCH" --seq "$SEQ" --mode single --compile >"$OUT/torch1.log" 2>&1
  if [ "$GPUS" -gt 1 ]; then
    timeout 150 torchrun --nproc_per_node "$GPUS" "$REFEREE" --model "$MODEL" --batch "$BATCH" --seq "$SEQ" --mode fsdp --compile >"$OUT/torch$GPUS.log" 2>&1
  fi
fi
rm -f "$tokens"

python3 - "$OUT" <<'PY'
import glob, json, os, statistics, sys
out = sys.argv[1]
def rows(path): return [json.loads(line) for line in open(path)]
ref = os.path.join(out, "reference.jsonl")
reference = [r["loss"] for r in rows(ref)] if os.path.exists(ref) else []
print(f"{'plan':16} {'step ms':>9} {'pred ms':>9} {'tok/s':>9} {'peak GiB':>9} {'loss 1':>9} {'loss N':>9} {'max |dloss|':>11}")
for path in sorted(glob.glob(os.path.join(out, "*.jsonl"))):
    name, steps = os.path.basename(path)[:-6], rows(path)
    if not steps: continue
    late = steps[4:] or steps
    step = statistics.median(r["step_s"] for r in late); tokens = statistics.median(r["tokens_per_s"] for r in late)
    drift = max((abs(r["loss"] - l) for r, l in zip(steps, reference)), default=float("nan"))
    if name == "single-own": drift = float("nan")
    print(f"{name:16} {step*1e3:9.1f} {steps[-1]['predicted_step_s']*1e3:9.1f} {tokens:9.0f} {steps[-1]['peak_device_bytes']/2**30:9.2f} {steps[0]['loss']:9.4f} {steps[-1]['loss']:9.4f} {drift:11.5f}")
for path in sorted(glob.glob(os.path.join(out, "torch*.log"))):
    lines = [l for l in open(path) if l.startswith("{")]
    if lines:
        r = json.loads(lines[-1])
        print(f"{'pytorch ' + r['mode'] + ' ' + str(r['gpus']):16} {r['step_ms']:9.1f} {'':9} {r['tokens_s_gpu']*r['gpus']:9.0f} {r['peak_gib']:9.2f} {r['loss'][0]:9.4f} {r['loss'][1]:9.4f}")
    else: print(os.path.basename(path), "failed:", open(path).read()[-300:])
PY

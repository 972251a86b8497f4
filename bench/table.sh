#!/usr/bin/env bash
# Every model of the speed table on H200s, by the plan that shardc chooses, each followed at once by PyTorch on the
# same GPUs; prints one table: step time, model TFLOP/s per GPU, peak memory, and the ratio of the speeds.
#
#   SHARDC=path/to/shardc REFEREE=path/to/torch_train.py bench/table.sh GPUS [ROW…]
#
# A ROW is MODEL:BATCH_PER_GPU:SEQ; without one, the table's rows for that number of GPUs (1 or 4).
# REFEREE takes --model --batch --seq --mode --compile and prints one JSON line; without it its columns stay empty.
# Logs and metrics go to $OUT (default: ./out).
set -u
GPUS=${1:?how many GPUs}; shift
SHARDC=${SHARDC:-target/release/shardc}; OUT=${OUT:-out}; STEPS=${STEPS:-16}; mkdir -p "$OUT"
if [ $# -gt 0 ]; then ROWS=("$@")
elif [ "$GPUS" -eq 1 ]; then ROWS=(llama-160m:32:2048 llama-1b:4:4096 llama-1b:12:4096 gpt2-1.5b:8:1024 gpt2-124m:32:1024)
else ROWS=(llama-1b:4:4096 llama-8b:2:4096 llama-8b:1:16384); fi
source "$(dirname "$0")/cuda_env.sh"
chmod +x "$SHARDC"
tokens=$(mktemp --suffix=.bin)
random_tokens "$tokens"

for row in "${ROWS[@]}"; do
  IFS=: read -r model batch seq <<<"$row"
  name="$model-$batch-$seq"
  timeout "${ROW_TIMEOUT:-150}" "$SHARDC" train "$model" --cluster "cuda:$GPUS" --batch $((batch * GPUS)) --seq "$seq" \
    --precision bf16 --data "$tokens" --steps "$STEPS" --lr 1e-4 --seed 1 ${PIN:+--pin "$PIN"} ${EXTRA:-} \
    --metrics "$OUT/$name.jsonl" >"$OUT/$name.log" 2>&1 || { echo "== $name failed:"; tail -5 "$OUT/$name.log"; }
  if [ -n "${REFEREE:-}" ]; then
    mode=(python3 "$REFEREE" --mode single)
    [ "$GPUS" -gt 1 ] && mode=(torchrun --nproc_per_node "$GPUS" "$REFEREE" --mode fsdp)
    timeout "${ROW_TIMEOUT:-150}" "${mode[@]}" --model "$model" --batch "$batch" --seq "$seq" --compile >"$OUT/$name.torch.log" 2>&1
  fi
done
rm -f "$tokens"

python3 - "$OUT" "$GPUS" "${ROWS[@]}" <<'PY'
import json, os, statistics, sys
out, gpus = sys.argv[1], int(sys.argv[2])
def last_json(path):
    lines = [line for line in open(path) if line.startswith("{")] if os.path.exists(path) else []
    return json.loads(lines[-1]) if lines else None
print(f"{'model, batch x seq':24} {'step ms':>9} {'predicted':>9} {'peak GiB':>9} {'torch ms':>9} {'TFLOP/s':>8} {'GiB':>6} {'speed':>7}")
for row in sys.argv[3:]:
    name = row.replace(":", "-")
    path = os.path.join(out, name + ".jsonl")
    steps = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    peer = last_json(os.path.join(out, name + ".torch.log"))
    text = f"{row:24}"
    late = steps[4:]
    step = statistics.median(r["step_s"] for r in late) * 1e3 if late else float("nan")
    last = steps[-1] if steps else {}
    text += f" {step:9.1f} {last.get('predicted_step_s', float('nan')) * 1e3:9.1f} {last.get('peak_device_bytes', float('nan')) / 2**30:9.2f}"
    if peer: text += f" {peer['step_ms']:9.1f} {peer['tflops_gpu'] * peer['step_ms'] / step:8.1f} {peer['peak_gib']:6.1f} {peer['step_ms'] / step:6.3f}x"
    print(text)
PY

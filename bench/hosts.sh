#!/usr/bin/env bash
# A rehearsal of runs over several hosts, on one machine with few GPUs: every "host" is a process per GPU with a name of
# its own (NCCL_HOSTID), so that its ranks meet those of others over the network, and hosts share the GPUs. What is
# shown is that a plan's ranks meet and compute what one GPU computes; times mean nothing.
#
#   SHARDC=path/to/shardc bench/hosts.sh GPUS [CASE…]
#
# A CASE is MODEL:HOSTS:BATCH:SEQ:PRECISION:PIN (an empty PIN leaves the plan to the search). Each is trained for STEPS
# steps (8) on one GPU without a pin and by the plan on the hosts; the table tells the farthest two losses of a step.
# Logs and metrics go to $OUT (default: ./out).
set -u
GPUS=${1:?how many GPUs}; shift
SHARDC=${SHARDC:-target/release/shardc}; OUT=${OUT:-out}; STEPS=${STEPS:-8}; mkdir -p "$OUT"
here=$(dirname "$0")
source "$here/cuda_env.sh"
chmod +x "$SHARDC"
CASES=(
  llama-tiny:2:8:256:fp32:pp=2,schedule=1f1b
  llama-tiny:2:8:256:fp32:pp=4,schedule=1f1b
  llama-tiny:2:8:256:fp32:pp=4,schedule=zbv,microbatch=1
  llama-tiny:2:8:256:fp32:pp=2,dp=2,schedule=gpipe
  llama-tiny:2:8:256:fp32:pp=2,virtual=2,dp=2,schedule=interleaved,microbatch=1
  llama-tiny:2:8:256:fp32:pp=2,tp=2,schedule=zbv,microbatch=1
  llama-tiny:2:8:256:fp32:dp=2,tp=2,zero=3
  llama-tiny:2:8:256:fp32:dp=2,fsdp=2,zero=3
  llama-tiny:2:8:256:fp32:dp=2,cp=2
  llama-tiny:4:16:256:fp32:pp=2,dp=2,tp=2,schedule=zbv,microbatch=1
  llama-tiny:4:16:256:fp32:pp=2,dp=2,fsdp=2,zero=1,schedule=1f1b,microbatch=1
  llama-tiny:4:16:256:fp32:pp=4,dp=2,zero=2,schedule=zbv,microbatch=1
  llama-tiny:4:16:256:fp32:pp=8,schedule=1f1b,microbatch=1
  llama-160m:2:8:512:bf16:
  llama-160m:2:8:512:bf16:pp=2,dp=2,schedule=zbv,microbatch=1
  gpt2-124m:2:8:512:bf16:pp=2,tp=2,schedule=1f1b,microbatch=1
)
[ $# -gt 0 ] && CASES=("$@")
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} MASTER_ADDR=127.0.0.1

# run NAME RANKS -- ARGUMENTS: by one process, or by one per rank, of which the first failure is the run's.
run() {
  local name=$1 ranks=$2 pids=() rc=0; shift 3
  port=$((port + 1))
  if [ "$ranks" -eq 1 ]; then timeout "${CASE_TIMEOUT:-90}" "$SHARDC" train "$@" --metrics "$OUT/$name.jsonl" >"$OUT/$name.log" 2>&1; return; fi
  for ((rank = 0; rank < ranks; rank++)); do
    NCCL_HOSTID="host$((rank / GPUS))" RANK=$rank LOCAL_RANK=$((rank % GPUS)) WORLD_SIZE=$ranks MASTER_PORT=$port \
      timeout "${CASE_TIMEOUT:-90}" "$SHARDC" train "$@" --metrics "$OUT/$name.jsonl" >"$OUT/$name.$rank.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || rc=$?; done
  return $rc
}

port=29600 table=$(mktemp)
for case in "${CASES[@]}"; do
  IFS=: read -r model hosts batch seq precision pin <<<"$case"
  name="$model-$hosts-$batch-$seq-$precision-${pin//[=,]/_}"
  alone="$model-alone-$batch-$seq-$precision"
  ranks=$((hosts * GPUS))
  common=("$model" --batch "$batch" --seq "$seq" --precision "$precision" --data "$here/../data/documentation.txt" --steps "$STEPS" --lr 1e-3 --seed 1)
  [ -e "$OUT/$alone.jsonl" ] || run "$alone" 1 -- "${common[@]}" --cluster cuda:1
  began=$(date +%s)
  run "$name" "$ranks" -- "${common[@]}" --cluster "cuda:${GPUS}x$hosts" ${pin:+--pin "$pin"}
  echo "$name $alone $ranks $? $(($(date +%s) - began))" >>"$table"
done

python3 - "$OUT" "$table" <<'PY'
import json, os, sys
out = sys.argv[1]
def losses(name):
    path = os.path.join(out, name + ".jsonl")
    return [json.loads(line)["loss"] for line in open(path)] if os.path.exists(path) else []
print(f"{'case':78} {'ranks':>5} {'rc':>3} {'s':>4} {'steps':>5} {'first':>9} {'last':>9} {'farthest':>9}")
for line in open(sys.argv[2]):
    name, alone, ranks, rc, seconds = line.split()
    own, one = losses(name), losses(alone)
    far = max((abs(a - b) for a, b in zip(own, one)), default=float("nan"))
    print(f"{name:78} {ranks:>5} {rc:>3} {seconds:>4} {len(own):>5} {own[0] if own else float('nan'):9.5f} {own[-1] if own else float('nan'):9.5f} {far:9.2e}")
PY

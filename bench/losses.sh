#!/usr/bin/env bash
# Losses of 50 steps on one GPU beside two references, on the same initial weights and batches:
#   llama-160m in bf16 beside PyTorch (transformers' model, autocast to bf16, fp32 master weights, AdamW), and
#   a small model in bf16 and fp16 on the GPU beside fp32 on the CPU.
#
#   SHARDC=path/to/shardc bench/losses.sh
#
# Python with torch, transformers and safetensors writes the weights and the batches: tokens of a random walk, so that
# there is something to learn. Logs and metrics go to $OUT (default: ./out).
set -eu
SHARDC=${SHARDC:-target/release/shardc}; OUT=${OUT:-out}; STEPS=${STEPS:-50}; mkdir -p "$OUT"
source "$(dirname "$0")/cuda_env.sh"
chmod +x "$SHARDC"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

cat >"$work/reference.py" <<'PY'
import json, sys, torch, transformers
from safetensors.torch import save_file

root, steps = sys.argv[1], int(sys.argv[2])
SHAPES = {  # layers, width, heads, feed-forward, batch, sequence
    "llama-160m": (12, 768, 12, 2048, 8, 1024),
    "small": (4, 256, 4, 688, 4, 128),
}
for name, (layers, width, heads, inner, batch, seq) in SHAPES.items():
    vocabulary = 32000 if name != "small" else 1024
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(f"{root}/{name}")
    g = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(steps):
        ids = torch.empty(batch, seq, dtype=torch.int64)
        ids[:, 0] = torch.randint(1000, (batch,), generator=g)
        jumps = torch.randint(16, (batch, seq), generator=g)
        for at in range(1, seq):
            ids[:, at] = (ids[:, at - 1] * 31 + jumps[:, at]) % 1000
        batches.append(ids)
    save_file({f"{key}.{step}": ids.clone() for step, ids in enumerate(batches) for key in ("input_ids", "labels")},
              f"{root}/{name}.safetensors")
    if name == "small":
        continue
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for ids in batches:
        ids = ids.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    json.dump(losses, open(f"{root}/{name}.json", "w"))
PY
python3 "$work/reference.py" "$work" "$STEPS" >"$OUT/reference.log" 2>&1 || { tail -5 "$OUT/reference.log"; exit 1; }

train() { # NAME MODEL CLUSTER PRECISION
  "$SHARDC" train "$work/$2" --data "$work/$2.safetensors" --cluster "$3" --precision "$4" --steps "$STEPS" --lr 3e-4 \
    --betas 0.9,0.95 --eps 1e-8 --weight-decay 0.1 --clip-grad-norm 1 --metrics "$OUT/$1.jsonl" >"$OUT/$1.log" 2>&1 \
    || { echo "== $1 failed:"; tail -5 "$OUT/$1.log"; exit 1; }
}
train llama-160m llama-160m cuda:1 bf16
train small-fp32-cpu small cpu:1 fp32
train small-bf16 small cuda:1 bf16
train small-fp16 small cuda:1 fp16

python3 - "$OUT" "$work" <<'PY'
import json, sys
out, work = sys.argv[1:3]
read = lambda name: [json.loads(line)["loss"] for line in open(f"{out}/{name}.jsonl")]
cases = [("llama-160m bf16", json.load(open(f"{work}/llama-160m.json")), read("llama-160m")),
         ("small bf16", read("small-fp32-cpu"), read("small-bf16")),
         ("small fp16", read("small-fp32-cpu"), read("small-fp16"))]
print(f"{'':18} {'step':>5} {'reference':>10} {'shardc':>10} {'difference':>11}")
for name, reference, own in cases:
    steps = sorted({0, *range(9, len(own), 10), len(own) - 1})
    for step in steps:
        print(f"{name:18} {step + 1:5} {reference[step]:10.5f} {own[step]:10.5f} {own[step] / reference[step] - 1:11.2e}")
    print(f"{name:18} {'most':>5} {'':10} {'':10} {max(abs(b / a - 1) for a, b in zip(reference, own)):11.2e}")
PY

#!/usr/bin/env python3
"""Steps on GPUs beside what is predicted of them: trains the rows of a file of measured runs again.

    source bench/cuda_env.sh
    SHARDC=path/to/shardc COMMIT=… bench/measured.py --gpus 2 [--runs bench/fixtures/h200_runs.json] [--seconds 500]

Each row with so many GPUs trains on random tokens, or on random pictures (which PyTorch draws); its step is the median
from the fifth on. Printed are step and peak memory beside the prediction; rows as measured now go to $OUT/runs.json in
the form of the file, logs and metrics beside them ($OUT: ./out). `measured`, the binary of this crate, predicts the rows of
a file without GPUs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
FIRST = 4


def data(out, row, steps):
    """A file to train on, made once."""
    if "seq" in row:
        path = out / "tokens.bin"
        if not path.exists():
            subprocess.run(["bash", "-c", f"source {HERE}/cuda_env.sh; random_tokens {path}"], check=True)
        return path
    path = out / f"{row['model']}-{row['batch']}.safetensors"
    if not path.exists():
        pictures = ["python3", HERE / "torch_pictures.py", row["model"], "--batch", row["batch"], "--write", path]
        subprocess.run([str(word) for word in [*pictures, "--steps", steps]], check=True)
    return path


def command(shardc, row, path, steps, metrics):
    words = [shardc, "train", row["model"], "--cluster", f"cuda:{gpus(row)}", "--batch", row["batch"]]
    words += ["--seq", row["seq"]] if "seq" in row else []
    words += ["--precision", row["precision"], *(["--pin", row["pins"]] if row.get("pins") else [])]
    words += ["--data", path, "--steps", steps, "--lr", "1e-4", "--seed", 1, "--metrics", metrics]
    return [str(word) for word in words]


def name(row):
    size = f"{row['batch']} x {row['seq']}" if "seq" in row else str(row["batch"])
    return " ".join([row["model"], f"{size},", row["precision"], row.get("pins", "")]).strip()


def gpus(row):
    return int(row["cluster"].split(":")[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, required=True, help="rows with so many GPUs")
    parser.add_argument("--runs", type=pathlib.Path, default=HERE / "fixtures/h200_runs.json")
    parser.add_argument("--seconds", type=float, default=500, help="no row begins later")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    out = pathlib.Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    shardc, commit = os.environ.get("SHARDC", "target/release/shardc"), os.environ.get("COMMIT", "unknown")
    rows = [row for row in json.loads(args.runs.read_text()) if gpus(row) == args.gpus]
    began, measured, left, failed = time.monotonic(), [], 0, []
    print(f"{'':60} {'step ms':>9} {'predicted':>9} {'':>6} {'peak GiB':>8} {'before':>9}", flush=True)
    for number, row in enumerate(rows):
        if time.monotonic() - began > args.seconds:
            left += 1
            continue
        metrics = out / f"{number}.jsonl"
        with open(out / f"{number}.log", "w") as log:
            path = data(out, row, args.steps)
            run = command(shardc, row, path, args.steps, metrics)
            status = subprocess.run(run, stdout=log, stderr=subprocess.STDOUT).returncode
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        if status != 0 or len(steps) <= FIRST:
            failed.append(f"{name(row)}: exit status {status}, {number}.log")
            continue
        step = statistics.median(step["step_s"] for step in steps[FIRST:])
        last = steps[-1]
        predicted, peak = last["predicted_step_s"], last["peak_device_bytes"]
        error = f"{predicted / step - 1:+.1%}"
        print(f"{name(row):60} {step * 1e3:9.2f} {predicted * 1e3:9.2f} {error:>6} {peak / 2**30:8.2f} {row['step_ms']:9.2f}", flush=True)
        measured.append({**row, "step_ms": round(step * 1e3, 2), "peak_bytes": peak, "commit": commit})
    lines = ",\n".join("  " + json.dumps(row) for row in measured)
    (out / "runs.json").write_text(f"[\n{lines}\n]\n")
    print("\n".join([*failed, f"{len(measured)} measured, {len(failed)} failed, {left} left for want of time"]))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

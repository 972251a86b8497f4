#!/usr/bin/env python3
"""Plans drawn at random on the ranks that are here: each trains a small model for a few steps, and its losses and its
first gradient norm are those of one rank within the rounding of its precision.

    source bench/cuda_env.sh
    SHARDC=path/to/shardc bench/drawn.py --gpus 2 --hosts 1,2 --seconds 400
    SHARDC=path/to/shardc bench/drawn.py --cpu 2,4 --seconds 100

With several hosts, each is a process per GPU under a name of its own (NCCL_HOSTID), so that hosts share the GPUs and
meet over the network, as in hosts.sh. Pins that a model or its batch cannot keep are refused, and counted as such. Told
are the counts, and every plan that failed or is too far; logs and metrics go to $OUT (default: ./out).
"""

import argparse
import array
import collections
import concurrent.futures
import itertools
import json
import os
import pathlib
import random
import struct
import subprocess
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 4
# Language models with the sequence they are given; tensors of the others, with their type, shape and highest number.
SEQUENCES = {"llama-tiny": 256, "moe-tiny": 64, "gpt2-124m@layers=2": 128, "llama-160m@layers=2": 128}
PICTURES = {"images": ("F32", [16, 3, 16, 16], 0), "labels": ("I64", [16], 10)}
BATCHES = {
    "resnet-tiny": PICTURES,
    "mixer-tiny": PICTURES,
    "unet-tiny": {"images": PICTURES["images"], "masks": ("I64", [16, 16, 16], 2)},
    "two-tower-tiny": {"users": ("I64", [16], 100), "items": ("I64", [16], 100)},
}
# How far losses, and the first gradient norm, may be from those of one rank.
FAR = {"fp32": (2e-4, 2e-3), "bf16": (1.5e-2, 5e-2), "fp16": (1.5e-2, 5e-2), "fp8": (4e-2, 0.15)}
# As far losses may be where each rank's terms of gradients are rounded to bf16, as on CPU ranks (1.4e-4 after four steps
# of resnet-tiny on four).
FAR_SUMS = 1e-3

Case = collections.namedtuple("Case", "model ranks precision batch seq pins flags")


def write_batches(path, tensors, chance):
    """Exact batches of so many steps, as safetensors."""
    header, body = {}, b""
    for step, (name, (dtype, shape, most)) in itertools.product(range(STEPS), tensors.items()):
        count = 1
        for size in shape:
            count *= size
        draw = (lambda: chance.gauss(0, 1)) if dtype == "F32" else (lambda: chance.randrange(most))
        data = array.array("f" if dtype == "F32" else "q", (draw() for _ in range(count))).tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[f"{name}.{step}"] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def draw(chance, ranks):
    """A request for one of these numbers of ranks."""
    ranks = chance.choice(ranks)
    model = chance.choice([chance.choice(list(SEQUENCES))] * 4 + [chance.choice(list(BATCHES))])
    is_text = model in SEQUENCES
    precision = chance.choice(["fp32", "fp32", "bf16", "fp16"] + ["fp8"] * is_text)
    batch = chance.choice([8, 16]) if is_text else 16
    seq = SEQUENCES[model] // chance.choice([1, 1, 2]) if is_text else 0
    families = ["dp", "tp", "fsdp"] + ["pp", "cp"] * is_text + ["ep"] * (model == "moe-tiny")
    pins, left = {}, ranks
    while left > 1:
        family = chance.choice(families)
        degree = chance.choice([size for size in range(2, left + 1) if left % size == 0])
        if family not in pins:
            pins[family], left = degree, left // degree

    def may(share, name, values):
        if chance.random() < share:
            pins[name] = chance.choice(values)

    may(1.0 if "fsdp" in pins else 0.5, "zero", [1, 2, 3] if "fsdp" in pins else [0, 1, 2, 3])
    if "pp" in pins:
        may(0.8, "schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
        if pins.get("schedule") == "interleaved":
            pins["virtual"] = 2
    may(0.4, "microbatch", [1, 2])
    may(0.3, "recompute", ["none", "selective", "value:8", "block", 1])
    may(0.3 * is_text, "loss_chunks", [1, 2, 4])
    may(0.2 * is_text, "overlap_chunks", [2])
    may(0.2 * (precision != "fp32"), "keep_casts", [0, 1])
    if "dp" not in pins:
        may(0.7, "dp", [1])
    if chance.random() < 0.15:
        pins = {}
    flags = ["--deterministic"] if chance.random() < 0.2 else []
    flags += ["--reduce-dtype", "bf16"] if chance.random() < 0.15 else []
    return Case(model, ranks, precision, batch, seq, ",".join(f"{name}={pins[name]}" for name in pins), flags)


class Machine:
    """Runs cases, and the same on one rank once."""

    def __init__(self, args, out):
        self.shardc, self.out, self.args = os.environ.get("SHARDC", "target/release/shardc"), out, args
        self.alone, self.lock, self.ports = {}, threading.Lock(), itertools.count(29600)

    def command(self, case, cluster, metrics):
        is_text = case.model in SEQUENCES
        data = HERE.parent / "data/documentation.txt" if is_text else self.out / f"{case.model}.safetensors"
        words = [self.shardc, "train", case.model, "--cluster", cluster, "--batch", case.batch, "--data", data]
        words += ["--seq", case.seq] if is_text else []
        words += ["--precision", case.precision, "--steps", STEPS, "--lr", "1e-3", "--seed", 3, "--metrics", metrics]
        return [str(word) for word in words]

    def run(self, name, command, ranks):
        """The exit status of a case, and what its first rank said."""
        hosts = 1 if self.args.cpu else ranks // self.args.gpus
        each = [{}]
        if hosts > 1:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": next(self.ports), "NCCL_SOCKET_IFNAME": "lo"}
            place = lambda rank: {"NCCL_HOSTID": f"host{rank // self.args.gpus}", "LOCAL_RANK": rank % self.args.gpus}
            each = [{**meeting, **place(rank), "RANK": rank, "WORLD_SIZE": ranks} for rank in range(ranks)]
        processes = []
        for rank, variables in enumerate(each):
            variables = {key: str(value) for key, value in variables.items()}
            with open(self.out / f"{name}.{rank}.log", "w") as log:
                processes.append(
                    subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=log)
                )
        end = time.monotonic() + self.args.case_seconds
        try:
            status = max(abs(process.wait(max(1, end - time.monotonic()))) for process in processes)
        except subprocess.TimeoutExpired:
            status = None
            for process in processes:
                process.kill()
        return status, (self.out / f"{name}.0.log").read_text()

    def steps(self, name):
        path = self.out / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def one_rank(self, case):
        """The steps of a case on one rank by the plan that is found for it."""
        key = (case.model, case.precision, case.batch, case.seq)
        with self.lock:
            known = self.alone.setdefault(key, [threading.Lock(), None])
        with known[0]:
            if known[1] is None:
                name = "alone-" + "-".join(map(str, key))
                cluster = "cpu:1" if self.args.cpu else "cuda:1"
                self.run(name, self.command(case, cluster, self.out / f"{name}.jsonl"), 1 if self.args.cpu else self.args.gpus)
                known[1] = self.steps(name)
        return known[1]

    def cluster(self, ranks):
        if self.args.cpu:
            return f"cpu:{ranks}"
        hosts = ranks // self.args.gpus
        return f"cuda:{self.args.gpus}x{hosts}" if hosts > 1 else f"cuda:{self.args.gpus}"

    def check(self, number, case):
        """In a word how a case ended, and what there is to say of it."""
        expect, name = self.one_rank(case), f"case-{number}"
        command = self.command(case, self.cluster(case.ranks), self.out / f"{name}.jsonl") + case.flags
        status, said = self.run(name, command + (["--pin", case.pins] if case.pins else []), case.ranks)
        text = f"{case.model} {case.ranks} ranks {case.precision} {case.batch} x {case.seq} {case.pins} {case.flags}"
        if status in (2, 3) and "error:" in said:
            return "refused", text
        steps = self.steps(name)
        if status != 0 or len(steps) != len(expect) or not steps:
            return "failed", f"{text}: exit status {status}, {len(steps)} steps of {len(expect)}; {name}.*.log"
        # A step of fp16 that overflowed has no loss.
        both = [(own["loss"], one["loss"]) for own, one in zip(steps, expect)]
        apart = max((abs(own / one - 1) for own, one in both if own is not None and one is not None), default=0)
        norms = [of[0].get("grad_norm") for of in (steps, expect)]
        norm = abs(norms[0] / norms[1] - 1) if all(norms) else 0
        most, most_of_norm = FAR[case.precision]
        most = max(most, FAR_SUMS) if "--reduce-dtype" in case.flags else most
        is_far = apart > most or norm > most_of_norm
        return "far" if is_far else "equal", f"{text}: losses within {apart:.1e}, the first norm within {norm:.1e}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each host")
    parser.add_argument("--hosts", default="1", help="numbers of hosts to draw from, as 1,2,4")
    parser.add_argument("--cpu", help="numbers of CPU ranks to draw from, in the place of GPUs")
    parser.add_argument("--seconds", type=float, default=300, help="no case begins later")
    parser.add_argument("--case-seconds", type=float, default=90, help="a case that takes longer failed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-a-time", type=int, default=2, help="cases that run beside each other")
    args = parser.parse_args()
    out = pathlib.Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(args.seed)
    for model, tensors in BATCHES.items():
        write_batches(out / f"{model}.safetensors", tensors, chance)
    counts = [int(count) for count in (args.cpu or args.hosts).split(",")]
    ranks = [count * (1 if args.cpu else args.gpus) for count in counts]
    machine, began = Machine(args, out), time.monotonic()
    ended, told = collections.Counter(), []

    def work(cases):
        while time.monotonic() - began < args.seconds:
            with machine.lock:
                number, case = next(cases)
            how, text = machine.check(number, case)
            with machine.lock:
                ended[how] += 1
                if how in ("failed", "far"):
                    told.append(f"{how}: {text}")

    cases = enumerate(draw(chance, ranks) for _ in itertools.count())
    with concurrent.futures.ThreadPoolExecutor(args.at_a_time) as pool:
        for done in [pool.submit(work, cases) for _ in range(args.at_a_time)]:
            done.result()
    print("\n".join(told + [", ".join(f"{ended[how]} {how}" for how in ("equal", "refused", "far", "failed"))]))
    raise SystemExit(1 if told else 0)


if __name__ == "__main__":
    main()

"""What networks for pictures take in PyTorch: the peer of `shardc train resnet-50|unet|mixer-b-16` on one GPU.

    python3 bench/torch_pictures.py resnet-50 --batch 64
    python3 bench/torch_pictures.py resnet-50 --batch 64 --write FILE.safetensors --steps 10

The first prints the median step of `torch.compile` with channels last, bf16 autocast and a fused AdamW, its pictures
already on the device. The second writes random batches that `shardc train --data FILE.safetensors` takes.
"""

import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, inner, stride):
        super().__init__()
        out = 4 * inner
        conv = lambda a, b, k, s=1: nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b))
        self.reduce, self.spatial, self.expand = conv(width, inner, 1), conv(inner, inner, 3, stride), conv(inner, out, 1)
        self.shortcut = conv(width, out, 1, stride) if stride > 1 or width != out else nn.Identity()

    def forward(self, x):
        y = F.relu(self.spatial(F.relu(self.reduce(x))))
        return F.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, blocks, width = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)), [], 64
        for inner, count, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
            for index in range(count):
                blocks.append(Block(width, inner, stride if index == 0 else 1))
                width = 4 * inner
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, depth=4, width=64, groups=32):
        super().__init__()
        part = lambda a, b: [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(groups, b), nn.ReLU()]
        double = lambda a, b: nn.Sequential(*part(a, b), *part(b, b))
        at = lambda level: width << level
        self.first = double(3, width)
        self.down = nn.ModuleList(double(at(level), at(level + 1)) for level in range(depth))
        levels = range(depth)[::-1]
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(at(level + 1), at(level), 2, 2) for level in levels)
        self.up = nn.ModuleList(double(at(level + 1), at(level)) for level in levels)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        x, passed = self.first(x), []
        for down in self.down:
            passed.append(x)
            x = down(F.max_pool2d(x, 2))
        for enlarge, up in zip(self.enlarge, self.up):
            x = up(torch.cat([passed.pop(), enlarge(x)], 1))
        return self.head(x)


class Mixed(nn.Module):
    def __init__(self, tokens=196, width=768, token_hidden=384, channel_hidden=3072):
        super().__init__()
        mlp = lambda a, b: nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, a))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.tokens, self.channels = mlp(tokens, token_hidden), mlp(width, channel_hidden)

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    def __init__(self, layers=12, width=768):
        super().__init__()
        self.embed, self.blocks = nn.Conv2d(3, width, 16, 16), nn.Sequential(*[Mixed() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.blocks(self.embed(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


MODELS = {"resnet-50": (ResNet, 224, "labels"), "unet": (UNet, 256, "masks"), "mixer-b-16": (Mixer, 224, "labels")}


def batch(model, count):
    _, size, labels = MODELS[model]
    wanted = torch.randint(0, 1000, (count,)) if labels == "labels" else torch.randint(0, 2, (count, size, size))
    return torch.randn(count, 3, size, size), wanted


def measure(model, count):
    net = MODELS[model][0]().cuda().to(memory_format=torch.channels_last)
    optimizer, compiled = torch.optim.AdamW(net.parameters(), fused=True), torch.compile(net)
    pictures, wanted = (tensor.cuda() for tensor in batch(model, count))
    pictures = pictures.to(memory_format=torch.channels_last)
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(pictures), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"pytorch {model} batch {count}: {statistics.median(times[8:]) * 1e3:.2f} ms, {peak:.2f} GiB")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--write")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    if not asked.write:
        return measure(asked.model, asked.batch)
    from safetensors.torch import save_file

    tensors = {}
    for step in range(asked.steps):
        pictures, wanted = batch(asked.model, asked.batch)
        tensors |= {f"images.{step}": pictures, f"{MODELS[asked.model][2]}.{step}": wanted}
    save_file(tensors, asked.write)


if __name__ == "__main__":
    main()

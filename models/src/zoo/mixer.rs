//! MLP-Mixer (Tolstikhin et al., 2021): patches of pictures, mixed by layers over patches and layers over
//! channels.

use crate::trace::Batch;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

/// The sizes of a mixer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MixerConfig {
    /// The number of blocks.
    pub layers: usize,
    /// The width.
    pub width: usize,
    /// The width inside the layers over patches.
    pub token_hidden: usize,
    /// The width inside the layers over channels.
    pub channel_hidden: usize,
    /// Height and width of a patch, which divide those of the pictures.
    pub patch: usize,
    /// Height and width of the pictures.
    pub size: usize,
    /// The number of classes.
    pub classes: usize,
}

impl MixerConfig {
    /// Of the paper's table 1: layers, width, and the widths inside.
    pub fn new([layers, width, token_hidden, channel_hidden]: [usize; 4]) -> Self {
        Self { layers, width, token_hidden, channel_hidden, patch: 16, size: 224, classes: 1000 }
    }

    fn patches(&self) -> usize {
        (self.size / self.patch).pow(2)
    }

    /// The number of parameters.
    pub fn parameters(&self) -> u64 {
        let mlp = |width: usize, hidden: usize| 2 * width * hidden + hidden + width;
        let block = 4 * self.width + mlp(self.patches(), self.token_hidden) + mlp(self.width, self.channel_hidden);
        let embed = (3 * self.patch * self.patch + 1) * self.width;
        (embed + self.layers * block + 2 * self.width + (self.width + 1) * self.classes) as u64
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> Mixer {
        let norm = || LayerNormConfig::new(self.width).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let mlp = |width, hidden| Mlp { up: linear(width, hidden), down: linear(hidden, width) };
        let patch = [self.patch, self.patch];
        Mixer {
            embed: Conv2dConfig::new([3, self.width], patch).with_stride(patch).init(device),
            blocks: (0..self.layers)
                .map(|_| Block {
                    token_norm: norm(),
                    token_mlp: mlp(self.patches(), self.token_hidden),
                    channel_norm: norm(),
                    channel_mlp: mlp(self.width, self.channel_hidden),
                })
                .collect(),
            norm: norm(),
            head: linear(self.width, self.classes),
        }
    }
}

/// A mixer.
#[derive(Module, Debug)]
pub struct Mixer {
    embed: Conv2d,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    token_norm: LayerNorm,
    token_mlp: Mlp,
    channel_norm: LayerNorm,
    channel_mlp: Mlp,
}

#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

impl Mixer {
    /// The logits `[b, classes]` of pictures `[b, 3, h, w]`.
    pub fn forward(&self, pictures: Tensor<4>) -> Tensor<2> {
        let x = self.embed.forward(pictures);
        let [batch, width, rows, columns] = x.dims();
        let mut x = x.reshape([batch, width, rows * columns]).swap_dims(1, 2);
        for block in &self.blocks {
            let mixed = block.token_mlp.forward(block.token_norm.forward(x.clone()).swap_dims(1, 2));
            x = x + mixed.swap_dims(1, 2);
            x = x.clone() + block.channel_mlp.forward(block.channel_norm.forward(x));
        }
        self.head.forward(self.norm.forward(x).mean_dim(1).reshape([batch, width]))
    }

    /// The loss of a batch of `images` and `labels`.
    pub fn loss(&self, batch: &mut Batch, config: &MixerConfig, size: usize) -> Tensor<1> {
        let images = batch.float("images", [size, 3, config.size, config.size]);
        let labels = batch.int("labels", [size]);
        let logits = self.forward(images);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}

//! U-Net (Ronneberger, Fischer and Brox, 2015) with padded convolutions, so that sizes stay, and group
//! normalization (Wu and He, 2018), which depends on one sample only.

use crate::trace::Batch;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{GroupNorm, GroupNormConfig, PaddingConfig2d};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

/// The sizes of a U-Net.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UNetConfig {
    /// How often the picture is halved, and made larger again.
    pub depth: usize,
    /// Channels at full size; each halving doubles them.
    pub width: usize,
    /// Groups of channels that are normalized together; they divide the width.
    pub groups: usize,
    /// Channels of the pictures.
    pub channels: usize,
    /// Classes of a pixel.
    pub classes: usize,
    /// Height and width of the pictures.
    pub size: usize,
}

impl UNetConfig {
    /// The network of the paper, for two classes of pixels in coloured pictures.
    pub fn published() -> Self {
        Self { depth: 4, width: 64, groups: 32, channels: 3, classes: 2, size: 256 }
    }

    /// The number of parameters.
    pub fn parameters(&self) -> u64 {
        let double = |from: usize, to: usize| 9 * from * to + 9 * to * to + 4 * to;
        let width = |level: usize| self.width << level;
        let level = |level: usize| {
            let (inside, outside) = (width(level + 1), width(level));
            double(outside, inside) + 4 * inside * outside + outside + double(inside, outside)
        };
        let levels: usize = (0..self.depth).map(level).sum();
        (double(self.channels, self.width) + levels + (self.width + 1) * self.classes) as u64
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> UNet {
        let width = |level: usize| self.width << level;
        let double = |from, to| Double::new([from, to], self.groups, device);
        UNet {
            first: double(self.channels, self.width),
            halve: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            down: (0..self.depth).map(|level| double(width(level), width(level + 1))).collect(),
            up: (0..self.depth)
                .rev()
                .map(|level| {
                    let channels = [width(level + 1), width(level)];
                    let enlarge = ConvTranspose2dConfig::new(channels, [2, 2]).with_stride([2, 2]).init(device);
                    Up { enlarge, double: double(channels[0], channels[1]) }
                })
                .collect(),
            head: Conv2dConfig::new([self.width, self.classes], [1, 1]).init(device),
        }
    }
}

/// A U-Net.
#[derive(Module, Debug)]
pub struct UNet {
    first: Double,
    halve: MaxPool2d,
    down: Vec<Double>,
    up: Vec<Up>,
    head: Conv2d,
}

/// Two convolutions, each normalized.
#[derive(Module, Debug)]
struct Double {
    conv: Conv2d,
    norm: GroupNorm,
    conv_again: Conv2d,
    norm_again: GroupNorm,
}

/// The way up: the picture made larger, beside what it was on the way down.
#[derive(Module, Debug)]
struct Up {
    enlarge: ConvTranspose2d,
    double: Double,
}

impl Double {
    fn new([from, to]: [usize; 2], groups: usize, device: &Device) -> Self {
        let conv = |channels| {
            let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
            Conv2dConfig::new(channels, [3, 3]).with_padding(padding).with_bias(false).init(device)
        };
        let norm = || GroupNormConfig::new(groups, to).init(device);
        Self { conv: conv([from, to]), norm: norm(), conv_again: conv([to, to]), norm_again: norm() }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let x = relu(self.norm.forward(self.conv.forward(x)));
        relu(self.norm_again.forward(self.conv_again.forward(x)))
    }
}

impl UNet {
    /// The logits `[b, classes, h, w]` of pictures `[b, channels, h, w]`.
    pub fn forward(&self, pictures: Tensor<4>) -> Tensor<4> {
        let mut x = self.first.forward(pictures);
        let mut passed = Vec::new();
        for down in &self.down {
            passed.push(x.clone());
            x = down.forward(self.halve.forward(x));
        }
        for (up, beside) in self.up.iter().zip(passed.into_iter().rev()) {
            x = up.double.forward(Tensor::cat(vec![beside, up.enlarge.forward(x)], 1));
        }
        self.head.forward(x)
    }

    /// The mean loss over the pixels of a batch of `images` and their `masks`, the class of each pixel.
    pub fn loss(&self, batch: &mut Batch, config: &UNetConfig, size: usize) -> Tensor<1> {
        let images = batch.float("images", [size, config.channels, config.size, config.size]);
        let masks = batch.int("masks", [size, config.size, config.size]);
        pixel_loss(self.forward(images), masks)
    }
}

/// The mean cross-entropy of `logits` `[b, classes, h, w]` for classes `[b, h, w]`.
pub fn pixel_loss(logits: Tensor<4>, masks: Tensor<3, Int>) -> Tensor<1> {
    let [batch, height, width] = masks.dims();
    let rows = log_softmax(logits.permute([0, 2, 3, 1]), 3);
    rows.gather(3, masks.reshape([batch, height, width, 1])).mean().neg()
}

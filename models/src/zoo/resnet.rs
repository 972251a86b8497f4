//! ResNet with bottlenecks (He et al., "Deep residual learning for image recognition", 2015, table 1),
//! the stride on the 3 x 3 convolution, as it is trained today (Goyal et al., 2017).

use crate::trace::Batch;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

/// How many times wider a block's result is than its inside.
const EXPANSION: usize = 4;

/// The sizes of a ResNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResNetConfig {
    /// The number of blocks of each stage; every stage after the first halves the picture.
    pub stages: Vec<usize>,
    /// The width of the stem and inside the blocks of the first stage; it doubles with every stage.
    pub width: usize,
    /// The number of classes.
    pub classes: usize,
    /// Height and width of the pictures.
    pub size: usize,
}

impl ResNetConfig {
    /// The 50-layer network of the paper.
    pub fn resnet50() -> Self {
        Self { stages: vec![3, 4, 6, 3], width: 64, classes: 1000, size: 224 }
    }

    /// Per block: its inner width, the channels it reads, and its stride.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let first = self.width;
        self.stages.iter().enumerate().flat_map(move |(stage, blocks)| {
            let width = first << stage;
            (0..*blocks).map(move |block| match (stage, block) {
                (0, 0) => (width, first, 1),
                (_, 0) => (width, width / 2 * EXPANSION, 2),
                _ => (width, width * EXPANSION, 1),
            })
        })
    }

    /// The number of parameters; running statistics are none.
    pub fn parameters(&self) -> u64 {
        let norm = |channels: usize| 2 * channels;
        let block = |(width, from, stride): (usize, usize, usize)| {
            let to = width * EXPANSION;
            let shortcut = if stride > 1 || from != to { from * to + norm(to) } else { 0 };
            from * width + 9 * width * width + width * to + 2 * norm(width) + norm(to) + shortcut
        };
        let head = self.blocks().last().map_or(0, |(width, _, _)| (width * EXPANSION + 1) * self.classes);
        (3 * 49 * self.width + norm(self.width) + self.blocks().map(block).sum::<usize>() + head) as u64
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> ResNet {
        let width = self.blocks().last().map_or(self.width, |(width, _, _)| width * EXPANSION);
        let pool =
            MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
        ResNet {
            stem: ConvNorm::new([3, self.width], 7, 2, device),
            pool: pool.init(),
            blocks: self.blocks().map(|sizes| Bottleneck::new(sizes, device)).collect(),
            average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(width, self.classes).init(device),
        }
    }
}

/// A ResNet.
#[derive(Module, Debug)]
pub struct ResNet {
    stem: ConvNorm,
    pool: MaxPool2d,
    blocks: Vec<Bottleneck>,
    average: AdaptiveAvgPool2d,
    head: Linear,
}

/// A convolution and the normalization of its result.
#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
struct Bottleneck {
    reduce: ConvNorm,
    spatial: ConvNorm,
    expand: ConvNorm,
    shortcut: Option<ConvNorm>,
}

impl ConvNorm {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let padding = kernel / 2;
        let conv = Conv2dConfig::new(channels, [kernel, kernel])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
            .with_bias(false)
            .with_initializer(Initializer::KaimingNormal { gain: 2.0f64.sqrt(), fan_out_only: true });
        Self { conv: conv.init(device), norm: BatchNormConfig::new(channels[1]).init(device) }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

impl Bottleneck {
    fn new((width, from, stride): (usize, usize, usize), device: &Device) -> Self {
        let to = width * EXPANSION;
        let changes = stride > 1 || from != to;
        Self {
            reduce: ConvNorm::new([from, width], 1, 1, device),
            spatial: ConvNorm::new([width, width], 3, stride, device),
            expand: ConvNorm::new([width, to], 1, 1, device),
            shortcut: changes.then(|| ConvNorm::new([from, to], 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = relu(self.reduce.forward(x.clone()));
        let y = relu(self.spatial.forward(y));
        let y = self.expand.forward(y);
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        relu(x + y)
    }
}

impl ResNet {
    /// The logits `[b, classes]` of pictures `[b, 3, h, w]`.
    pub fn forward(&self, pictures: Tensor<4>) -> Tensor<2> {
        let mut x = self.pool.forward(relu(self.stem.forward(pictures)));
        for block in &self.blocks {
            x = block.forward(x);
        }
        let [batch, width, _, _] = x.dims();
        self.head.forward(self.average.forward(x).reshape([batch, width]))
    }

    /// The loss of a batch of `images` and `labels`.
    pub fn loss(&self, batch: &mut Batch, config: &ResNetConfig, size: usize) -> Tensor<1> {
        let images = batch.float("images", [size, 3, config.size, config.size]);
        let labels = batch.int("labels", [size]);
        let logits = self.forward(images);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}

//! An MLP-mixer (Tolstikhin et al., 2021) for pictures cut into patches: a model of one's own,
//! as its author would write it in Burn, and the few lines that plan and train it.
//!
//! It takes a cluster: `mixer cuda:2` runs as one process per GPU.

use burn::config::Config;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use shardc::{Batch, Cluster, Decay, Feeds, FromInitialisers, LearningRate, Options, TrainOptions};
use shardc_ir::HostTensor;
use std::ops::ControlFlow;

const PATCHES: u64 = 16;
const PATCH_WIDTH: u64 = 48;
const CLASSES: u64 = 10;

#[derive(Config, Debug)]
struct MixerConfig {
    patches: usize,
    patch_width: usize,
    width: usize,
    hidden: usize,
    layers: usize,
    classes: usize,
}

#[derive(Module, Debug)]
struct Mixer {
    embed: Linear,
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

impl MixerConfig {
    fn init(&self, device: &Device) -> Mixer {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(self.width).init(device);
        let mlp = |width| Mlp { up: linear(width, self.hidden), down: linear(self.hidden, width) };
        let block = || Block {
            token_norm: norm(),
            token_mlp: mlp(self.patches),
            channel_norm: norm(),
            channel_mlp: mlp(self.width),
        };
        Mixer {
            embed: linear(self.patch_width, self.width),
            blocks: (0..self.layers).map(|_| block()).collect(),
            norm: norm(),
            head: linear(self.width, self.classes),
        }
    }
}

impl Mlp {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

impl Mixer {
    /// The logits `[b, classes]` of pictures `[b, patches, patch_width]`.
    fn forward(&self, pictures: Tensor<3>) -> Tensor<2> {
        let mut x = self.embed.forward(pictures);
        for block in &self.blocks {
            let mixed = block.token_mlp.forward(block.token_norm.forward(x.clone()).swap_dims(1, 2));
            x = x + mixed.swap_dims(1, 2);
            x = x.clone() + block.channel_mlp.forward(block.channel_norm.forward(x));
        }
        let [batch, _, width] = x.dims();
        self.head.forward(self.norm.forward(x).mean_dim(1).reshape([batch, width]))
    }
}

/// Pictures of noise on which each class leaves a mark of its own: something to be learned.
fn pictures(batch: u64, step: u64) -> Feeds {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for row in 0..batch {
        let label = (row * 31 + step * 17) % CLASSES;
        for at in 0..PATCHES * PATCH_WIDTH {
            // The fraction of a large multiple is noise enough.
            let noise = ((row * 7919 + step * 104_729 + at * 15_485_863) as f64 * 0.618_033_988_749).fract() as f32;
            pixels.push(noise - 0.5 + if at % CLASSES == label { 0.5 } else { 0.0 });
        }
        labels.push(label as i64);
    }
    let pictures = HostTensor::from_f32([batch, PATCHES, PATCH_WIDTH], &pixels);
    Feeds::from([
        ("pictures".into(), pictures.into()),
        ("labels".into(), HostTensor::from_i64([batch], &labels).into()),
    ])
}

fn main() -> Result<(), shardc::Error> {
    let (patches, patch_width, classes) = (PATCHES as usize, PATCH_WIDTH as usize, CLASSES as usize);
    let config = MixerConfig::new(patches, patch_width, 64, 128, 2, classes);
    let model = |batch: Batch| {
        let size = batch.batch as usize;
        shardc_models::trace(
            "mixer",
            |device| config.init(device),
            |mixer, inputs| {
                let logits = mixer.forward(inputs.float("pictures", [size, patches, patch_width]));
                let labels = inputs.int("labels", [size]);
                CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
            },
        )
    };
    let cluster = Cluster::parse(&std::env::args().nth(1).unwrap_or("cpu:4".into()), "h200")?;
    let compiled = shardc::compile(&model, Batch { batch: 32, seq: 0 }, &cluster, &Options::default())?;
    if shardc::launch::is_lead() {
        println!("{}", shardc::report::plan_text(compiled.plan()));
    }
    let learning_rate = LearningRate { rate: 2e-3, min_rate: 0.0, warmup: 5, decay: Decay::Cosine, steps: 40 };
    let mut trainer = compiled.train(
        &FromInitialisers,
        TrainOptions { learning_rate, seed: 0 },
        |step| Ok(pictures(32, step)),
        |step| {
            println!("step {:>3}  loss {:.4}", step.step, step.loss);
            ControlFlow::Continue(())
        },
    )?;
    if let Some(dir) = std::env::args_os().nth(2) {
        trainer.save(dir.as_ref())?;
    }
    Ok(())
}

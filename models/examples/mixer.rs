//! An MLP-mixer (Tolstikhin et al., 2021) for pictures cut into patches: a model that is not in
//! the zoo, as its author would write it in Burn, and the few lines that trace it.

use burn::config::Config;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};

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

fn main() -> Result<(), shardc_models::TraceError> {
    let config = MixerConfig::new(64, 48, 128, 256, 4, 10);
    let model = shardc_models::trace(
        "mixer",
        |device| config.init(device),
        |mixer, batch| {
            let logits = mixer.forward(batch.float("pictures", [32, 64, 48]));
            let labels = batch.int("labels", [32]);
            CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
        },
    )?;
    println!("{}: {} parameters, {} operations", model.name, model.parameters, model.graph.node_count());
    for (_, node) in model.graph.nodes() {
        let types: Vec<String> = node.results.iter().map(|value| model.graph.ty(*value).to_string()).collect();
        println!("{:24} {:12} {}", types.join(", "), node.op.name(), node.path);
    }
    Ok(())
}

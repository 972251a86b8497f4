//! Models, written as ordinary Burn modules: language models, and others that share no operation but the
//! product with them.
//!
//! What a trace of the language models holds (raising composite operations relies on it; `d` is the width, all
//! dimensions are `[b, s, …]`):
//!
//! * Parameters: `token.weight`, `position` (GPT-2), `blocks.N.attention_norm.gamma`,
//!   `blocks.N.attention.{query,key,value,output}.weight`, `blocks.N.mlp_norm.gamma`,
//!   `blocks.N.mlp.{gate,up,down}.weight`, `norm.gamma`, `head.weight` where the head is not tied;
//!   GPT-2 also has biases (`.bias`, `.beta`). A linear weight is `[in, out]`.
//! * RMS norm: `mul x x`, `reduce_sum[2]`, `affine(1/d, eps)`, `rsqrt`, `broadcast[0,1]`, `mul x _`,
//!   `broadcast gamma [2]`, `mul`.
//! * Rotary of `x` `[b, s, h, d]`: `slice` twice, `broadcast cos/sin [1,3]`, four `mul`,
//!   `sub x1 cos, x2 sin`, `add x2 cos, x1 sin`, `concat[3]`. `cos` and `sin` `[s, d/2]` are made
//!   once: `iota`, `cast`, products with a literal, `cos`, `sin`.
//! * Attention: projections `bsk,kn->bsn`, `reshape [b, s, h, d]`, rotary, `attention` (causal, with
//!   its own number of key/value heads), `reshape [b, s, h*d]`, projection. No transpose is left.
//! * SwiGLU: `silu(gate)`, `mul _ up`.
//! * GPT-2: `layer_norm`; every projection followed by `broadcast bias [2]`, `add`; `gelu_tanh`.
//! * Tied head: `matmul bsk,nk->bsn` with the table.
//! * Loss: labels shifted by `slice`, `concat`; `eq -100`, `select`; `cross_entropy`;
//!   `sub lse, picked`; `select` zero where ignored; `reduce_sum`; divided by the number of labels
//!   that are not ignored (`not`, `cast`, `reduce_sum`). Results: `loss`, `logits`.

mod config;
mod gpt2;
mod list;
mod llama;
mod loss;
mod mixer;
mod moe;
mod resnet;
mod shrink;
mod two_tower;
mod unet;

pub use config::{Config, Range, ZooError, build_config};
pub use gpt2::{Gpt2, Gpt2Config};
pub use list::{Entry, build, list};
pub use llama::{Llama, LlamaConfig, RopeScaling};
pub use loss::{IGNORED, causal_loss};
pub use mixer::{Mixer, MixerConfig};
pub use moe::{Moe, MoeConfig};
pub use resnet::{ResNet, ResNetConfig};
pub use two_tower::{TwoTower, TwoTowerConfig, in_batch_loss};
pub use unet::{UNet, UNetConfig, pixel_loss};

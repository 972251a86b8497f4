//! Small models of the same kind, on which a plan is tried out.

use super::{Config, LlamaConfig, MixerConfig, MoeConfig, ResNetConfig, TwoTowerConfig, UNetConfig};

/// Data and tensor ranks.
struct Ranks {
    dp: usize,
    tp: usize,
}

impl Ranks {
    fn unit(&self) -> usize {
        4 * self.dp * self.tp
    }

    /// A small size that the tensor ranks divide if they divide this one.
    fn keep(&self, size: usize, small: usize) -> usize {
        if size.is_multiple_of(self.tp) { small } else { small + 1 }
    }
}

impl Config {
    /// A model with few layers and small dimensions, of which `tp` and `dp` divide what they divided.
    pub fn shrunk(&self, dp: u64, tp: u64) -> Self {
        let ranks = Ranks { dp: dp as usize, tp: tp as usize };
        let (unit, tp) = (ranks.unit(), ranks.tp);
        match self {
            Self::Llama(config) => Self::Llama(llama(config, &ranks)),
            Self::Gpt2(config) => {
                let mut small = config.clone();
                small.layers = config.layers.min(2);
                small.heads = if config.heads.is_multiple_of(tp) { tp } else { config.heads };
                small.width = small.heads * 8 * ranks.dp;
                small.hidden = 4 * small.width;
                small.vocabulary = ranks.keep(config.vocabulary, 16 * unit);
                // Sequences have eight tokens for each rank that divides them.
                small.positions = config.positions.max(8 * tp);
                Self::Gpt2(small)
            }
            Self::Moe(config) => {
                let experts = config.experts.min(16);
                Self::Moe(MoeConfig { base: llama(&config.base, &ranks), experts, group: 8, ..config.clone() })
            }
            Self::ResNet(config) => {
                let stages = config.stages.iter().take(2).map(|blocks| 1.min(*blocks)).collect();
                Self::ResNet(ResNetConfig {
                    stages,
                    width: unit,
                    classes: ranks.keep(config.classes, 2 * unit),
                    size: 16,
                })
            }
            Self::UNet(config) => {
                let groups = ranks.keep(config.groups, tp);
                let width = unit.next_multiple_of(groups);
                Self::UNet(UNetConfig { depth: config.depth.min(2), width, groups, size: 8, ..config.clone() })
            }
            Self::Mixer(config) => Self::Mixer(MixerConfig {
                layers: config.layers.min(2),
                width: 2 * unit,
                token_hidden: ranks.keep(config.token_hidden, 2 * unit),
                channel_hidden: ranks.keep(config.channel_hidden, 4 * unit),
                patch: 4,
                size: 16,
                classes: ranks.keep(config.classes, 4 * unit),
            }),
            Self::TwoTower(config) => Self::TwoTower(TwoTowerConfig {
                users: ranks.keep(config.users, 16 * unit),
                items: ranks.keep(config.items, 16 * unit),
                width: ranks.keep(config.width, 2 * unit),
                hidden: config.hidden.iter().map(|size| ranks.keep(*size, 2 * unit)).collect(),
                temperature: config.temperature,
            }),
        }
    }
}

fn llama(config: &LlamaConfig, ranks: &Ranks) -> LlamaConfig {
    let mut small = config.clone();
    let (group, unit) = (config.heads / config.kv_heads, ranks.unit());
    small.layers = config.layers.min(2);
    small.kv_heads = if config.kv_heads.is_multiple_of(ranks.tp) { ranks.tp } else { config.kv_heads };
    small.heads = small.kv_heads * group;
    small.head_width = 8;
    small.width = 2 * unit;
    small.hidden = ranks.keep(config.hidden, 4 * unit);
    small.vocabulary = ranks.keep(config.vocabulary, 16 * unit);
    small
}

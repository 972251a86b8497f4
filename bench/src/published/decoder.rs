//! The sizes of a decoder: those that its source printed, and those that its family published.

use super::block::Shape;
use super::rows::Row;

/// The sizes of a decoder. Its layers consist of parts, each with a norm and a residual sum of its
/// own; a part that not all layers have is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decoder {
    /// Layers.
    pub layers: u64,
    /// Width.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width inside a dense feed-forward network.
    pub ffn: u64,
    /// Vocabulary entries.
    pub vocab: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Whether the feed-forward network has a gate (SwiGLU); such a model also turns its queries and keys.
    pub is_gated: bool,
    /// Whether the head has a matrix of its own.
    pub is_untied: bool,
    /// Whether queries, keys and values come out of a narrow latent vector.
    pub is_latent: bool,
    /// Layers with attention.
    pub attentions: u64,
    /// Layers with a dense network.
    pub networks: u64,
    /// Layers with experts.
    pub routed: u64,
    /// Layers with a state-space scan.
    pub scans: u64,
    /// Experts of such a layer; 1 if there are none.
    pub experts: u64,
    /// Experts that each token visits.
    pub visited: u64,
    /// Experts that every token visits besides.
    pub shared: u64,
    /// Width inside an expert.
    pub expert_ffn: u64,
    /// Entries of a scan's state per channel.
    pub state: u64,
}

/// Ranks and head widths of latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 3.1.2; the same in V3).
pub struct Latent;

impl Latent {
    /// Of queries.
    pub const QUERY: u64 = 1536;
    /// Of keys and values.
    pub const KEY: u64 = 512;
    /// Part of a query or key that is turned.
    pub const ROTARY: u64 = 64;
    /// The rest of it, and a value's width.
    pub const HEAD: u64 = 128;
}

/// Groups of a Mamba-2 layer that share their input and output maps, and channels of one head
/// (NVIDIA, "Nemotron-H", 2025, table 1).
pub const SCAN_GROUPS: u64 = 8;
/// Channels of one head of a scan.
pub const SCAN_HEAD: u64 = 64;

/// What sources leave out because the model's own report has it. This table is the one place for facts
/// about single models: a row's `kind` names an entry, nothing else looks at names of models.
struct Published {
    name: &'static str,
    /// [`Decoder::is_gated`] and [`Decoder::is_untied`].
    has: [bool; 2],
    /// Width, heads, key heads, dense feed-forward width, vocabulary.
    sizes: [u64; 5],
    /// Layers with attention, a dense network, experts, a scan.
    parts: [u64; 4],
    state: u64,
    expert_ffn: u64,
}

const PUBLISHED: [Published; 7] = [
    // Meta, "Llama 3.2" model card and configuration, 2024.
    Published {
        name: "llama3.2-1b",
        has: [true, false],
        sizes: [2048, 32, 8, 8192, 128256],
        parts: [16, 16, 0, 0],
        state: 0,
        expert_ffn: 0,
    },
    // Gemma Team, "Gemma 2", 2024, table 1, whose feed-forward width counts both halves of the gate.
    Published {
        name: "gemma2-9b",
        has: [true, false],
        sizes: [3584, 16, 8, 14336, 256128],
        parts: [42, 42, 0, 0],
        state: 0,
        expert_ffn: 0,
    },
    // NVIDIA, "Nemotron-H", 2025, table 1 and section 2.1.
    Published {
        name: "nemotron-h-56b",
        has: [false, true],
        sizes: [8192, 64, 8, 32768, 131072],
        parts: [10, 54, 0, 54],
        state: 256,
        expert_ffn: 0,
    },
    Published {
        name: "nemotron-h-8b",
        has: [false, true],
        sizes: [4096, 32, 8, 21504, 131072],
        parts: [4, 24, 0, 24],
        state: 128,
        expert_ffn: 0,
    },
    // Meta's Llama 4 configurations: every second layer of Maverick is dense, none of Scout's.
    Published {
        name: "llama4-maverick",
        has: [true, true],
        sizes: [5120, 40, 8, 16384, 202048],
        parts: [48, 24, 24, 0],
        state: 0,
        expert_ffn: 8192,
    },
    Published {
        name: "llama4-scout",
        has: [true, true],
        sizes: [5120, 40, 8, 16384, 202048],
        parts: [48, 0, 48, 0],
        state: 0,
        expert_ffn: 8192,
    },
    // DeepSeek-AI, "DeepSeek-V3", 2024, section 4.2.
    Published {
        name: "deepseek-v3",
        has: [true, true],
        sizes: [7168, 128, 128, 18432, 129280],
        parts: [61, 3, 58, 0],
        state: 0,
        expert_ffn: 2048,
    },
];

/// Words for models whose layers differ, or have other parts than a decoder's.
const OTHERS: [&str; 9] = ["t5", "encoder", "unet", "diffusion", "resnet", "wresnet", "wrn", "convnet", "vit"];

impl Decoder {
    /// The sizes of a run's model.
    ///
    /// # Errors
    /// Says which size is not known, or does not divide.
    pub fn of(row: &Row) -> Result<Self, String> {
        let model = &row.model;
        let kind = model.kind.to_lowercase();
        let published = PUBLISHED.iter().find(|known| kind.contains(known.name));
        let size = |name: &str, value: Option<u64>, index: usize| {
            let value = value.filter(|value| *value > 0).or(published.map(|known| known.sizes[index]));
            value.ok_or_else(|| format!("the model's {name} is not known"))
        };
        if let Some(word) = kind.split(|letter: char| !letter.is_alphanumeric()).find(|word| OTHERS.contains(word)) {
            return Err(format!("a `{word}` is not a stack of equal decoder layers"));
        }
        if kind.contains("mamba") && published.is_none() {
            return Err("the parts of its layers are not known".to_string());
        }
        let layers = model.layers.filter(|layers| *layers > 0).ok_or("the model's number of layers is not known")?;
        let seq = model.seq.filter(|seq| *seq > 0).ok_or("the model's sequence length is not known")?;
        let heads = size("number of heads", model.heads, 1)?;
        let (experts, visited) = if has_experts(row) { experts(&kind)? } else { (1, 1) };
        let ffn = size("feed-forward width", model.ffn, 3)?;
        let otherwise = if experts > 1 { [layers, 0, layers, 0] } else { [layers, layers, 0, 0] };
        // A report's counts, for as many layers as the run has.
        let parts = published.map_or(otherwise, |known| {
            let whole: u64 = known.parts[0].max(known.parts.iter().sum::<u64>() - known.parts[0]);
            known.parts.map(|count| if known.parts[3] > 0 { count } else { count * layers / whole.max(1) })
        });
        if parts[3] > 0 && parts.iter().sum::<u64>() != layers {
            return Err(format!("the parts of {layers} layers are not known, only those of the whole model"));
        }
        let hidden = size("width", model.hidden, 0)?;
        let [is_gated, is_untied] = published.map_or_else(|| form(&kind, hidden, ffn), |known| known.has);
        let decoder = Self {
            layers,
            hidden,
            heads,
            kv_heads: model
                .kv_heads
                .filter(|heads| *heads > 0)
                .or(published.map(|known| known.sizes[2]))
                .unwrap_or(heads),
            ffn,
            vocab: size("vocabulary", model.vocab, 4).unwrap_or(51200),
            seq,
            is_gated,
            is_untied,
            is_latent: kind.contains("mla"),
            attentions: parts[0],
            networks: parts[1],
            routed: parts[2],
            scans: parts[3],
            experts,
            visited,
            shared: u64::from(kind.contains("shared")),
            expert_ffn: published.map(|known| known.expert_ffn).filter(|width| *width > 0).unwrap_or(ffn),
            state: published.map_or(0, |known| known.state),
        };
        let divides = decoder.hidden.is_multiple_of(heads) && heads.is_multiple_of(decoder.kv_heads);
        if divides || decoder.is_latent {
            Ok(decoder)
        } else {
            Err(format!("{heads} heads do not divide the width or the key heads"))
        }
    }

    /// Width of a head of attention: of a query and of a value, the mean where they differ.
    pub fn head_width(&self) -> u64 {
        if self.is_latent { Latent::HEAD + Latent::ROTARY / 2 } else { self.hidden / self.heads }
    }

    /// Matrices of a feed-forward network.
    pub fn matrices(&self) -> u64 {
        if self.is_gated { 3 } else { 2 }
    }

    /// Channels of a scan.
    pub fn scan_width(&self) -> u64 {
        2 * self.hidden
    }

    /// What enters a scan, per token: channels, their gate, the maps of its groups, a step per head.
    pub fn scan_input(&self) -> u64 {
        2 * self.scan_width() + 2 * SCAN_GROUPS * self.state + self.scan_width() / SCAN_HEAD
    }

    /// Parameters of the mean layer on one rank: those every data rank holds, and those of experts.
    pub fn layer_parameters(&self, shape: Shape) -> (f64, f64) {
        let [h, t, layers] = [self.hidden, shape.tensor, self.layers].map(|size| size as f64);
        let attention = if self.is_latent {
            let heads = self.heads as f64 / t;
            let up = (Latent::QUERY * (Latent::HEAD + Latent::ROTARY) + Latent::KEY * 2 * Latent::HEAD) as f64 * heads;
            up + h * (Latent::QUERY + Latent::KEY + Latent::ROTARY) as f64 + heads * Latent::HEAD as f64 * h
        } else {
            h * (self.head_width() * (2 * self.heads + 2 * self.kv_heads)) as f64 / t
        };
        let network = |width: u64, tensor: u64| self.matrices() as f64 * h * width as f64 / tensor as f64;
        let scan = h * (self.scan_input() + self.scan_width()) as f64 / t;
        let of = |count: u64, parameters: f64| if count > 0 { count as f64 * parameters / layers } else { 0.0 };
        let shared = of(self.routed, self.shared as f64 * network(self.expert_ffn, shape.tensor));
        let dense =
            of(self.attentions, attention) + of(self.networks, network(self.ffn, shape.tensor)) + of(self.scans, scan);
        let experts = network(self.expert_ffn, shape.expert_tensor) * self.experts as f64 / shape.expert as f64;
        (dense + shared, of(self.routed, experts))
    }

    /// Matrices as large as the token table on one rank: where the last stage is the first, a head of its own besides.
    pub fn tables(&self, stages: u64) -> f64 {
        if stages == 1 && self.is_untied { 2.0 } else { 1.0 }
    }

    /// Parameters of the token table on one rank.
    pub fn table_parameters(&self, tensor: u64) -> f64 {
        (self.vocab * self.hidden) as f64 / tensor as f64
    }
}

/// Whether a run's model has experts.
pub fn has_experts(row: &Row) -> bool {
    row.model.kind.to_lowercase().contains("moe")
}

/// Whether a network has a gate and the head its own matrix, by what the source says: the words for the
/// activation; without any, the width. A network without a gate is four times as wide as the stream (Vaswani
/// et al., 2017, section 3.3), one with a gate has another width, since its third matrix would make it larger
/// (Shazeer, "GLU variants improve transformer", 2020, section 2). Models that are gated have untied heads as
/// well, unless [`PUBLISHED`] says otherwise.
fn form(kind: &str, hidden: u64, ffn: u64) -> [bool; 2] {
    let is_plain = ["relu", "gelu"].iter().any(|word| kind.contains(word)) || ffn == 4 * hidden;
    let is_gated = kind.contains("glu") || !is_plain;
    [is_gated, is_gated || kind.contains("untied")]
}

/// Reads `8 experts top-2`.
fn experts(kind: &str) -> Result<(u64, u64), String> {
    let words: Vec<&str> = kind.split_whitespace().collect();
    let experts = words.windows(2).find(|pair| pair[1].starts_with("expert")).and_then(|pair| pair[0].parse().ok());
    let visited = words.iter().find_map(|word| word.strip_prefix("top-")).and_then(|text| text.parse().ok());
    let known =
        experts.zip(visited).filter(|(experts, visited)| (1..=4096).contains(experts) && (1..=64).contains(visited));
    known.ok_or_else(|| "the number of experts is not known".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_heads_follow_from_what_is_published() {
        let of = |kind: &str, hidden, ffn| {
            let mut row = Row::default();
            row.model.kind = kind.to_string();
            (row.model.layers, row.model.hidden, row.model.heads) = (Some(16), Some(hidden), Some(16));
            (row.model.ffn, row.model.seq) = (Some(ffn), Some(1024));
            Decoder::of(&row).map(|decoder| [decoder.is_gated, decoder.is_untied])
        };
        assert_eq!(of("gpt", 2048, 8192), Ok([false, false]));
        assert_eq!(of("a model of no known name", 4096, 11008), Ok([true, true]));
        assert_eq!(of("MoE 8 experts top-2", 4096, 14336), Ok([true, true]));
        assert_eq!(of("a model with SwiGLU", 2048, 8192), Ok([true, true]));
        assert_eq!(of("squared-relu untied", 3072, 9216), Ok([false, true]));
        assert_eq!(of("llama3.2-1b", 2048, 8192), Ok([true, false]));
    }

    #[test]
    fn other_models_are_refused_by_name() {
        for kind in ["T5-11b encoder-decoder", "wresnet 1B", "ViT-22b", "U-Net diffusion"] {
            let mut row = Row::default();
            row.model.kind = kind.to_string();
            let reason = Decoder::of(&row).unwrap_err();
            assert!(reason.contains("is not a stack of equal decoder layers"), "{reason}");
        }
    }

    #[test]
    fn what_is_published_divides() {
        for known in PUBLISHED {
            let mut row = Row::default();
            row.model.kind = known.name.to_string();
            row.model.layers = Some(if known.parts[3] > 0 { known.parts.iter().sum() } else { known.parts[0] });
            row.model.seq = Some(1024);
            let decoder = Decoder::of(&row).unwrap_or_else(|error| panic!("{}: {error}", known.name));
            assert_eq!([decoder.attentions, decoder.networks, decoder.routed, decoder.scans], known.parts);
        }
    }
}

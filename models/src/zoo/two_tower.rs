//! Two towers that meet in a product: retrieval, where every item of a batch is a wrong answer for every
//! user but its own (Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
//! recommendations", 2019, without the correction).

use crate::trace::Batch;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

/// The sizes of a two-tower model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TwoTowerConfig {
    /// The number of users.
    pub users: usize,
    /// The number of items.
    pub items: usize,
    /// The width of the tables.
    pub width: usize,
    /// The widths of the layers of each tower; the last is that of the product.
    pub hidden: Vec<usize>,
    /// What the products are divided by.
    pub temperature: f64,
}

impl TwoTowerConfig {
    /// The number of parameters.
    pub fn parameters(&self) -> u64 {
        let mut from = self.width;
        let mut tower = 0;
        for to in &self.hidden {
            tower += (from + 1) * to;
            from = *to;
        }
        ((self.users + self.items) * self.width + 2 * tower) as u64
    }

    /// The model on a device.
    pub fn init(&self, device: &Device) -> TwoTower {
        let tower = |rows: usize| {
            let table = EmbeddingConfig::new(rows, self.width)
                .with_initializer(Initializer::Normal { mean: 0.0, std: (self.width as f64).sqrt().recip() });
            let mut from = self.width;
            let layers = self.hidden.iter().map(|to| LinearConfig::new(std::mem::replace(&mut from, *to), *to));
            Tower { table: table.init(device), layers: layers.map(|layer| layer.init(device)).collect() }
        };
        TwoTower { user: tower(self.users), item: tower(self.items), temperature: self.temperature }
    }
}

/// A two-tower model.
#[derive(Module, Debug)]
pub struct TwoTower {
    user: Tower,
    item: Tower,
    temperature: f64,
}

#[derive(Module, Debug)]
struct Tower {
    table: Embedding,
    layers: Vec<Linear>,
}

impl Tower {
    /// Vectors `[b, d]` of length 1 for `ids` `[b]`.
    fn forward(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        let [batch] = ids.dims();
        let [_, width] = self.table.weight.dims();
        let mut x = self.table.forward(ids.reshape([batch, 1])).reshape([batch, width]);
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(if index > 0 { relu(x) } else { x });
        }
        let length = ((x.clone() * x.clone()).sum_dim(1) + 1e-6).sqrt();
        x / length
    }
}

impl TwoTower {
    /// How well each item of a batch suits each user: `[b, b]`.
    pub fn forward(&self, users: Tensor<1, Int>, items: Tensor<1, Int>) -> Tensor<2> {
        let (users, items) = (self.user.forward(users), self.item.forward(items));
        users.matmul(items.transpose()) * (1.0 / self.temperature)
    }

    /// The loss of a batch of `users` and the `items` they chose.
    pub fn loss(&self, batch: &mut Batch, size: usize) -> Tensor<1> {
        let (users, items) = (batch.int("users", [size]), batch.int("items", [size]));
        in_batch_loss(self.forward(users, items))
    }
}

/// The mean cross-entropy of scores `[b, b]`, where each row's own column is right.
pub fn in_batch_loss(scores: Tensor<2>) -> Tensor<1> {
    let [batch, _] = scores.dims();
    let own = Tensor::<1, Int>::arange(0..batch as i64, &scores.device()).reshape([batch, 1]);
    log_softmax(scores, 1).gather(1, own).mean().neg()
}

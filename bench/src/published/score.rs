//! How far predictions are from measurements, and whether they put plans in the right order.

use super::predict::{Predicted, predict};
use super::rows::Row;
use std::collections::BTreeMap;

/// What the runs of a group share: model, device and precision in words, and sizes.
type Group = (String, [u64; 7]);

/// One scored run.
pub struct Scored<'a> {
    /// The run.
    pub row: &'a Row,
    /// Its measured seconds.
    pub measured: f64,
    /// Its prediction.
    pub predicted: Predicted,
}

impl Scored<'_> {
    /// The error of the step time, as a share of what was measured.
    pub fn error(&self) -> f64 {
        self.predicted.step.total / self.measured - 1.0
    }

    /// The error of the memory, where some was printed and the batch is known.
    pub fn memory_error(&self) -> Option<f64> {
        let printed = self.row.measured.peak_mem_gib.filter(|gib| *gib > 0.0 && !self.predicted.guesses_batch)?;
        Some(self.predicted.memory / (printed * (1u64 << 30) as f64) - 1.0)
    }

    /// Model FLOPs per token, with full attention: 6 per parameter of a product, 12 per layer, width and key.
    fn flops(&self) -> f64 {
        let decoder = &self.predicted.evaluator.decoder;
        let shape =
            super::block::Shape { tensor: 1, expert: 1, expert_tensor: 1, ..self.predicted.degrees.shape(false) };
        let (dense, experts) = decoder.layer_parameters(shape);
        let visited = experts * decoder.visited as f64 / decoder.experts as f64;
        let layers = decoder.layers as f64;
        let scores = 12.0 * (decoder.attentions * decoder.hidden * decoder.seq) as f64;
        6.0 * (layers * (dense + visited) + decoder.table_parameters(1)) + scores
    }

    /// Seconds at the whole peak rate.
    fn seconds_at_peak(&self) -> f64 {
        let evaluator = &self.predicted.evaluator;
        let device = &evaluator.cluster.device;
        let peak = if evaluator.is_f8 { device.peak_f8.value } else { device.peak_f16.value };
        let tokens = (self.predicted.degrees.global_batch * evaluator.decoder.seq) as f64;
        self.flops() * tokens / (peak * self.row.hardware.count.unwrap_or(1) as f64)
    }

    /// Runs of one group differ in their plan alone.
    fn group(&self) -> Group {
        let decoder = &self.predicted.evaluator.decoder;
        let sizes = [decoder.layers, decoder.hidden, decoder.heads, decoder.ffn, decoder.seq];
        let count = self.row.hardware.count.unwrap_or(1);
        let [a, b, c, d, e] = sizes;
        let key = [a, b, c, d, e, count, self.predicted.degrees.global_batch];
        (format!("{} {} {}", self.row.model.kind, self.row.hardware.gpu, self.row.precision), key)
    }
}

/// The runs of some files, scored; and those that cannot be expressed, with the reason.
pub struct Outcome<'a> {
    /// The scored runs.
    pub scored: Vec<Scored<'a>>,
    /// The others.
    pub refused: Vec<(&'a Row, String)>,
}

/// Predicts every run.
pub fn score(rows: &[Row]) -> Outcome<'_> {
    let mut outcome = Outcome { scored: Vec::new(), refused: Vec::new() };
    for row in rows {
        let scored = predict(row).and_then(|predicted| {
            let measured = row.step_seconds(predicted.degrees.global_batch);
            let measured = measured.ok_or("neither a step time nor tokens per second was measured")?;
            Ok(Scored { row, measured, predicted })
        });
        match scored {
            Ok(scored) => outcome.scored.push(scored),
            Err(reason) => outcome.refused.push((row, reason)),
        }
    }
    outcome
}

/// The figures of one set of runs; shares, not percentages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Runs.
    pub n: usize,
    /// Mean absolute error.
    pub mape: f64,
    /// Median absolute error.
    pub median: f64,
    /// 90th percentile of the absolute error.
    pub p90: f64,
    /// Mean error.
    pub bias: f64,
    /// Kendall's tau, mean over groups of three runs or more; `None` if there is no such group.
    pub tau: Option<f64>,
    /// How much longer the best by prediction took than the best measured, mean over the same groups.
    pub regret: Option<f64>,
    /// Mean absolute error of a predictor that knows the median share of the peak of each source and precision.
    pub baseline_mape: f64,
    /// Runs with printed memory.
    pub memory_n: usize,
    /// Mean absolute error of their memory.
    pub memory_mape: f64,
}

impl Summary {
    /// Sums runs up.
    pub fn of(runs: &[&Scored<'_>]) -> Self {
        let errors: Vec<f64> = runs.iter().map(|run| run.error()).collect();
        let sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
        let memory: Vec<f64> = runs.iter().filter_map(|run| run.memory_error()).map(f64::abs).collect();
        let mut groups: BTreeMap<Group, Vec<(f64, f64)>> = BTreeMap::new();
        for run in runs {
            groups.entry(run.group()).or_default().push((run.predicted.step.total, run.measured));
        }
        let groups: Vec<_> = groups.into_values().filter(|pairs| pairs.len() >= 3).collect();
        let over_groups = |figure: fn(&[(f64, f64)]) -> f64| {
            let figures: Vec<f64> = groups.iter().map(|pairs| figure(pairs)).collect();
            (!figures.is_empty()).then(|| mean(&figures))
        };
        Self {
            n: runs.len(),
            mape: mean(&sizes),
            median: quantile(&sizes, 0.5),
            p90: quantile(&sizes, 0.9),
            bias: mean(&errors),
            tau: over_groups(kendall),
            regret: over_groups(regret),
            baseline_mape: mean(&baseline(runs)),
            memory_n: memory.len(),
            memory_mape: mean(&memory),
        }
    }
}

/// The absolute errors of the constant share of the peak.
fn baseline(runs: &[&Scored<'_>]) -> Vec<f64> {
    let mut shares: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let key = |run: &Scored<'_>| (run.row.source.clone(), run.row.precision.clone());
    let keys: Vec<_> = runs.iter().map(|run| key(run)).collect();
    for (run, (source, precision)) in runs.iter().zip(&keys) {
        shares.entry((source, precision)).or_default().push(run.seconds_at_peak() / run.measured);
    }
    let error = |(run, (source, precision)): (&&Scored<'_>, &(String, String))| {
        let share = quantile(&shares[&(source.as_str(), precision.as_str())], 0.5);
        (run.seconds_at_peak() / share / run.measured - 1.0).abs()
    };
    runs.iter().zip(&keys).map(error).collect()
}

fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The quantile, between neighbours by linear interpolation.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = share * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Kendall's tau of (predicted, measured) pairs.
fn kendall(pairs: &[(f64, f64)]) -> f64 {
    let mut sum = 0.0;
    let mut count = 0.0;
    for (index, a) in pairs.iter().enumerate() {
        for b in &pairs[..index] {
            let sign = (a.0 - b.0) * (a.1 - b.1);
            sum += if sign > 0.0 {
                1.0
            } else if sign < 0.0 {
                -1.0
            } else {
                0.0
            };
            count += 1.0;
        }
    }
    if count > 0.0 { sum / count } else { 0.0 }
}

/// The measured time of the best by prediction over the best measured, minus one.
fn regret(pairs: &[(f64, f64)]) -> f64 {
    let picked = pairs.iter().min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0.0, |pair| pair.1);
    let best = pairs.iter().map(|pair| pair.1).fold(f64::INFINITY, f64::min);
    picked / best - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_regret() {
        let pairs = [(1.0, 10.0), (2.0, 9.0), (3.0, 20.0)];
        assert!((kendall(&pairs) - 1.0 / 3.0).abs() < 1e-12);
        assert!((regret(&pairs) - (10.0 / 9.0 - 1.0)).abs() < 1e-12);
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), 2.0);
    }
}

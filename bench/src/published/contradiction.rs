//! Degrees that no run can have together: each is a slip of whoever wrote them down, and is listed as one.

use super::decoder::Decoder;
use super::rows::{Parallel, Row};

/// The first contradiction between a run's degrees, its devices and its model, as a sentence.
pub fn contradiction(row: &Row, decoder: &Decoder) -> Option<String> {
    let Parallel { dp, tp, pp, cp, ep, microbatch, global_batch, virtual_stages, .. } = row.parallel;
    let known = |value: Option<u64>| value.filter(|value| *value > 0);
    let [dp, tp, pp, cp, ep] = [dp, tp, pp, cp, ep].map(known);
    if let (Some(dp), Some(tp), Some(pp), Some(cp), Some(count)) = (dp, tp, pp, cp, known(row.hardware.count))
        && dp * tp * pp * cp != count
    {
        return Some(format!("{dp} data x {tp} tensor x {cp} context ranks x {pp} stages are not its {count} devices"));
    }
    if let (Some(dp), Some(batch)) = (dp, known(global_batch)) {
        let microbatch = known(microbatch).unwrap_or(1);
        if !batch.is_multiple_of(dp * microbatch) {
            return Some(format!(
                "{batch} sequences are not a multiple of {dp} data ranks x {microbatch} a microbatch"
            ));
        }
    }
    if let (Some(stages), Some(chunks)) = (pp, known(virtual_stages))
        && stages > 1
        // The embedding and the head may be a chunk of their own.
        && stages * chunks > decoder.layers + 2
    {
        return Some(format!("{stages} stages of {chunks} chunks are more than {} layers", decoder.layers));
    }
    if let Some(cp) = cp.filter(|cp| *cp > decoder.seq) {
        return Some(format!("{cp} ranks of a sequence are more than its {} tokens", decoder.seq));
    }
    let expert = ep.filter(|_| decoder.routed > 0)?;
    if !decoder.experts.is_multiple_of(expert) {
        return Some(format!("{expert} ranks do not divide {} experts", decoder.experts));
    }
    let ranks = dp? * tp? * cp.unwrap_or(1);
    (!ranks.is_multiple_of(expert)).then(|| format!("{expert} ranks of experts do not divide the {ranks} of a stage"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(change: fn(&mut Row), expect: Option<&str>) {
        let mut row = Row::default();
        row.model.kind = "gpt".into();
        (row.model.layers, row.model.hidden, row.model.heads) = (Some(24), Some(1024), Some(16));
        (row.model.ffn, row.model.seq, row.hardware.count) = (Some(4096), Some(1024), Some(16));
        row.parallel = Parallel {
            dp: Some(4),
            tp: Some(2),
            pp: Some(2),
            cp: Some(1),
            microbatch: Some(2),
            global_batch: Some(64),
            ..Parallel::default()
        };
        change(&mut row);
        let found = contradiction(&row, &Decoder::of(&row).unwrap());
        assert_eq!(found.as_deref(), expect);
    }

    #[test]
    fn what_cannot_be_together_is_named() {
        check(|_| {}, None);
        check(|row| row.parallel.dp = None, None);
        check(
            |row| row.parallel.dp = Some(3),
            Some("3 data x 2 tensor x 1 context ranks x 2 stages are not its 16 devices"),
        );
        check(
            |row| row.parallel.microbatch = Some(3),
            Some("64 sequences are not a multiple of 4 data ranks x 3 a microbatch"),
        );
        check(
            |row| row.parallel.global_batch = Some(2),
            Some("2 sequences are not a multiple of 4 data ranks x 2 a microbatch"),
        );
        check(|row| row.parallel.virtual_stages = Some(16), Some("2 stages of 16 chunks are more than 24 layers"));
        check(
            |row| (row.parallel.dp, row.parallel.cp, row.hardware.count) = (Some(1), Some(2048), Some(8192)),
            Some("2048 ranks of a sequence are more than its 1024 tokens"),
        );
        // A model without experts has none to divide.
        check(|row| row.parallel.ep = Some(7), None);
    }

    #[test]
    fn experts_lie_on_ranks_of_a_stage() {
        let of = |ep: u64, dp: u64| {
            let mut row = Row::default();
            row.model.kind = "moe 12 experts top-2".into();
            (row.model.layers, row.model.hidden, row.model.heads) = (Some(24), Some(1024), Some(16));
            (row.model.ffn, row.model.seq) = (Some(4096), Some(1024));
            row.parallel = Parallel { dp: Some(dp), tp: Some(1), ep: Some(ep), ..Parallel::default() };
            contradiction(&row, &Decoder::of(&row).unwrap())
        };
        assert_eq!(of(4, 8), None);
        assert_eq!(of(7, 8).as_deref(), Some("7 ranks do not divide 12 experts"));
        assert_eq!(of(6, 8).as_deref(), Some("6 ranks of experts do not divide the 8 of a stage"));
    }
}

//! Peaks found from pieces against what lives at each node.

use super::choice::degrees::Degrees;
use super::choice::pins::Recompute;
use super::estimate::Shape;
use super::estimate::copies::Keeping;
use super::estimate::liveness::{Gradients, Life, Liveness, Peak};
use super::estimate::recompute::Selected;
use super::placed::place_batch;
use crate::cluster::Cluster;
use crate::differentiate::differentiate;
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::quantize::quantize;
use crate::search_tests::{Sizes, llama_with};
use crate::shard::objective::Prices;
use crate::shard::place::place_axes;
use crate::shard::prepare::prepare;
use crate::synthetic::{self, residual};
use proptest::prelude::*;
use shardc_ir::ops::*;
use shardc_ir::{DType, Family, Graph, NoScratch, OutputKind, Role, TensorType, ValueId};

const BATCH: u64 = 16;

/// Models with blocks: of which no two are alike, and which read what is far back; that read one value, which nothing
/// else keeps; and those of a language model, also with products in 8 bits.
fn model(seed: u64, kind: u8) -> Graph {
    let (batch, dtype) = (BATCH, DType::Bf16);
    match kind {
        0 => return residual(synthetic::Sizes { seed, nodes: 40, batch, width: 256, dtype }).unwrap(),
        3 => return with_one_bias(),
        _ => {}
    }
    let sizes = Sizes { layers: 3, batch, seq: 64, hidden: 64, heads: 4, kv: 2, ffn: 128, vocab: 512 };
    let graph = llama_with(sizes, dtype, seed.is_multiple_of(2));
    if kind == 1 { graph } else { quantize(&graph).unwrap() }
}

/// The training step of blocks that all add one value, which is read again only where they are computed again.
fn with_one_bias() -> Graph {
    let mut graph = Graph::new("bias");
    let mut add = |op: Op, of: &[ValueId], types: &[TensorType], path: &str| {
        let node = graph.add_as(op, of, types, path.to_string(), Role::Forward).unwrap();
        graph.node(node).results[0]
    };
    let [rows, matrix, row] = [&[BATCH, 64][..], &[64, 64], &[64]].map(|shape| [TensorType::new(DType::F32, shape)]);
    let sum = || Op::from(Binary { kind: BinaryKind::Add });
    let parameter = |name: String| Op::from(Parameter { name, frozen: false });
    let input = add(Input { name: "x".into() }.into(), &[], &rows, "");
    let bias = add(Affine { scale: 0.5, offset: 1.0 }.into(), &[input], &[], "");
    let mut x = input;
    for path in (0..4).map(|index| format!("layers.{index}")) {
        let gamma = add(parameter(format!("{path}.gamma")), &[], &row, &path);
        let weight = add(parameter(format!("{path}.weight")), &[], &matrix, &path);
        x = add(sum(), &[x, bias], &[], &path);
        let y = add(RmsNorm { eps: 1e-5 }.into(), &[x, gamma], &[], &path);
        let y = add(Matmul::new("bk,kn->bn").into(), &[y, weight], &[], &path);
        x = add(sum(), &[x, y], &[], &path);
    }
    let squares = add(Binary { kind: BinaryKind::Mul }.into(), &[x, x], &[], "loss");
    let loss = add(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }.into(), &[squares], &[], "loss");
    graph.output("loss", loss, OutputKind::Result);
    add_optimizer(differentiate(&graph, "loss").unwrap(), &OptimizerConfig::default()).unwrap()
}

/// What is held while a block is made again at a node, beside what the backward pass reads of it: by all that lives at each
/// node of its forward pass.
fn made_again(liveness: &Liveness<'_>, selected: &Selected<'_>, at: usize) -> u64 {
    let lives = liveness.of;
    let is_made = |block: Option<u64>, class: usize| {
        block.is_some_and(|block| selected.is_again(block, class) && lives.start(block) == Some(at))
    };
    let again = lives.lives.iter().filter(|life| is_made(life.block, life.class));
    let spans = again.flat_map(|life| liveness.held(life, selected).map(|(bytes, span)| (life, bytes, span)));
    let spans: Vec<_> = spans.filter(|(_, _, span)| span.is_some_and(|(from, _)| from == at)).collect();
    let ends = |life: &Life| {
        let in_place = life.given == Some(life.last_forward);
        (if in_place { life.last_forward - 1 } else { life.last_forward }).max(life.made)
    };
    let beside = |position: usize| {
        let (mut here, mut lasting) = (0, 0);
        for (life, bytes, span) in &spans {
            let is_lasting = span.is_some_and(|(_, to)| to > at);
            lasting += if is_lasting { *bytes } else { 0 };
            here += if life.made <= position && (is_lasting || position <= ends(life)) { *bytes } else { 0 };
        }
        let runs = lives.runs.iter().filter(|run| run.position == position && is_made(run.block, run.class));
        (here + runs.map(|run| liveness.scratch[run.class]).max().unwrap_or(0)).saturating_sub(lasting)
    };
    (0..lives.positions).map(beside).max().unwrap_or(0)
}

/// The peak by all that lives at each node.
fn node_by_node(liveness: &Liveness<'_>, selected: &Selected<'_>, of: Gradients, keeping: Option<Keeping<'_>>) -> Peak {
    let lives = liveness.of;
    let mut copies = Vec::new();
    for copy in lives.copies().all().iter().filter(|_| keeping.is_some()) {
        copy.lived(lives.copies(), &liveness.sizes, selected, keeping.unwrap(), &mut |lived| copies.push(lived));
    }
    let peak = |at: usize| {
        let is_there = |(from, to): (usize, usize)| from <= at && at <= to;
        let values = lives.lives.iter().filter(|life| !(life.is_term && of.is_in_place(true)));
        // What is made again and read there alone does not stay.
        let is_brief = |life: &Life, (from, to): (usize, usize)| {
            let start = life.block.filter(|of| selected.is_again(*of, life.class)).and_then(|of| lives.start(of));
            from == to && start == Some(from)
        };
        let held = values.flat_map(|life| {
            liveness.held(life, selected).into_iter().filter(|(_, span)| !span.is_some_and(|span| is_brief(life, span)))
        });
        let here = held.filter(|(_, span)| span.is_some_and(is_there));
        let activations: u64 = here.map(|(bytes, _)| bytes).sum();
        let (mut gradients, mut passing, mut behind) = (0, 0, 0);
        for gradient in &lives.gradients {
            let bytes = liveness.sizes[gradient.class][gradient.result];
            // The sum over the chunks of a head before its last term.
            let (begin, terms) = liveness.terms(gradient);
            if (begin..gradient.made).contains(&at) && !of.is_in_place(gradient.adds_itself) {
                passing += terms * bytes;
            }
            if gradient.made > at {
                continue;
            }
            behind += if gradient.made < at { bytes } else { 0 };
            let kept = (bytes as f64 * of.kept()) as u64;
            gradients += kept;
            // What is reduced to parts is whole until the next node runs.
            let is_whole = at <= gradient.made + usize::from(of.is_reduced());
            if is_whole && !of.is_in_place(gradient.adds_itself) {
                passing += (terms * bytes).saturating_sub(kept);
            }
        }
        // No more waits, or is reduced, than is there.
        let [sums, whole, others] = liveness.staging;
        let (most_reduced, most_waiting) = match of {
            Gradients::Kept(_) => (others, liveness.waiting[0]),
            Gradients::Added { is_reduced: true } => (whole, liveness.waiting[1]),
            Gradients::Added { is_reduced: false } => (0, 0),
        };
        gradients += behind.min(most_waiting);
        let runs = lives.runs.iter().filter(|run| run.position == at);
        let scratch = runs.map(|run| liveness.scratch[run.class]).max().unwrap_or(0);
        let scratch = scratch.max(made_again(liveness, selected, at));
        let scratch = scratch + sums + behind.min(most_reduced.saturating_sub(sums));
        let here = || copies.iter().filter(|lived| is_there((lived.from, lived.to)));
        let bytes = |is_dropped: bool| here().filter(|of| of.is_dropped == is_dropped).map(|of| of.bytes).sum::<u64>();
        let ordered = here().filter(|lived| lived.is_ordered).map(|lived| lived.bytes).max().unwrap_or(0);
        let peak = Peak {
            activations: activations + passing,
            gradients,
            scratch,
            copies: bytes(false),
            gathered: bytes(true),
        };
        (peak.activations + gradients + scratch + peak.copies + peak.gathered, peak, ordered)
    };
    let mut most = (0, Peak::default(), 0);
    for found in (0..=lives.positions).map(peak) {
        if found.0 > most.0 {
            most = found;
        }
    }
    Peak { gathered: most.1.gathered + most.2, ..most.1 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn pieces_find_the_peak_of_all_nodes(
        (seed, kind, is_reduced) in (any::<u64>(), 0u8..4, any::<bool>()),
        tensor in prop::sample::select(vec![1u64, 2]),
        (is_dropped, is_loop, divided) in (any::<bool>(), any::<bool>(), any::<u64>()),
        choices in proptest::collection::vec((any::<u64>(), 0u8..3), 6),
    ) {
        let graph = model(seed, kind);
        let cluster = Cluster::parse("h100:8", "h200").unwrap();
        let prepared = prepare(&graph, BATCH, &NoScratch);
        let mesh = Degrees::new(2).with(Family::Data, &[4]).with(Family::Tensor, &[tensor]).mesh(BATCH);
        let mut placed = place_batch(&prepared, &mesh, &cluster).unwrap().unwrap();
        let conversions = place_axes(&prepared, &mut placed, Prices::default());
        let shape = Shape::new(&prepared, &placed, &conversions, 2, std::slice::from_ref(&mesh));
        let mut liveness = Liveness::new(&prepared, &placed, &conversions, 2);
        // The peak may be anywhere, where few of the values and kernels take much.
        let mut state = seed;
        let mut bytes = || {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            if state >> 61 == 0 { 1_000_000 + (state >> 40) } else { state >> 52 }
        };
        let grown = liveness.grown.iter_mut().flatten();
        liveness.sizes.iter_mut().flatten().zip(grown).for_each(|(size, grown)| {
            *size = bytes();
            *grown = *size / 4 * (bytes() % 4);
        });
        liveness.scratch.iter_mut().for_each(|scratch| *scratch = bytes());
        liveness.staging = [0; 3].map(|_| 4 * bytes());
        liveness.waiting = [0; 2].map(|_| 4 * bytes());
        let is_divided = |class: usize| prepared.is_parameter[class] && divided >> (class % 64) & 1 == 1;
        let part = |class: usize| is_divided(class).then_some((2, class % 2));
        let parts: Vec<_> = (0..prepared.rules.len()).map(part).collect();
        let keeping = Keeping { parts: &parts, is_dropped, is_loop };
        for keeping in [Some(keeping), None] {
            for of in [Gradients::Kept(0.25), Gradients::Added { is_reduced }] {
                let mut profile = liveness.profile(of, keeping);
                for (number, kind) in &choices {
                    let by_block = |block: u64| match number >> (2 * block % 64) & 3 {
                        0 => Recompute::None,
                        1 => Recompute::Selective,
                        _ => Recompute::All,
                    };
                    let selected = match kind {
                        0 => shape.menu().select_by(&by_block),
                        1 => shape.menu().select(Recompute::Values(number % (shape.menu().steps() + 1))),
                        _ => shape.menu().select(Recompute::Blocks(number % 4)),
                    };
                    let expect = node_by_node(&liveness, &selected, of, keeping);
                    prop_assert_eq!(profile.peak(&liveness, &selected, keeping), expect);
                }
            }
        }
    }
}

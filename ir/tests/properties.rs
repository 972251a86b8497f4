//! Properties of the text forms, the factor rules and the layouts, on random graphs and meshes.

use proptest::prelude::*;
use shardc_ir::Family;
use shardc_ir::ops::{
    Affine, Binary, BinaryKind, Broadcast, Cast, Concat, Input, Matmul, OpDef, Pad, Parameter, Reduce, ReduceOp,
    Reshape, Slice, Softmax, SumSquares, Transpose, Unary, UnaryKind,
};
use shardc_ir::pipeline::Schedule;
use shardc_ir::plan::Space;
use shardc_ir::{
    Choice, DType, Graph, Mesh, NodeId, OutputKind, Plan, Program, Role, Sharding, Strategy as NodeStrategy,
    TensorType, ValueId, verify,
};

/// A source of choices: the numbers that proptest made, and makes smaller.
struct Choices<'a>(std::iter::Cycle<std::slice::Iter<'a, u32>>);

impl<'a> Choices<'a> {
    fn new(numbers: &'a [u32]) -> Self {
        Self(numbers.iter().cycle())
    }

    fn below(&mut self, count: usize) -> usize {
        self.0.next().map_or(0, |number| *number as usize % count.max(1))
    }

    fn of<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())].clone()
    }
}

const SIZES: [u64; 5] = [1, 2, 4, 6, 12];

fn shape(choices: &mut Choices<'_>) -> Vec<u64> {
    (0..1 + choices.below(3)).map(|_| choices.of(&SIZES)).collect()
}

/// Adds one random node; leaves where no other fits.
fn add_node(graph: &mut Graph, index: usize, choices: &mut Choices<'_>) {
    let values: Vec<ValueId> = graph.values().map(|(id, _)| id).collect();
    if values.is_empty() || choices.below(5) == 0 {
        let ty = TensorType::new(choices.of(&[DType::F32, DType::Bf16]), shape(choices));
        let name = format!("leaf \"{index}\"; {}", choices.of(&["a", "b.c", "ü"]));
        let added = match choices.below(2) {
            0 => graph.add(Input { name }, &[], &[ty]),
            _ => graph.add(Parameter { name, frozen: choices.below(2) == 0 }, &[], &[ty]),
        };
        added.unwrap();
        return;
    }
    let x = choices.of(&values);
    let ty = graph.ty(x).clone();
    let rank = ty.rank();
    let number = match choices.below(100) {
        0 => f64::INFINITY,
        1 => f64::NEG_INFINITY,
        number => number as f64 / 0.7,
    };
    let all: Vec<usize> = (0..rank).collect();
    let reversed: Vec<usize> = all.iter().rev().copied().collect();
    let ones = vec![1; rank];
    let added = match choices.below(14) {
        0 => graph.add(Unary { kind: choices.of(&[UnaryKind::Exp, UnaryKind::Neg, UnaryKind::Gelu]) }, &[x], &[]),
        1 => graph.add(Binary { kind: choices.of(&[BinaryKind::Add, BinaryKind::Mul, BinaryKind::Div]) }, &[x, x], &[]),
        2 => graph.add(Affine { scale: number, offset: 1.0 / (1.0 + number) }, &[x], &[]),
        3 => graph.add(Reshape {}, &[x], &[ty.with_shape([ty.elements()])]),
        4 => graph.add(Transpose { permutation: reversed }, &[x], &[]),
        5 => graph.add(Reduce { kind: choices.of(&[ReduceOp::Sum, ReduceOp::Max]), dims: all }, &[x], &[]),
        6 if rank == 2 => graph.add(Matmul::new("mk,nk->mn"), &[x, x], &[]),
        7 if rank > 0 => graph.add(Softmax {}, &[x], &[]),
        8 => graph.add(SumSquares {}, &[x], &[]),
        9 => graph.add(
            Broadcast { dims: (1..=rank).collect() },
            &[x],
            &[ty.with_shape([&[3], ty.shape.as_slice()].concat())],
        ),
        10 => graph.add(Cast {}, &[x], &[ty.with_dtype(DType::F16)]),
        11 if rank > 0 => graph.add(Concat { dim: choices.below(rank) }, &[x, x], &[]),
        12 => graph.add(Slice { start: vec![0; rank], limit: ty.shape.clone() }, &[x], &[]),
        _ => graph.add(Pad { low: ones.clone(), high: ones, value: number }, &[x], &[]),
    };
    // Sizes must stay small; a node that cannot be added is left out.
    let Ok(id) = added else { return };
    let role = match choices.below(5) {
        0 => Role::Backward(NodeId::from_u32(choices.below(id.as_u32() as usize) as u32)),
        1 => Role::Recompute(NodeId::from_u32(choices.below(id.as_u32() as usize) as u32)),
        2 => Role::Optimizer,
        _ => Role::Forward,
    };
    graph.annotate(id, choices.of(&["", "blocks.0", "a \"b\"; c"]), role);
}

fn graph(numbers: &[u32]) -> Graph {
    let mut choices = Choices::new(numbers);
    let mut graph = Graph::new(choices.of(&["step", "a b", ""]));
    for index in 0..numbers.len().min(24) / 2 + 1 {
        add_node(&mut graph, index, &mut choices);
    }
    let values: Vec<ValueId> = graph.values().map(|(id, _)| id).collect();
    graph.output("loss", choices.of(&values), OutputKind::Result);
    graph.output("update", choices.of(&values), OutputKind::Result);
    let leaf = graph.leaves().map(|(value, _)| value).next().unwrap();
    graph.output("l \"0\"", leaf, OutputKind::Update(leaf));
    graph
}

fn mesh(choices: &mut Choices<'_>) -> Mesh {
    let mut mesh = Mesh::default();
    let families = [Family::Data, Family::Microbatch, Family::Tensor, Family::Tensor, Family::Pipeline];
    for family in families.into_iter().take(choices.below(6)) {
        mesh.push(family, choices.of(&[1, 2, 3, 4]));
    }
    mesh
}

/// A strategy made of choices that the rule offers, axis by axis.
fn strategy(plan: &Plan, node: NodeId, choices: &mut Choices<'_>) -> NodeStrategy {
    let rule = plan.rule(node);
    plan.mesh.ids().fold(NodeStrategy::default(), |strategy, axis| {
        let choice: Choice = choices.of(&rule.choices(&strategy, axis, &plan.mesh));
        strategy.with(axis, choice)
    })
}

fn plan(numbers: &[u32]) -> Plan {
    let mut choices = Choices::new(numbers);
    let mut plan = Plan { graph: graph(numbers), mesh: mesh(&mut choices), ..Plan::default() };
    for node in plan.graph.nodes().map(|(id, _)| id).collect::<Vec<_>>() {
        plan.strategies[node] = strategy(&plan, node, &mut choices);
    }
    for value in plan.graph.values().map(|(id, _)| id).collect::<Vec<_>>() {
        if choices.below(4) == 0 {
            plan.transient[value] = true;
        }
        if choices.below(4) == 0 {
            plan.spaces[value] = choices.of(&[Space::Host, Space::Disk]);
        }
    }
    plan.reduce_in_loop = choices.below(2) == 0;
    if choices.below(2) == 0 {
        plan.pipeline.schedule = choices.of(&Schedule::ALL);
        plan.pipeline.per_stage = 1 + choices.below(3) as u64;
        for node in plan.graph.nodes().map(|(id, _)| id).collect::<Vec<_>>() {
            plan.pipeline.chunks[node] = choices.of(&[None, Some(0), Some(1), Some(7)]);
        }
    }
    plan.prediction.step.0 = choices.below(1000) as f64 / 7.0;
    plan
}

/// Every index of a shape exactly once over the coordinates of the axes that divide it.
fn check_tiling(shape: &[u64], sharding: &Sharding, mesh: &Mesh) {
    let mut counts = vec![0u64; shape.iter().product::<u64>() as usize];
    for rank in 0..mesh.ranks() {
        for microbatch in 0..mesh.microbatches() {
            let slice = sharding.slice(shape, mesh, &mesh.coordinates(rank, microbatch));
            let local: Vec<u64> = slice.iter().map(|(_, length)| *length).collect();
            assert_eq!(local, sharding.local_shape(shape, mesh));
            for index in 0..local.iter().product::<u64>() {
                let (mut rest, mut at, mut stride) = (index, 0, 1);
                for dim in (0..shape.len()).rev() {
                    at += (slice[dim].0 + rest % local[dim]) * stride;
                    rest /= local[dim];
                    stride *= shape[dim];
                }
                counts[at as usize] += 1;
            }
        }
    }
    let divided: u64 = mesh.extent(sharding.dim_axes().iter());
    let copies = mesh.ranks() * mesh.microbatches() / divided;
    assert!(counts.iter().all(|count| *count == copies), "{shape:?} by {sharding:?}: {counts:?}");
}

fn numbers() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 1..80)
}

const PROGRAM: &str = r#"program rank 0 of 1 {
  arena device 4096
  group 0 = 0
  $0: f32[4,4] device+0 parameter %1
  $1: f32[4,4] device+256 buffer
  input "x": f32[4,4] = [0+2,0+4] [2+2,0+4]
  slot state "w": f32[4,4] = $0 [0+4,0+4] from 0.5
  reading "loss" = $1
  section main {
    0: $1 = all_reduce $0 sum over 0 on communication from node3
    1: $1 = compute affine $0 {scale=2.0, offset=1.0} on compute after 0
  }
  order main 0
}
"#;

/// Texts of every operation, of a plan and of programs.
const TEXTS: [&str; 3] = [
    include_str!("../../tests/golden/graph/ops.ir"),
    include_str!("../../tests/golden/plan/print.ir"),
    include_str!("../../tests/golden/program/print.ir"),
];

/// The graphs, plans and programs of a golden file, without its comments.
fn texts(golden: &str) -> Vec<String> {
    let mut texts = Vec::new();
    for line in golden.lines().filter(|line| !line.starts_with(';')) {
        if line.starts_with("graph ") || line.starts_with("program ") {
            texts.push(String::new());
        }
        if let Some(text) = texts.last_mut() {
            text.push_str(&format!("{line}\n"));
        }
    }
    texts
}

/// The words of a line, and the characters between them.
fn words(line: &str) -> Vec<String> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut words: Vec<String> = Vec::new();
    for c in line.chars() {
        match words.last_mut() {
            Some(last) if is_word(c) && last.chars().all(is_word) => last.push(c),
            _ => words.push(c.to_string()),
        }
    }
    words
}

/// A text of which some lines and words are left out, doubled or exchanged, and some numbers are others: one alone, or
/// all that are equal.
fn rewritten(text: &str, changes: &[(u32, u32, u32)]) -> String {
    const NUMBERS: [&str; 14] = [
        "0",
        "1",
        "2",
        "3",
        "31",
        "33",
        "256",
        "4294967295",
        "4294967296",
        "72057594037927936",
        "9223372036854775807",
        "18446744073709551615",
        "-1",
        "1e400",
    ];
    let is_number = |word: &String| word.chars().all(|c| c.is_ascii_digit());
    let mut lines: Vec<Vec<String>> = text.lines().map(words).collect();
    for (at, what, other) in changes {
        let (at, other) = (*at as usize % lines.len(), *other as usize);
        let (number, second) = (NUMBERS[other % NUMBERS.len()], other % lines.len());
        let numbers: Vec<usize> = (0..lines[at].len()).filter(|word| is_number(&lines[at][*word])).collect();
        let (word, count) = ((*what / 8) as usize, lines[at].len());
        match what % 8 {
            0 if lines.len() > 1 => drop(lines.remove(at)),
            1 => lines.insert(at, lines[second].clone()),
            2 => lines.swap(at, second),
            3 if count > 0 => drop(lines[at].remove(word % count)),
            4 if count > 0 => lines[at].swap(word % count, other % count),
            5 if !numbers.is_empty() => {
                let old = lines[at][numbers[word % numbers.len()]].clone();
                lines.iter_mut().flatten().filter(|word| **word == old).for_each(|word| *word = number.to_string());
            }
            _ if !numbers.is_empty() => lines[at][numbers[word % numbers.len()]] = number.to_string(),
            _ => {}
        }
    }
    lines.iter().map(|line| line.concat() + "\n").collect()
}

/// Reads a text as all that it may be; what can be read is verified, counted and written.
fn read(text: &str) {
    if let Ok(graph) = text.parse::<Graph>() {
        for (id, node) in graph.nodes() {
            let (operands, results) = (graph.operand_types(id), graph.result_types(id));
            drop(graph.rule(id).to_string());
            let _ = (node.op.flops(&operands, &results), node.op.bytes(&operands, &results));
        }
        drop((verify::graph(&graph), graph.to_string()));
    }
    if let Ok(plan) = text.parse::<Plan>() {
        drop((verify::plan(&plan), Plan::from_json(&plan.to_json())));
    }
    if let Ok(programs) = Program::parse_all(text) {
        drop(verify::program(&programs));
    }
}

#[test]
fn sizes_that_cannot_be_counted_are_refused() {
    let check = |lines: &str, expect: &str| {
        let error = format!("graph @a {{\n{lines}\n}}").parse::<Graph>().unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    let most = u64::MAX;
    let x = "%0: f32[2,4] = input \"x\"\n";
    check(&format!("{x}%1: f32[1,4] = pad %0 {{low=[{most},0], high=[0,0], value=0.0}}"), "line 3: pad: f32[18446");
    let wide = format!("%0: f32[{0}] = input \"x\"\n%1: f32[4] = concat %0, %0 {{dim=0}}", 1u64 << 54);
    check(&wide, "line 3: concat: f32[36028797018963968] is larger than 72057594037927936 bytes");
    check(
        &format!("%0: i64[4] = iota {{dim=0, start={most}}}"),
        "iota: `start` is 18446744073709551615; it must be at",
    );
    let table = format!("{x}%1: i64[3] = input \"ids\"\n%2: f32[3,4] = embedding %0, %1 {{start={most}}}");
    check(&table, "line 4: embedding: `start` is 18446744073709551615");
    let labels = format!("{x}%1: i64[2] = input \"y\"\n%2: f32[2], %3: f32[2] = cross_entropy %0, %1 {{start={most}}}");
    check(&labels, "line 4: cross_entropy: `start` is 18446744073709551615");
    let q = "%0: f32[1,2,2,4] = input \"q\"\n%1: f32[1,2,2,4], %2: f32[1,2,2] = attention %0, %0, %0";
    check(
        &format!("{q} {{causal=true, scale=1.0, lead={}}}", i64::MIN),
        "attention: the size of `lead` is 9223372036854775808",
    );
    for parts in [0, 1, 3] {
        let expect =
            format!("attention: `reversed` is {parts}; it must be a number of parts, two or more, that divides");
        check(&format!("{q} {{causal=true, scale=1.0, reversed={parts}}}"), &expect);
    }
    // A region's steps have types of their own.
    let step =
        r#"{"op":{"constant":{"value":1.0}},"operands":[],"results":[{"dtype":"f32","shape":[4611686018427387904]}]}"#;
    let region = format!("%0: f32[] = fused {{steps=[{step}], results=[0]}}");
    check(&region, "constant: f32[4611686018427387904] is larger than");
}

#[test]
fn operations_are_joined_in_programs_alone() {
    for op in [
        r#"each %0, %0 {count=2, op={"sum_squares":{}}}"#,
        r#"fused %0 {steps=[{"op":{"sum_squares":{}},"operands":[0],"results":[{"dtype":"f32","shape":[]}],"source":4294967294}], results=[1]}"#,
    ] {
        let results = if op.starts_with("each") { "%1: f32[], %2: f32[]" } else { "%1: f32[]" };
        let text = format!("graph @a {{\n%0: f32[4] = input \"x\"\n{results} = {op}\nreturn loss %1\n}}");
        let error = verify::graph(&text.parse::<Graph>().unwrap()).unwrap_err().to_string();
        assert!(error.contains("joins instructions of a program"), "{error}");
    }
}

#[test]
fn microbatches_that_no_step_has_are_refused() {
    let text = "graph @a {\n  mesh time mb=4294967295\n  %0: f32[] = input \"x\"\n  return loss %0\n}\n";
    let error = verify::plan(text.parse::<Plan>().unwrap()).unwrap_err().to_string();
    assert!(error.contains("mesh: 4294967295 microbatches; a step has at most 1048576"), "{error}");
}

/// A text with some characters replaced, removed or doubled.
fn mutated(text: &str, mutations: &[(u32, u32)]) -> String {
    const ALPHABET: &[char] =
        &['%', '$', '{', '}', '[', ']', '"', '=', ',', ':', '@', '/', '.', '0', '9', '-', 'é', '\n', '\\', ';'];
    let mut text: Vec<char> = text.chars().collect();
    for (at, what) in mutations {
        if text.is_empty() {
            break;
        }
        let at = *at as usize % text.len();
        let new = ALPHABET[(*what / 4) as usize % ALPHABET.len()];
        match what % 4 {
            0 => drop(text.remove(at)),
            1 => text[at] = new,
            2 => text.insert(at, new),
            _ => text.truncate(text.len() - at % 8),
        }
    }
    text.into_iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn graphs_round_trip(numbers in numbers()) {
        let graph = graph(&numbers);
        let text = graph.to_string();
        match text.parse::<Graph>() {
            Ok(read) => prop_assert_eq!(read, graph, "{}", text),
            Err(found) => prop_assert!(false, "{}\n{}", found, text),
        }
    }

    #[test]
    fn plans_round_trip(numbers in numbers()) {
        let plan = plan(&numbers);
        let text = plan.to_string();
        match text.parse::<Plan>() {
            Ok(read) => prop_assert_eq!(read.to_string(), text),
            Err(found) => prop_assert!(false, "{}\n{}", found, text),
        }
        prop_assert_eq!(Plan::from_json(&plan.to_json()).unwrap(), plan);
    }

    #[test]
    fn offered_choices_are_legal_and_their_layouts_tile(numbers in numbers()) {
        let plan = plan(&numbers);
        for (id, node) in plan.graph.nodes() {
            let (rule, strategy) = (plan.rule(id), &plan.strategies[id]);
            prop_assert_eq!(rule.check(strategy, &plan.mesh), Ok(()));
            for (index, value) in node.results.iter().enumerate() {
                let (shape, sharding) = (&plan.graph.ty(*value).shape, rule.result_sharding(index, strategy));
                prop_assert_eq!(sharding.check(shape, &plan.mesh), Ok(()));
                if shape.iter().product::<u64>() < 1000 {
                    check_tiling(shape, &sharding, &plan.mesh);
                }
            }
            for (index, value) in node.operands.iter().enumerate() {
                let sharding = rule.operand_sharding(index, strategy);
                prop_assert_eq!(sharding.check(&plan.graph.ty(*value).shape, &plan.mesh), Ok(()));
            }
        }
    }

    #[test]
    fn whatever_is_read_is_counted(
        which in any::<(u32, u32)>(),
        changes in prop::collection::vec(any::<(u32, u32, u32)>(), 1..4),
    ) {
        let texts = texts(TEXTS[which.0 as usize % TEXTS.len()]);
        read(&rewritten(&texts[which.1 as usize % texts.len()], &changes));
    }

    #[test]
    fn parsers_and_verifiers_never_panic(
        numbers in numbers(),
        mutations in prop::collection::vec((any::<u32>(), any::<u32>()), 1..12),
    ) {
        let plan = plan(&numbers);
        if let Ok(graph) = mutated(&plan.graph.to_string(), &mutations).parse::<Graph>() {
            drop(verify::graph(&graph));
        }
        if let Ok(plan) = mutated(&plan.to_string(), &mutations).parse::<Plan>() {
            drop(verify::plan(&plan));
        }
        if let Ok(program) = mutated(PROGRAM, &mutations).parse::<Program>() {
            drop(verify::program(&[program]));
        }
        drop(Plan::from_json(&mutated(&plan.to_json(), &mutations)));
        drop(verify::plan(&plan));
    }
}

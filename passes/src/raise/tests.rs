//! What is recovered, from the text of what a trace decomposes.

use super::{Report, raise};
use shardc_ir::{Graph, OpDef};

/// Raises the text of nodes of which `%y` is the output, with the types of leaves given in it.
fn raised(body: &str) -> (Graph, Report) {
    let text = format!("graph @case {{\n{body}\n  return y %y\n}}\n");
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{text}\n{error}"));
    raise(&graph).unwrap()
}

/// The names of the operations, leaves apart.
fn ops(graph: &Graph) -> Vec<String> {
    graph.nodes().filter(|(_, node)| !node.op.is_leaf()).map(|(_, node)| node.op.name().to_string()).collect()
}

fn check(body: &str, expected: &[&str]) {
    let (graph, report) = raised(body);
    assert_eq!(ops(&graph), expected, "{graph}\n{report:?}");
}

#[test]
fn root_mean_square_norm() {
    let leaves = "%x: f32[2,3,8] = input \"x\"\n%g: f32[8] = parameter \"g\"\n%s: f32[2,3,8] = mul %x, %x\n\
                  %t: f32[2,3] = reduce_sum %s {dims=[2]}\n%m: f32[2,3] = affine %t {offset=1e-5, scale=0.125}\n\
                  %gs: f32[2,3,8] = broadcast %g {dims=[2]}\n";
    let by_root = "%r: f32[2,3] = rsqrt %m\n%rs: f32[2,3,8] = broadcast %r {dims=[0,1]}\n%n: f32[2,3,8] = mul %x, %rs\n\
                   %y: f32[2,3,8] = mul %n, %gs";
    check(&format!("{leaves}{by_root}"), &["rms_norm"]);
    let quotient = "%r: f32[2,3] = sqrt %m\n%rs: f32[2,3,8] = broadcast %r {dims=[0,1]}\n%n: f32[2,3,8] = div %x, %rs\n\
                    %y: f32[2,3,8] = mul %gs, %n";
    let (graph, report) = raised(&format!("{leaves}{quotient}"));
    assert_eq!(ops(&graph), ["rms_norm"], "{graph}");
    assert!(report.fired[0].explanation.len() > 2, "{report:?}");
}

#[test]
fn layer_norm() {
    check(
        "%x: f32[3,8] = input \"x\"\n%g: f32[8] = parameter \"g\"\n%b: f32[8] = parameter \"b\"\n\
         %t: f32[3] = reduce_sum %x {dims=[1]}\n%m: f32[3] = affine %t {offset=0.0, scale=0.125}\n\
         %ms: f32[3,8] = broadcast %m {dims=[0]}\n%c: f32[3,8] = sub %x, %ms\n%s: f32[3,8] = mul %c, %c\n\
         %u: f32[3] = reduce_sum %s {dims=[1]}\n%v: f32[3] = affine %u {offset=1e-5, scale=0.125}\n\
         %r: f32[3] = sqrt %v\n%rs: f32[3,8] = broadcast %r {dims=[0]}\n%n: f32[3,8] = div %c, %rs\n\
         %gs: f32[3,8] = broadcast %g {dims=[1]}\n%p: f32[3,8] = mul %n, %gs\n\
         %bs: f32[3,8] = broadcast %b {dims=[1]}\n%y: f32[3,8] = add %p, %bs",
        &["layer_norm"],
    );
}

#[test]
fn gated_activation() {
    check(
        "%a: f32[3,8] = input \"a\"\n%b: f32[3,8] = input \"b\"\n%s: f32[3,8] = silu %a\n%y: f32[3,8] = mul %b, %s",
        &["swiglu"],
    );
    check(
        "%a: f32[3,8] = input \"a\"\n%b: f32[3,8] = input \"b\"\n%s: f32[3,8] = sigmoid %a\n\
         %t: f32[3,8] = mul %a, %s\n%y: f32[3,8] = mul %t, %b",
        &["swiglu"],
    );
}

#[test]
fn rotary_in_halves() {
    check(
        "%x: f32[2,3,4,8] = input \"x\"\n%cos: f32[3,4] = input \"cos\"\n%sin: f32[3,4] = input \"sin\"\n\
         %c: f32[2,3,4,4] = broadcast %cos {dims=[1,3]}\n%s: f32[2,3,4,4] = broadcast %sin {dims=[1,3]}\n\
         %l: f32[2,3,4,4] = slice %x {limit=[2,3,4,4], start=[0,0,0,0]}\n\
         %r: f32[2,3,4,4] = slice %x {limit=[2,3,4,8], start=[0,0,0,4]}\n\
         %lc: f32[2,3,4,4] = mul %l, %c\n%rs: f32[2,3,4,4] = mul %r, %s\n%a: f32[2,3,4,4] = sub %lc, %rs\n\
         %rc: f32[2,3,4,4] = mul %r, %c\n%ls: f32[2,3,4,4] = mul %l, %s\n%b: f32[2,3,4,4] = add %rc, %ls\n\
         %y: f32[2,3,4,8] = concat %a, %b {dim=3}",
        &["rotary"],
    );
}

#[test]
fn causal_attention_with_grouped_queries() {
    check(
        "%q: f32[2,3,4,8] = input \"q\"\n%k: f32[2,3,2,8] = input \"k\"\n%v: f32[2,3,2,8] = input \"v\"\n\
         %q1: f32[2,4,3,8] = transpose %q {permutation=[0,2,1,3]}\n\
         %k1: f32[2,2,3,8] = transpose %k {permutation=[0,2,1,3]}\n\
         %k2: f32[2,2,2,3,8] = broadcast %k1 {dims=[0,1,3,4]}\n%k3: f32[2,4,3,8] = reshape %k2\n\
         %v1: f32[2,2,3,8] = transpose %v {permutation=[0,2,1,3]}\n\
         %v2: f32[2,2,2,3,8] = broadcast %v1 {dims=[0,1,3,4]}\n%v3: f32[2,4,3,8] = reshape %v2\n\
         %s: f32[2,4,3,3] = matmul %q1, %k3 {spec=\"bhsd,bhtd->bhst\"}\n\
         %t: f32[2,4,3,3] = affine %s {offset=0.0, scale=0.35}\n\
         %i: i64[3,3] = iota {dim=0}\n%j: i64[3,3] = iota {dim=1}\n%m: bool[3,3] = gt %j, %i\n\
         %mm: bool[2,4,3,3] = broadcast %m {dims=[2,3]}\n%h: f32[2,4,3,3] = constant {value=\"-inf\"}\n\
         %u: f32[2,4,3,3] = select %mm, %h, %t\n%w: f32[2,4,3,3] = softmax %u\n\
         %o: f32[2,4,3,8] = matmul %w, %v3 {spec=\"bhst,bhte->bhse\"}\n\
         %y: f32[2,3,4,8] = transpose %o {permutation=[0,2,1,3]}",
        &["attention"],
    );
}

/// Batch and heads in one dimension, as batched products take them; with a mask of the keys of each batch element.
#[test]
fn attention_of_joined_heads() {
    let joined = |mask: &str| {
        let text = format!(
            "%q: f32[2,3,4,8] = input \"q\"\n%k: f32[2,3,2,8] = input \"k\"\n%v: f32[2,3,2,8] = input \"v\"\n\
             %q1: f32[2,4,3,8] = transpose %q {{permutation=[0,2,1,3]}}\n%q2: f32[8,3,8] = reshape %q1\n\
             %k1: f32[2,2,3,8] = transpose %k {{permutation=[0,2,1,3]}}\n\
             %k2: f32[2,2,2,3,8] = broadcast %k1 {{dims=[0,1,3,4]}}\n%k3: f32[2,4,3,8] = reshape %k2\n\
             %k4: f32[8,3,8] = reshape %k3\n%k5: f32[8,8,3] = transpose %k4 {{permutation=[0,2,1]}}\n\
             %v1: f32[2,2,3,8] = transpose %v {{permutation=[0,2,1,3]}}\n\
             %v2: f32[2,2,2,3,8] = broadcast %v1 {{dims=[0,1,3,4]}}\n%v3: f32[8,3,8] = reshape %v2\n\
             %s: f32[8,3,3] = matmul %q2, %k5 {{spec=\"gsd,gdt->gst\"}}\n\
             %t: f32[8,3,3] = affine %s {{offset=0.0, scale=0.35}}\n%h: f32[8,3,3] = constant {{value=\"-inf\"}}\n{mask}\
             %w: f32[8,3,3] = softmax %u\n%o: f32[8,3,8] = matmul %w, %v3 {{spec=\"gst,gte->gse\"}}\n\
             %o1: f32[2,4,3,8] = reshape %o\n%y: f32[2,3,4,8] = transpose %o1 {{permutation=[0,2,1,3]}}"
        );
        let graph = raised(&text).0;
        (graph.to_string(), ops(&graph))
    };
    let causal = "%i: i64[3,3] = iota {dim=0}\n%j: i64[3,3] = iota {dim=1}\n%m: bool[3,3] = gt %j, %i\n\
                  %mm: bool[8,3,3] = broadcast %m {dims=[1,2]}\n%u: f32[8,3,3] = select %mm, %h, %t\n";
    // As if they had never been joined, nor keys and values copied to the groups of queries.
    assert_eq!(joined(causal).1, ["attention"], "{}", joined(causal).0);
    let padding = "%p: bool[2,3] = input \"p\"\n%p1: bool[2,1,1,3] = reshape %p\n\
                   %p2: bool[2,4,1,3] = broadcast %p1 {dims=[0,1,2,3]}\n%p3: bool[8,1,3] = reshape %p2\n\
                   %p4: bool[8,3,3] = broadcast %p3 {dims=[0,1,2]}\n%u: f32[8,3,3] = select %p4, %h, %t\n";
    let (text, _) = joined(padding);
    assert!(text.contains("f32[2,1,1,3] = select"), "{text}");
    // One for each score is taken as it is.
    let added = "%p: f32[8,3,3] = input \"p\"\n%u: f32[8,3,3] = add %t, %p\n";
    let (text, _) = joined(added);
    assert!(text.contains("f32[2,4,3,3] = reshape"), "{text}");
}

/// `softmax(scores)` of a parameter `q` with itself, where `%u` is made of the scores `%s`.
fn with_scores(made: &str) -> String {
    format!(
        "%q: f32[2,4,3,8] = parameter \"q\"\n%s: f32[2,4,3,3] = matmul %q, %q {{spec=\"bhsd,bhtd->bhst\"}}\n{made}\
         %w: f32[2,4,3,3] = softmax %u\n%y: f32[2,4,3,8] = matmul %w, %q {{spec=\"bhst,bhte->bhse\"}}"
    )
}

/// A mask of the keys of each batch element, as padding is hidden, and one of another kind than causal.
#[test]
fn masks_of_scores_become_a_bias() {
    let hidden = "%h: f32[2,4,3,3] = constant {value=-1e9}\n";
    let padding = "%p: bool[2,3] = input \"p\"\n%p1: bool[2,1,1,3] = reshape %p\n\
                   %p2: bool[2,4,3,3] = broadcast %p1 {dims=[0,1,2,3]}\n";
    let (graph, _) = raised(&with_scores(&format!("{hidden}{padding}%u: f32[2,4,3,3] = select %p2, %h, %s\n")));
    let text = graph.to_string();
    assert_eq!(ops(&graph).iter().filter(|op| *op == "attention").count(), 1, "{text}");
    assert!(text.contains("f32[2,1,1,3] = select") && text.contains("value=-30000"), "{text}");
    let later = "%i: i64[3,3] = iota {dim=0}\n%j: i64[3,3] = iota {dim=1}\n%m: bool[3,3] = ge %j, %i\n\
                 %mm: bool[2,4,3,3] = broadcast %m {dims=[2,3]}\n%v: f32[2,4,3,3] = select %mm, %s, %h\n";
    let both = format!("{hidden}{padding}{later}%u: f32[2,4,3,3] = select %p2, %h, %v\n");
    let (graph, _) = raised(&with_scores(&both));
    let text = graph.to_string();
    assert!(text.contains("f32[1,1,3,3] = select") && text.contains("f32[2,1,3,3] = add"), "{text}");
}

#[test]
fn what_is_added_to_scores_becomes_a_bias_unless_it_is_learnt() {
    let added = |leaf: &str| {
        let made = format!(
            "%b: f32[4,3,3] = {leaf} \"b\"\n%c: f32[2,4,3,3] = broadcast %b {{dims=[1,2,3]}}\n\
             %u: f32[2,4,3,3] = add %c, %s\n"
        );
        let (graph, _) = raised(&with_scores(&made));
        ops(&graph).contains(&"attention".to_string())
    };
    assert!(added("input"));
    assert!(!added("parameter"));
}

/// No kernel holds the tiles of heads that are as large as this.
#[test]
fn attention_of_large_heads_stays_products() {
    let single = |size: u64| {
        let text = format!(
            "%q: f32[2,3,{size}] = input \"q\"\n%s: f32[2,3,3] = matmul %q, %q {{spec=\"bsd,btd->bst\"}}\n\
             %w: f32[2,3,3] = softmax %s\n%y: f32[2,3,{size}] = matmul %w, %q {{spec=\"bst,bte->bse\"}}"
        );
        ops(&raised(&text).0).contains(&"attention".to_string())
    };
    assert!(single(256) && !single(257));
}

#[test]
fn transposes_go_into_contractions() {
    let (graph, _) = raised(
        "%x: f32[3,4] = input \"x\"\n%w: f32[5,4] = parameter \"w\"\n%t: f32[4,5] = transpose %w {permutation=[1,0]}\n\
         %z: f32[3,5] = matmul %x, %t\n%y: f32[5,3] = transpose %z {permutation=[1,0]}",
    );
    assert_eq!(ops(&graph), ["matmul"]);
    let text = graph.to_string();
    assert!(text.contains("mk,nk->nm"), "{text}");
}

#[test]
fn transposes_of_biased_contractions_go() {
    let body = |sum: &str| {
        format!(
            "%x: f32[2,3,4] = input \"x\"\n%w: f32[4,5] = parameter \"w\"\n%b: f32[5] = parameter \"b\"\n\
             %z: f32[2,3,5] = matmul %x, %w {{spec=\"bsk,kn->bsn\"}}\n%c: f32[2,3,5] = broadcast %b {{dims=[2]}}\n\
             %s: f32[2,3,5] = add {sum}\n%y: f32[2,5,3] = transpose %s {{permutation=[0,2,1]}}"
        )
    };
    check(&body("%z, %c"), &["matmul", "broadcast", "add"]);
    // What reads the contraction as it is has to have it so.
    let (graph, _) = raised(&body("%z, %z"));
    assert_eq!(ops(&graph), ["matmul", "add", "transpose"]);
}

#[test]
fn pairs_go() {
    check(
        "%x: f32[3,4] = input \"x\"\n%a: f32[4,3] = transpose %x {permutation=[1,0]}\n\
         %b: f32[3,4] = transpose %a {permutation=[1,0]}\n%c: f32[12] = reshape %b\n%d: f32[3,4] = reshape %c\n\
         %one: f32[] = constant {value=1.0}\n%e: f32[3,4] = mul %d, %one\n\
         %f: f32[3,4] = affine %e {offset=1.0, scale=2.0}\n%y: f32[3,4] = affine %f {offset=0.0, scale=3.0}",
        &["affine"],
    );
}

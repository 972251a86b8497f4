//! What the verifier says of pipelines.

use crate::Plan;

/// Two layers in two chunks, the loss and the update of the second parameter.
const PLAN: &str = "graph @step {
  mesh pp=2,time mb=2
  pipeline 1f1b 1
  %0: f32[8@mb,4] = input \"x\" by i=mb
  %1: f32[4,4] = parameter \"a\" chunk 0
  %2: f32[4,4] = parameter \"b\" chunk 1
  %3: f32[8@mb,4] = matmul %0, %1 chunk 0 by m=mb
  %4: f32[8@mb,4] = matmul %3, %2 chunk 1 by m=mb
  %5: f32[]/sum(mb) = sum_squares %4 chunk 1 by i=mb
  %6: f32[4,4]/sum(mb) = matmul %3, %4 {spec=\"mk,mn->kn\"} grad_of %4 chunk 1 by m=mb
  %7: f32[8@mb,4] = matmul %4, %2 {spec=\"mk,nk->mn\"} grad_of %4 chunk 1 by m=mb
  %8: f32[4,4]/sum(mb) = matmul %0, %7 {spec=\"mk,mn->kn\"} grad_of %3 chunk 0 by m=mb
  %9: f32[4,4] = affine %8 {offset=0.0, scale=0.5} optimizer chunk 0
  %10: f32[4,4] = affine %6 {offset=0.0, scale=0.5} optimizer chunk 1
  %11: f32[] = sum_squares %9 optimizer chunk 0
  %12: f32[] = sum_squares %10 optimizer chunk 1
  %13: f32[] = add %11, %12 optimizer
  return loss %5
  return norm %13
  return update \"a\" %1 = %9
  return update \"b\" %2 = %10
}
";

#[track_caller]
fn check(edits: &[(&str, &str)], expect: &str) {
    let text = edits.iter().fold(PLAN.to_string(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    });
    let plan: Plan = text.parse().unwrap_or_else(|found| panic!("{found}\n{text}"));
    let found = match super::plan(&plan) {
        Ok(_) => "legal".to_string(),
        Err(found) => found.to_string(),
    };
    assert!(found.contains(expect), "{found}");
}

#[test]
fn legal_pipelines_and_others() {
    check(&[], "legal");
    check(&[("pp=2,", "")], "is in a chunk, and the mesh time mb=2 has no stages");
    check(&[("1f1b 1", "1f1b 1 lengths 1/2/3/0 1/2/3/4")], "legal");
    check(&[("1f1b 1", "1f1b 1 lengths 1/2/3/0")], "it has lengths of 1 chunk, and there are 2");
    check(&[("1f1b 1", "1f1b 1 in_flight 3")], "legal");
    check(&[("1f1b 1", "1f1b 1 in_flight 1")], "2 stages of schedule 1f1b have at least 2 chunks in flight, not 1");
    check(&[("1f1b 1", "gpipe 1 in_flight 2")], "all microbatches are in flight in schedule gpipe");
    check(&[("1f1b 1", "zbv 2 in_flight 0")], "at least one chunk in flight and at most 4294967296, not 0");
    check(&[("1f1b 1", "zbv 2 delayed 0")], "at least one chunk is delayed and at most 4294967296, not 0");
    check(&[("1f1b 1", "1f1b 1 delayed 2")], "gradients of weights are no pass of their own in schedule 1f1b");
    check(&[("1f1b 1", "interleaved 2 in_flight 3")], "at least 4 chunks in flight, not 3");
    check(&[("1f1b 1", "1f1b 2")], "a stage of schedule 1f1b runs one chunk, not 2");
    check(&[("1f1b 1", "interleaved 1")], "at least two chunks");
    check(&[("1f1b 1", "zbv 2")], "chunk 2 of 4 holds no node of the forward pass");
    check(&[("pp=2,time mb=2", "pp=3,time mb=2")], "chunk 2 of 3 holds no node");
    check(&[("mb=2", "mb=1")], "2 stages take at least 2 microbatches, and the step has 1");
    check(&[("\"b\" chunk 1", "\"b\" chunk 5")], "chunk 5: the last is 1");
    // A pipeline has one way.
    check(&[("%0, %1 chunk 0", "%0, %1 chunk 1"), ("%3, %2 chunk 1", "%3, %2 chunk 0")], "goes on to later chunks");
    check(&[("grad_of %4 chunk 1 by m=mb\n  %8", "grad_of %4 chunk 0 by m=mb\n  %8")], "legal");
    // What is stored lies where it is read.
    check(&[("\"a\" chunk 0", "\"a\" chunk 1")], "%1: a parameter lies in chunk 1, where nothing reads it");
    check(&[("\"a\" chunk 0", "\"a\"")], "a parameter lies in a chunk");
    check(&[("scale=0.5} optimizer chunk 0", "scale=0.5} optimizer chunk 1")], "stays in its chunk");
    // What is added up over the microbatches is read behind them in any chunk.
    check(&[("sum_squares %9 optimizer chunk 0", "sum_squares %8 optimizer chunk 1")], "legal");
    // Numbers of several chunks are combined outside of all.
    check(&[("%11, %12 optimizer", "%11, %12 optimizer chunk 1")], "is combined over the stages");
    check(&[("return norm %13", "return norm %10")], "no single number");
    check(&[("%3, %2 chunk 1 by", "%3, %2 by")], "it is in no chunk");
}

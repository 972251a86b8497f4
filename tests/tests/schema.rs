//! Every plan that is emitted conforms to the published schema, and the schema is strict.

use serde_json::{Value, json};
use shardc::{Batch, Cluster, NamedModel, Options};
use shardc_ir::text::PLAN_SCHEMA;
use shardc_ir::{DType, Plan};

/// Everything in a plan that the schema does not allow, each with its place.
fn violations(plan: &Value) -> Vec<String> {
    let schema = jsonschema::draft202012::new(&serde_json::from_str(PLAN_SCHEMA).unwrap()).unwrap();
    schema.iter_errors(plan).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

fn emitted(model: &str, cluster: &str, pins: &str, reduce_dtype: Option<DType>) -> String {
    let model = NamedModel::find(model).unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let options = Options { pins: pins.to_string(), reduce_dtype, ..Options::default() };
    let compiled = shardc::compile(&model, Batch { batch: 8, seq: 32 }, &cluster, &options);
    compiled.unwrap_or_else(|error| panic!("{pins}: {error}")).plan().to_json()
}

#[test]
fn every_plan_conforms() {
    for (cluster, pins) in [
        ("cpu:1", ""),
        ("cpu:4", ""),
        ("cpu:4", "dp=4,zero=3,microbatch=1"),
        ("cpu:4", "tp=4"),
        ("h100:8x1", "dp=4,tp=2,zero=2,microbatch=1"),
        ("cpu:2", "zero=1,recompute=block"),
        ("h100:2", "offload=optimizer@disk+activations:1"),
        ("h100:2", "zero=3,offload=parameters+optimizer+gradients:2"),
        ("h100:2x4", "fsdp=4,dp=2,zero=3,microbatch=1"),
        ("h100:8", "tp=2x2,dp=2"),
        ("h100:4", "cp=2,dp=2,microbatch=1"),
        ("h100:4", "ulysses=2,dp=2,microbatch=1"),
        ("h100:4", "ring=2,dp=2,microbatch=1"),
        ("cpu:4", "pp=2,dp=2,schedule=1f1b,microbatch=1"),
        ("cpu:4", "pp=2,tp=2,schedule=gpipe,microbatch=1,recompute=full"),
        ("cpu:2", "pp=2,schedule=interleaved,virtual=2,microbatch=1"),
        ("h100:2x4", "pp=2,dp=4,schedule=zbv,zero=1,microbatch=1"),
        ("h100:4", "pp=2,dp=2,schedule=1f1b,microbatch=1,stage_offload=optimizer+activations:1/optimizer@disk"),
    ] {
        check("llama-tiny", cluster, pins, None);
    }
    check("llama-tiny", "cpu:4", "dp=4,zero=1", Some(DType::Bf16));
    check("moe-tiny", "cpu:4", "ep=2,dp=2", None);
}

/// The plan keeps to the schema, and what is read is what was written, as a file and as text.
#[track_caller]
fn check(model: &str, cluster: &str, pins: &str, reduce_dtype: Option<DType>) {
    let text = emitted(model, cluster, pins, reduce_dtype);
    let plan: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(violations(&plan), Vec::<String>::new(), "{cluster} {pins}");
    let read = Plan::from_json(&text).unwrap_or_else(|error| panic!("{cluster} {pins}: {error}"));
    assert_eq!(read.to_json(), text, "{cluster} {pins}");
    let again = read.to_string().parse::<Plan>().unwrap_or_else(|found| panic!("{cluster} {pins}: {found}"));
    assert_eq!(again.to_string(), read.to_string(), "{cluster} {pins}");
    assert_eq!(again.pipeline, read.pipeline, "{cluster} {pins}");
}

#[test]
fn the_schema_is_strict() {
    let plan: Value = serde_json::from_str(&emitted("llama-tiny", "cpu:2", "", None)).unwrap();
    let check = |spoil: &dyn Fn(&mut Value), expect: &str| {
        let mut plan = plan.clone();
        spoil(&mut plan);
        let found = violations(&plan);
        assert!(found.len() == 1 && found[0].contains(expect), "{found:?}");
    };
    check(&|plan| plan["version"] = json!(99), "/version: 2 was expected");
    check(&|plan| plan["hash"] = json!("abc"), "/hash: \"abc\" does not match");
    let figure = |plan: &mut Value| plan["cluster"]["device"]["peak_bf16"]["value"] = json!("fast");
    check(&figure, "/cluster/device/peak_bf16/value: \"fast\" is not of type");
    check(&|plan| plan["cluster"]["racks"] = json!(2), "'racks' was unexpected");
    check(&|plan| plan["extra"] = json!(0), "'extra' was unexpected");
    check(&|plan| plan["request"]["batch"] = json!("8"), "/request/batch: \"8\" is not of type");
    check(
        &|plan| plan["prediction"]["memory"]["buffers"] = json!(-1),
        "/prediction/memory/buffers: -1 is less than the minimum",
    );
    check(&|plan| plan["mesh"][0]["kind"] = json!("sideways"), "/mesh/0/kind: \"sideways\" is not one of");
    check(&|plan| drop(plan.as_object_mut().and_then(|plan| plan.remove("graph"))), "\"graph\" is a required property");
}

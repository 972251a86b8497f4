//! Every plan that is emitted conforms to the published schema, and the schema is strict.

use serde_json::{Value, json};
use shardc::{Batch, Cluster, NamedModel, Options};
use shardc_ir::text::PLAN_SCHEMA;
use shardc_tests::schema::violations;

fn schema() -> Value {
    serde_json::from_str(PLAN_SCHEMA).unwrap()
}

fn emitted(cluster: &str, pins: &str) -> Value {
    let model = NamedModel::find("llama-tiny").unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let options = Options { pins: pins.to_string(), ..Options::default() };
    let compiled = shardc::compile(&model, Batch { batch: 8, seq: 32 }, &cluster, &options).unwrap();
    serde_json::from_str(&compiled.plan().to_json()).unwrap()
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
    ] {
        assert_eq!(violations(&emitted(cluster, pins), &schema()), Vec::<String>::new(), "{cluster} {pins}");
    }
}

#[test]
fn the_schema_is_strict() {
    let plan = emitted("cpu:2", "");
    let check = |spoil: &dyn Fn(&mut Value), expect: &str| {
        let mut plan = plan.clone();
        spoil(&mut plan);
        let found = violations(&plan, &schema());
        assert!(found.len() == 1 && found[0].contains(expect), "{found:?}");
    };
    check(&|plan| plan["version"] = json!(99), "plan.version: 99 breaks const 1");
    check(&|plan| plan["hash"] = json!("abc"), "plan.hash: \"abc\" breaks pattern");
    check(&|plan| plan["extra"] = json!(0), "`extra` is not in the schema");
    check(&|plan| plan["request"]["batch"] = json!("8"), "plan.request.batch: \"8\" breaks type");
    check(&|plan| plan["prediction"]["memory"]["buffers"] = json!(-1), "breaks minimum 0");
    check(&|plan| plan["mesh"][0]["kind"] = json!("sideways"), "plan.mesh[0].kind: \"sideways\" breaks enum");
    check(&|plan| drop(plan.as_object_mut().and_then(|plan| plan.remove("graph"))), "\"graph\" is missing");
}

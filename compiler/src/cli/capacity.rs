//! `shardc plan --maximize`: the largest that fits.

use super::args::MaximizeArg;
use super::{plan_json, print, print_json, thousands};
use serde_json::json;
use shardc::capacity::{self, Dimension, Largest};
use shardc::compile::Compiled;
use shardc::{Batch, Cluster, Error, NamedModel, Options, report};

/// Finds and prints the largest size that fits; gives its plan.
pub fn maximize(
    model: &NamedModel,
    batch: Batch,
    cluster: &Cluster,
    options: &Options,
    size: MaximizeArg,
    json: bool,
) -> Result<Compiled, Error> {
    let dimension = match size {
        MaximizeArg::Layers => Dimension::Layers,
        MaximizeArg::Batch => Dimension::Batch,
        MaximizeArg::Seq => Dimension::Seq,
    };
    let Largest { size, parameters, compiled, beyond, tried } =
        capacity::maximize(model, batch, cluster, options, dimension)?;
    if json {
        let mut answer = plan_json(compiled.plan());
        answer["maximize"] =
            json!({"of": dimension, "size": size, "parameters": parameters, "beyond": beyond, "tried": tried});
        print_json(&answer);
        return Ok(compiled);
    }
    let what = dimension.text(size);
    print(&format!("the largest that fits: {what} ({} parameters; {tried} sizes tried)\n", thousands(parameters)));
    if let Some(beyond) = beyond {
        print(&format!("beyond it: {beyond}\n"));
    }
    print(&format!("\n{}", report::plan_text(compiled.plan())));
    Ok(compiled)
}

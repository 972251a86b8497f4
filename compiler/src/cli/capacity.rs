//! `shardc plan --maximize`: the largest that fits.

use super::args::MaximizeArg;
use super::log::say;
use super::{plan_json, print, print_json, thousands};
use serde_json::json;
use shardc::capacity::{self, Dimension, Largest};
use shardc::compile::Compiled;
use shardc::{Batch, Cluster, Error, NamedModel, Options, report};
use shardc_ir::units::counted;

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
    // Each size is a search of its own: whoever waits sees that it goes on.
    let observe = |size: u64, fits: bool| {
        let fits = if fits { "fits" } else { "does not fit" };
        say(&format!("tried {}: {fits}\n", dimension.text(size)));
    };
    let Largest { size, parameters, compiled, beyond, tried } =
        capacity::maximize(model, batch, cluster, options, dimension, &observe)?;
    if json {
        let mut answer = plan_json(compiled.plan());
        let (next, beyond) = beyond.unzip();
        answer["maximize"] = json!({
            "of": dimension, "size": size, "multiple_of": dimension.unit(), "parameters": parameters,
            "next": next, "beyond": beyond, "tried": tried,
        });
        print_json(&answer);
        return Ok(compiled);
    }
    let what = dimension.text(size);
    let mut unit = if dimension.unit() > 1 { format!(", multiples of {}", dimension.unit()) } else { String::new() };
    if let Some(apart) = beyond.as_ref().map(|(next, _)| next - size).filter(|apart| *apart > dimension.unit()) {
        unit.push_str(&format!(", to within {apart}"));
    }
    let parameters = thousands(parameters);
    let tried = counted(tried, "size");
    print(&format!("the largest that fits: {what} ({parameters} parameters; {tried} tried{unit})\n"));
    if let Some((next, beyond)) = beyond {
        print(&format!("beyond it, {}: {beyond}\n", dimension.text(next)));
    } else if size >= dimension.most() {
        print(&format!("more may fit: {} are the most that are tried\n", dimension.text(size)));
    } else if let (Dimension::Seq, Some(positions)) = (dimension, model.positions()) {
        print(&format!("more may fit: {} has {positions} positions\n", model.name));
    }
    print(&format!("\n{}", report::plan_text(compiled.plan())));
    Ok(compiled)
}

//! Devices that are another with a few figures replaced: the same chip with slower links, less memory or
//! a lower clock. `profiles/variants.json` lists them; each replaced figure has its own source, the others
//! are those of the device that they are like.

use super::{Figure, Profile};
use serde::Deserialize;
use std::collections::BTreeMap;

const VARIANTS: &str = include_str!("../../profiles/variants.json");

/// One such device.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variant {
    name: String,
    like: String,
    figures: BTreeMap<String, Figure>,
}

/// The names of all variants, as they are written.
#[cfg(test)]
pub(super) fn names() -> Vec<String> {
    let variants: Vec<Variant> = serde_json::from_str(VARIANTS).unwrap();
    variants.into_iter().map(|variant| variant.name).collect()
}

/// Adds the variants of these profiles to them. One that names a device or a figure that is not there is left out.
pub(super) fn add(profiles: &mut BTreeMap<String, Profile>) {
    let variants: Vec<Variant> = serde_json::from_str(VARIANTS).unwrap_or_default();
    for Variant { name, like, figures } in variants {
        let Some(mut profile) = profiles.get(&like).cloned() else { continue };
        let mut replace = |(figure, value): (String, Figure)| profile.figure_mut(&figure).map(|(_, at)| *at = value);
        if figures.into_iter().all(|figure| replace(figure).is_some()) {
            profile.name.clone_from(&name);
            profiles.insert(name, profile);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_is_a_device() {
        let variants: Vec<Variant> = serde_json::from_str(VARIANTS).unwrap();
        let shipped = Profile::shipped();
        for variant in variants {
            let (profile, like) = (&shipped[&variant.name], &shipped[&variant.like]);
            let replaced = profile.figures().into_iter().zip(like.figures()).filter(|(own, base)| own.1 != base.1);
            assert_eq!(replaced.count(), variant.figures.len(), "{}", variant.name);
        }
    }
}

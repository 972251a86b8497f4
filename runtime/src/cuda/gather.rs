//! What the ranks of a run tell each other.

use super::device::Failure;
use crate::launch::World;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What every rank gives, in their order; all ranks call this in the same order.
pub fn gather<T: Serialize + DeserializeOwned>(world: &World, name: &str, value: &T) -> Result<Vec<T>, Failure> {
    let bytes = serde_json::to_vec(value).map_err(|error| error.to_string())?;
    let all = world.gather(name, &bytes).map_err(|error| error.to_string())?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(|error| format!("{name}: {error}"))).collect()
}

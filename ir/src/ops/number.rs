//! Numbers in files. JSON has no infinities: they are written as the strings `inf`, `-inf` and `NaN`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number as it is written.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Finite(f64),
    Text(String),
}

impl From<f64> for Written {
    fn from(value: f64) -> Self {
        if value.is_finite() { Self::Finite(value) } else { Self::Text(value.to_string()) }
    }
}

impl Written {
    fn read<E: serde::de::Error>(self) -> Result<f64, E> {
        match self {
            Self::Finite(value) => Ok(value),
            Self::Text(text) => text.parse().map_err(|_| E::custom(format!("`{text}` is no number"))),
        }
    }
}

pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Written::from(*value).serialize(serializer)
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Written::deserialize(deserializer)?.read()
}

/// Lists of them.
pub mod each {
    use super::{Deserialize, Deserializer, Serializer, Written};

    pub fn serialize<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| Written::from(*value)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
        Vec::<Written>::deserialize(deserializer)?.into_iter().map(Written::read).collect()
    }
}
